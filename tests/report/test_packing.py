"""What ``wlb compare`` calls speed: work done in a second, with everything trained, as ``wlb simulate`` has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from wlb.documents.filling import documents_for
from wlb.documents.segments import Segment
from wlb.packing.carrying import FixedGreedyPacker
from wlb.packing.options import PackingOptions
from wlb.packing.plan import StepPlan
from wlb.report.packing import MethodResult, compare_packer, compared_rows, comparison_json, packer_for
from wlb.simulate import SimulationResult, simulate, simulated_job

WINDOW = 131_072
JOB = simulated_job("7b", WINDOW, micro_batches=4, tp=8, dp=2, pp=2)
MICRO_BATCHES = JOB.packing.micro_batches


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
    assert row.speed_in_tokens == pytest.approx(row.speed_at_equal_work, rel=0.01)


def test_the_first_row_is_one_and_arrangement_alone_a_row_of_its_own():
    documents, _ = documents_for(lengths(), MICRO_BATCHES, WINDOW)
    results = [compare_packer(name, packer_for(name, JOB), documents, JOB) for name in ("sequential", "makespan")]
    rows = compared_rows(results)
    assert [row.name for row in rows] == ["sequential", "sequential, arranged", "makespan"]
    assert (rows[0].speed_at_equal_work, rows[0].speed_in_tokens) == (1.0, 1.0)
    assert rows[0].simulated == results[0].as_packed
    assert rows[1].simulated == results[0].arranged
    assert rows[1].speed_at_equal_work > 1  # the same packing, so the same work and the same tokens
    assert rows[1].speed_in_tokens == pytest.approx(rows[1].speed_at_equal_work)
    objects = comparison_json(results)
    assert [one["method"] for one in objects] == ["sequential", "makespan"]
    assert [one["speed_at_equal_work"] for one in objects] == [row.speed_at_equal_work for row in rows[1:]]
    assert objects[0]["speed_at_equal_work_as_packed"] == 1.0


def test_it_is_the_speed_that_the_simulator_finds():
    """For the same job, packer and documents, over enough steps that neither the tail nor the first ones matter."""
    window = 65_536
    sizes = np.random.default_rng(1).lognormal(np.log(window / 16), 1.3, 5000)
    corpus = sizes.clip(64, window).astype(np.int64)
    common = simulated_job("7b", window, tp=8, cp=2, dp=2, pp=2)
    common = replace(common, data=common.data.model_copy(update={"shuffle": False}))
    steps = int(corpus.sum()) // (common.global_batch * window)
    documents, _ = documents_for(corpus, common.global_batch, window)

    def simulated(method: str, **arranged: str) -> SimulationResult:
        packing = common.packing.changed(method=method, **arranged)
        return simulate(replace(common, packing=packing), corpus, steps, work_prices=common.work_prices)

    def compared(method: str) -> MethodResult:
        return compare_packer(method, packer_for(method, common), documents, common)

    base, usual = simulated("sequential", assignment="arrival", order="arrival"), compared("sequential")
    for method in ("fixed_greedy", "variable_length", "makespan"):
        result, row = simulated(method), compared(method)
        speed = row.arranged.work_rate / usual.as_packed.work_rate
        assert speed == pytest.approx(result.speed_at_equal_work(base), rel=0.005), method
        assert row.mean_token_delay == pytest.approx(result.token_delay, abs=0.02), method
