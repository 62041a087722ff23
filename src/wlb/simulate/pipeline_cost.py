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
from wlb.packing.phases import micro_batch_seconds
from wlb.packing.pipeline_order import Pipeline
from wlb.packing.plan import StepPlan
from wlb.schedules.makespan import pipeline_makespans
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
    """Simulated seconds of all steps so far: as arranged, perfectly balanced, and spent on work."""

    def __init__(self, cluster: Cluster, workload: Workload, assignment: Assignment, order: Order) -> None:
        self._cluster = cluster
        self._workload = workload
        self._assignment = assignment
        self._order = order
        self.seconds = 0.0
        self._balanced_seconds = 0.0
        self._work_seconds = 0.0  # of one process that does everything

    def add(self, plans: Sequence[StepPlan]) -> None:
        for group in in_groups(plans, _STEPS_AT_A_TIME):
            self._price([self._arrange(plan) for plan in group])

    @property
    def ratio(self) -> float:
        """Seconds over those of perfectly balanced steps."""
        return self.seconds / self._balanced_seconds if self._balanced_seconds else 1.0

    @property
    def busy_share(self) -> float:
        """Share of the time of all pipeline stages that is spent on work."""
        stages = self._cluster.dp * self._cluster.pp
        return self._work_seconds / (stages * self.seconds) if self.seconds else 0.0

    def _arrange(self, plan: StepPlan) -> StepPlan:
        pipeline = Pipeline(self._cluster.schedule, self._cluster.pp, self._workload)
        return arrange(plan, self._cluster.dp, assignment=self._assignment, order=self._order, pipeline=pipeline)

    def _price(self, plans: Sequence[StepPlan]) -> None:
        seconds = np.stack([micro_batch_seconds(plan.ranks, self._workload) for plan in plans])
        mean = seconds.mean(axis=(2, 3), keepdims=True)
        self.seconds += float(self._makespans(seconds).max(axis=1).sum())
        self._balanced_seconds += float(self._makespans(np.broadcast_to(mean, seconds.shape)).max(axis=1).sum())
        self._work_seconds += float(seconds.sum())

    def _makespans(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of every step's every rank, (steps, dp), from ``seconds`` (steps, phase, dp, micro-batches)."""
        stages = self._cluster.pp
        staged = np.repeat(seconds[:, :, :, None, :] / stages, stages, axis=3)
        return pipeline_makespans(self._cluster.schedule, staged[:, 0], staged[:, 1])


def in_groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """``items`` in lists of ``size``, the last one shorter."""
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group
