"""What every GPU of a simulated step does, and when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb.job.job import Job
from wlb.packing.plan import StepPlan
from wlb.schedules.operations import BACKWARD, FORWARD, INPUT, WEIGHT, Operation
from wlb.simulate.rate import simulate_step

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """The operations of a step on every rank, in seconds from the start of the step.

    A context-parallel group runs an operation from ``starts`` to ``ends``. Each rank computes for ``compute`` seconds,
    then communicates and waits for the others. In a level step only the ranks that a micro-batch names run its
    operations. After its last operation a pipeline rank waits for its data-parallel peers, reduces gradients and
    updates weights.
    """

    job: Job
    plan: StepPlan
    operations: tuple[Operation, ...]
    pipeline_ranks: tuple[int, ...]  # of each operation
    starts: Array  # (operations, dp)
    ends: Array  # (operations, dp)
    compute: Array  # (operations, dp, cp)
    rank_ends: Array  # (pp, dp)
    reduction: Array  # (pp,)
    optimizer: Array  # (pp,)
    seconds: float  # of the whole step

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The (dp, cp) ranks that run different operations: one per group in lock step, or all of a level step."""
        own = self.job.layout.cp if self.job.levels_steps else 1
        return [(dp, cp) for dp in range(self.job.layout.dp) for cp in range(own)]

    def operations_of(self, dp: int, cp: int) -> list[int]:
        """The indices in ``operations`` that a rank runs."""
        named = [micro_batch.ranks for micro_batch in self.plan.ranks[dp]]
        ranks = [named[operation.micro_batch] for operation in self.operations]
        return [index for index, members in enumerate(ranks) if not members or cp in members]


def timeline(plan: StepPlan, job: Job) -> Timeline:
    """The timeline of one step that is already dealt to the data-parallel ranks of ``job``."""
    steps = simulate_step(plan, job)
    times, (forward, backward) = steps.pipelines, steps.computing
    weights = 0.0 if steps.weights is None else steps.weights[..., None]
    computed = {FORWARD: forward, BACKWARD: backward, INPUT: backward - weights, WEIGHT: weights + 0 * backward}
    home = {stage: rank for rank, stages in enumerate(job.layout.rank_stages) for stage in stages}
    reduction = steps.late_reduction[:, 0]
    rank_ends = times.rank_ends[:, 0]
    return Timeline(
        job,
        plan,
        times.operations,
        tuple(home[operation.stage] for operation in times.operations),
        times.starts[:, 0],
        times.ends[:, 0],
        np.stack([computed[o.kind][0, :, o.stage, o.micro_batch] for o in times.operations]),
        rank_ends,
        reduction,
        steps.costs.optimizer,
        float((rank_ends.max(axis=1) + reduction + steps.costs.optimizer).max()),
    )
