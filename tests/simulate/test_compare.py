"""What ``wlb compare`` calls speed: work done in a second, with everything trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from wlb.documents.filling import documents_for
from wlb.documents.segments import Segment
from wlb.packing.fixed import FixedGreedyPacker, FixedOptions
from wlb.packing.packer import PackingTask
from wlb.packing.plan import StepPlan
from wlb.simulate.compare import Cluster, compare_packer, compared_rows, comparison_json, packer_for
from wlb.workload import make_workload

WINDOW = 131_072
CLUSTER = Cluster(8, WINDOW, dp=2, pp=2)
WORKLOAD = make_workload("7b", "h100", tp=8)


class LeavesLongOnes(FixedGreedyPacker):
    """Keeps every document of half a window or more until the end."""

    def __init__(self, task: PackingTask, options: FixedOptions) -> None:
        super().__init__(task, options)
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
    documents, _ = documents_for(lengths(), CLUSTER.micro_batches, WINDOW)
    task = PackingTask(CLUSTER.micro_batches, WINDOW, WORKLOAD)
    usual, leaving = (
        compare_packer(name, packer(task, FixedOptions()), documents, CLUSTER, WORKLOAD)
        for name, packer in (("usual", FixedGreedyPacker), ("leaving", LeavesLongOnes))
    )
    assert leaving.tokens_out == leaving.tokens_in
    assert leaving.imbalance_degree < 1.1 < usual.imbalance_degree
    _, _, row = compared_rows([usual, leaving])
    assert row.speed_at_equal_work < usual.pipeline_cost / leaving.pipeline_cost_arranged  # as before the long ones
    # The same tokens and the same work, in the same seconds.
    assert row.speed_in_tokens == pytest.approx(row.speed_at_equal_work, rel=0.01)


def test_the_first_row_is_one_and_arrangement_alone_a_row_of_its_own():
    documents, _ = documents_for(lengths(), CLUSTER.micro_batches, WINDOW)
    results = [
        compare_packer(name, packer_for(name, CLUSTER, WORKLOAD), documents, CLUSTER, WORKLOAD)
        for name in ("sequential", "makespan")
    ]
    rows = compared_rows(results)
    assert [row.name for row in rows] == ["sequential", "sequential, arranged", "makespan"]
    assert (rows[0].speed_at_equal_work, rows[0].speed_in_tokens) == (1.0, 1.0)
    assert rows[0].pipeline_cost == results[0].pipeline_cost
    assert rows[1].pipeline_cost == results[0].pipeline_cost_arranged
    assert rows[1].speed_at_equal_work > 1  # the same packing, so the same work and the same tokens
    assert rows[1].speed_in_tokens == pytest.approx(rows[1].speed_at_equal_work)
    objects = comparison_json(results)
    assert [one["method"] for one in objects] == ["sequential", "makespan"]
    assert [one["speed_at_equal_work"] for one in objects] == [row.speed_at_equal_work for row in rows[1:]]
    assert objects[0]["speed_at_equal_work_as_packed"] == 1.0
