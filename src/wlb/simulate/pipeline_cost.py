"""What the steps of a plan cost on a pipeline, beside perfectly balanced ones and beside the work that they do.

The micro-batches of every step are dealt to data-parallel ranks, as packed or with balanced assignment and order
(``wlb.packing.arrange``), and replayed through the pipeline schedule. Steps are priced in groups, so memory does not
grow with the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.packing.arrange import Assignment, Order, arrange
from wlb.packing.pipeline_order import Pipeline, micro_batch_seconds
from wlb.packing.plan import StepPlan
from wlb.schedules.timing import pipeline_makespans
from wlb.workload.base import Workload

_STEPS_AT_A_TIME = 64

T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    """The dimensions of a job that packing's cost depends on."""

    micro_batches: int
    context_window: int
    dp: int = 1
    pp: int = 4
    schedule: str = "1f1b"


class PipelineCost:
    """Simulated seconds of all steps so far: as arranged, perfectly balanced, and spent on work.

    ``ratio`` compares whole steps only. ``seconds`` and ``busy_share`` also count the tail, so that a packer gains
    nothing by leaving the documents that are hard to balance for the end.
    """

    def __init__(self, cluster: Cluster, workload: Workload, assignment: Assignment, order: Order) -> None:
        self._cluster = cluster
        self._workload = workload
        self._assignment = assignment
        self._order = order
        self.seconds = 0.0
        self._whole_steps_seconds = 0.0
        self._balanced_seconds = 0.0
        self._work_seconds = 0.0  # of one process that does everything

    def add(self, plans: Sequence[StepPlan]) -> None:
        for group in in_groups(plans, _STEPS_AT_A_TIME):
            seconds = self._take(group)
            mean = np.broadcast_to(seconds.mean(axis=(2, 3), keepdims=True), seconds.shape)
            self._whole_steps_seconds += self._step_seconds(seconds)
            self._balanced_seconds += self._step_seconds(mean)

    def add_tail(self, plans: Sequence[StepPlan]) -> None:
        """Count the steps that ``drain`` leaves, which are shorter than a step."""
        for group in in_groups(plans, _STEPS_AT_A_TIME):
            self._take(group)

    @property
    def ratio(self) -> float:
        """Seconds of the whole steps over those of perfectly balanced ones."""
        return self._whole_steps_seconds / self._balanced_seconds if self._balanced_seconds else 1.0

    @property
    def busy_share(self) -> float:
        """Share of the time of all pipeline stages that is spent on work: predicted seconds of what was trained."""
        stages = self._cluster.dp * self._cluster.pp
        return self._work_seconds / (stages * self.seconds)

    def _arrange(self, plan: StepPlan) -> StepPlan:
        pipeline = Pipeline(self._cluster.schedule, self._cluster.pp, self._workload)
        return arrange(plan, self._cluster.dp, assignment=self._assignment, order=self._order, pipeline=pipeline)

    def _take(self, plans: Sequence[StepPlan]) -> NDArray[np.float64]:
        """Count ``plans``; returns the seconds of every micro-batch, shape (steps, phase, dp, micro-batches)."""
        arranged = [self._arrange(plan) for plan in plans]
        seconds = np.stack([micro_batch_seconds(plan.ranks, self._workload) for plan in arranged])
        self.seconds += self._step_seconds(seconds)
        self._work_seconds += float(seconds.sum())
        return seconds

    def _step_seconds(self, seconds: NDArray[np.float64]) -> float:
        """Of all steps together, from ``seconds`` of shape (steps, phase, dp, micro-batches)."""
        stages = self._cluster.pp
        staged = np.repeat(seconds[:, :, :, None, :] / stages, stages, axis=3)
        makespans = pipeline_makespans(self._cluster.schedule, staged[:, 0], staged[:, 1])  # (steps, dp)
        return float(makespans.max(axis=1).sum())


def in_groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """``items`` in lists of ``size``, the last one shorter."""
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group
