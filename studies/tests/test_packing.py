"""What ``packing`` calls speed: tokens in a second, with everything trained, as in ``wlb simulate``."""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.packing.streams import SETTINGS, segments_of, streams
from tests.packing.streams import packer_for as packer_of
from wlb.documents.segments import Segment
from wlb.packing.carrying import FixedGreedyPacker
from wlb.packing.options import PackingOptions
from wlb.packing.plan import StepPlan
from wlb.simulate import SimulationResult, simulate, simulated_job
from wlb_studies.filling import documents_for
from wlb_studies.packing import (
    MethodResult,
    PackingStatistics,
    compare_packer,
    compared_rows,
    comparison_json,
    packer_for,
)

WINDOW = 131_072
JOB = simulated_job("7b", WINDOW, micro_batches=4, tp=8, dp=2, pp=2)
MICRO_BATCHES = JOB.global_batch


class LeavesLongOnes(FixedGreedyPacker):
    """Keeps every document of half a window or more until the end."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._left: list[Segment] = []

    def plan(self, documents: Iterable[Any]) -> list[StepPlan]:
        documents = list(documents)
        self._left += [document for document in documents if document.length >= WINDOW // 2]
        return super().plan([document for document in documents if document.length < WINDOW // 2])

    def drain(self) -> list[StepPlan]:
        return super().plan(self._left) + super().drain()


def lengths() -> np.ndarray[Any, Any]:
    return np.where(np.arange(1000) % 20, 6000, WINDOW)


def test_leaving_long_documents_for_the_end_is_no_gain():
    documents, _ = documents_for(lengths(), MICRO_BATCHES, WINDOW)
    settings = MICRO_BATCHES, WINDOW, JOB.workload, PackingOptions(method="fixed_greedy")
    usual, leaving = (
        compare_packer(name, packer(*settings), documents, JOB)
        for name, packer in (("usual", FixedGreedyPacker), ("leaving", LeavesLongOnes))
    )
    assert leaving.tokens_out == leaving.tokens_in
    assert leaving.imbalance_degree < 1.1 < usual.imbalance_degree
    _, _, row = compared_rows([usual, leaving])
    assert (
        row.speed_at_equal_work < usual.as_packed.pipeline_cost / leaving.arranged.pipeline_cost
    )  # as before the long ones
    # The same tokens and the same work, in the same seconds.
    assert row.speedup == pytest.approx(row.speed_at_equal_work, rel=0.01)


def test_the_first_row_is_one_and_arrangement_alone_a_row_of_its_own():
    documents, _ = documents_for(lengths(), MICRO_BATCHES, WINDOW)
    results = [compare_packer(name, packer_for(name, JOB), documents, JOB) for name in ("sequential", "balanced")]
    rows = compared_rows(results)
    assert [row.name for row in rows] == ["sequential", "sequential, arranged", "balanced"]
    assert (rows[0].speed_at_equal_work, rows[0].speedup) == (1.0, 1.0)
    assert rows[0].simulated == results[0].as_packed
    assert rows[1].simulated == results[0].arranged
    assert rows[1].speed_at_equal_work > 1  # the same packing, so the same work and the same tokens
    assert rows[1].speedup == pytest.approx(rows[1].speed_at_equal_work)
    objects = comparison_json(results)
    assert [one["method"] for one in objects] == ["sequential", "balanced"]
    assert [one["speed_at_equal_work"] for one in objects] == [row.speed_at_equal_work for row in rows[1:]]


def test_it_is_the_speed_that_the_simulator_finds():
    """For the same job, packer and documents, over enough steps that neither the tail nor the first ones matter."""
    window = 65_536
    sizes = np.random.default_rng(1).lognormal(np.log(window / 16), 1.3, 5000)
    corpus = sizes.clip(64, window).astype(np.int64)
    common = simulated_job("7b", window, tp=8, cp=2, dp=2, pp=2)
    common = replace(common, data=common.data.model_copy(update={"shuffle": False}))
    steps = int(corpus.sum()) // (common.global_batch * window)
    documents, _ = documents_for(corpus, common.global_batch, window)

    common = replace(common, layout=replace(common.layout, schedule="1f1b", pool=common.layout.cp))
    given = {"balanced": {"max_length_factor": 1.5} | {"rank_micro_batches": common.rank_micro_batches}}

    def simulated(method: str, **arranged: str) -> SimulationResult:
        packing = common.packing.changed(method=method, **given.get(method, {}), **arranged)
        return simulate(replace(common, packing=packing), corpus, steps, work_prices=common.work_prices)

    def compared(method: str) -> MethodResult:
        return compare_packer(method, packer_for(method, common, max_length_factor=1.5), documents, common)

    base, usual = simulated("sequential", assignment="arrival", order="arrival"), compared("sequential")
    for method in ("fixed_greedy", "variable_length", "balanced"):
        result, row = simulated(method), compared(method)
        speed = row.arranged.tokens_per_second / usual.as_packed.tokens_per_second
        assert speed == pytest.approx(result.speedup(base), rel=0.01), method
        assert row.mean_token_delay == pytest.approx(result.token_delay, abs=0.02), method


@SETTINGS
@given(streams())
def test_totals_are_what_the_plans_hold(stream):
    lengths = stream[2]
    packer = packer_of(stream)
    plans, tail = packer.plan(lengths), packer.drain()
    totals = PackingStatistics()
    for start in range(0, len(plans), 2):
        totals.add(plans[start : start + 2])
    totals.add_tail(tail)

    assert [row for plan in plans for row in plan.table.tolist()] == [[*s] for s in segments_of(plans)]
    assert totals.steps == len(plans)
    assert totals.tokens == sum(segment.length for segment in segments_of(plans + tail)) == sum(lengths)
    assert totals.longest_delay == max([plan.longest_delay for plan in plans + tail], default=0)
    delay = sum(plan.delay_token_steps for plan in plans + tail)
    assert totals.mean_token_delay == (delay / sum(lengths) if lengths else 0.0)
    if plans:
        degrees = []
        for plan in plans:
            workloads = [micro_batch.workload for micro_batch in plan.micro_batches]
            degrees.append(max(workloads) / statistics.fmean(workloads))
        assert totals.imbalance_degree == pytest.approx(statistics.fmean(degrees))
        tokens = [plan.tokens for plan in plans]
        assert totals.tokens_per_step_cv == pytest.approx(statistics.pstdev(tokens) / statistics.fmean(tokens))


def test_nothing_planned_is_balanced_and_undelayed():
    totals = PackingStatistics()
    assert (totals.steps, totals.tokens, totals.longest_delay) == (0, 0, 0)
    assert (totals.imbalance_degree, totals.mean_token_delay, totals.tokens_per_step_cv) == (1.0, 0.0, 0.0)
