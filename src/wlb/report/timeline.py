"""What every GPU of a simulated step does, and when."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wlb.job.job import Job
from wlb.packing.plan import StepPlan
from wlb.schedules.operations import BACKWARD, FORWARD, HEAD, INPUT, WEIGHT, Operation
from wlb.simulate.level import LevelSteps
from wlb.simulate.rate import simulate_steps
from wlb.simulate.step import EVERYTHING, Steps
from wlb.simulate.verdict import LOST, PARTS

Array = NDArray[np.float64]
WAITING, BUBBLES, EXCHANGE = LOST


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
    steps: Steps | LevelSteps  # this step alone, as it was simulated
    operations: tuple[Operation, ...]
    pipeline_ranks: NDArray[np.intp]  # (operations, dp); data-parallel ranks may deal heads differently
    starts: Array  # (operations, dp)
    ends: Array  # (operations, dp)
    compute: Array  # (operations, dp, cp)
    rank_ends: Array  # (pp, dp)
    reduction: Array  # (pp,)
    optimizer: Array  # (pp,)

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return float(self.steps.seconds[0])

    @property
    def lost(self) -> float:
        """The share of the step that is lost to imbalance, as a verdict counts it."""
        where = self.steps.where
        return sum(max(0.0, sum(float(where[cause][0]) for cause in PARTS[part])) for part in LOST) / self.seconds

    @cached_property
    def in_operations(self) -> dict[str, Array]:
        """How long the mean rank of a group works in each operation, exchanges K/V and waits; (operations, dp) each.

        Work is computing, and communication other than of keys and values.
        """
        uneven = self._seconds_without(*PARTS[EXCHANGE])
        work = np.minimum(uneven, self._seconds_without(*PARTS[WAITING], *PARTS[EXCHANGE]))
        return {"work": work, EXCHANGE: self.ends - self.starts - uneven, WAITING: uneven - work}

    def _seconds_without(self, *causes: str) -> Array:
        return replace(self.steps, modelled=EVERYTHING - {*causes}).pipelines.seconds[:, 0]

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The (dp, cp) ranks that run different operations: one per group in lock step, or all of a level step."""
        own = self.job.layout.pool_size if self.job.levels_steps else 1
        return [(dp, cp) for dp in range(self.job.layout.pools) for cp in range(own)]

    def operations_of(self, dp: int, cp: int) -> list[int]:
        """The indices in ``operations`` that a rank runs."""
        named = [micro_batch.ranks for micro_batch in self.plan.ranks[dp]]
        ranks = [named[operation.micro_batch] for operation in self.operations]
        return [index for index, members in enumerate(ranks) if not members or cp in members]


def timeline(plan: StepPlan, job: Job) -> Timeline:
    """The timeline of one step that is already dealt to the data-parallel ranks of ``job``."""
    steps = simulate_steps([plan], job)
    times, (forward, backward) = steps.pipelines, steps.computing
    weights = steps.weights[..., None]
    computed = {FORWARD: forward, BACKWARD: backward, INPUT: backward - weights, WEIGHT: weights + 0 * backward}
    pipeline_ranks = np.array([[one.stage % job.layout.pp] * job.layout.pools for one in times.operations])
    if isinstance(steps, Steps):
        computed[HEAD] = np.broadcast_to(steps.head.both[:, :, None], forward.shape)
        for place, one in enumerate(times.operations):
            if one.kind == HEAD:
                pipeline_ranks[place] = steps.head_stages[0, :, one.micro_batch]
    return Timeline(
        job,
        plan,
        steps,
        times.operations,
        pipeline_ranks,
        times.starts[:, 0],
        times.ends[:, 0],
        np.stack([computed[o.kind][0, :, o.stage, o.micro_batch] for o in times.operations]),
        times.rank_ends[:, 0],
        steps.costs.late_reduction(steps.stages.backward)[:, 0],
        steps.costs.optimizer,
    )
