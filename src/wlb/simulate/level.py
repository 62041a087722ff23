"""Simulates level steps.

In a level step (``wlb.packing.level``) every rank runs its own number of micro-batches. It waits only for ranks that it
shares a document with, and for all ranks at the end of the step. Micro-batches are priced as in every other step
(``wlb.simulate.step``), each as a context-parallel group of its own size, and begin when all their ranks are free.
Weights stay gathered throughout the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from wlb.packing.plan import StepPlan
from wlb.schedules.operations import BACKWARD, FORWARD, Operation
from wlb.schedules.timing import PipelineTimes
from wlb.sharding.latency import Phases
from wlb.sharding.pieces import Shards
from wlb.simulate.costs import JobCosts
from wlb.simulate.step import CAUSES, Array, Steps, StepSeconds, slowest_over_mean

Integers = NDArray[np.int64]

# Level steps balance the total time of ranks, not their computing, so these causes come last.
_AFTER_RANKS = ("dp ranks", "gradient reduction", "optimizer")


class _Kind(NamedTuple):
    """All micro-batches of groups of one size on the same number of nodes: where they run, and their prices."""

    step: Integers
    place: Integers  # in the plan
    ranks: Integers  # (micro-batches, ranks of each)
    priced: Steps


@dataclass(frozen=True)
class LevelSteps(StepSeconds):
    """Level steps when only the ``modelled`` of ``CAUSES`` are taken into account; compare ``Steps``.

    Arrays have the same shapes, with one data-parallel rank and one stage. They are 0 for ranks that do not run a
    micro-batch, and beyond the last micro-batch of a step.
    """

    runs: tuple[tuple[int, int, Integers], ...]  # (step, place, ranks) of every micro-batch
    kinds: tuple[_Kind, ...]
    in_turn: ClassVar = (*(cause for cause in CAUSES if cause not in _AFTER_RANKS), *_AFTER_RANKS)

    @classmethod
    def of_plans(cls, plans: Sequence[StepPlan], costs: JobCosts) -> Self:
        pool, micro_batches = costs.layout.pool_size, [one for plan in plans for one in plan.micro_batches]
        runs = [
            (step, place, np.array(one.ranks or range(pool)))
            for step, plan in enumerate(plans)
            for place, one in enumerate(plan.micro_batches)
        ]
        job, kinds = costs.job, []
        for mine, priced, shards in job.level_shards(micro_batches):
            steps, places, ranks = (np.array(column) for column in zip(*(runs[run] for run in mine), strict=True))
            of_kind = Steps.of_shards(shards.reshaped(1, 1, len(mine)), JobCosts(job, priced.nodes))
            kinds.append(_Kind(steps, places, ranks, of_kind))
        return cls(costs, tuple(runs), tuple(kinds))

    @property
    def shards(self) -> Shards:
        """What every rank computes and exchanges in every micro-batch, in the shape (steps, 1, micro-batches, cp)."""
        columns = zip(*(kind.priced.shards for kind in self.kinds), strict=True)
        return Shards(*(self._table(column) for column in columns))

    @property
    def computing(self) -> Phases:
        """Computing seconds of each rank, without waiting; shape (steps, 1, 1, micro-batches, cp)."""
        return self._phases([kind.priced.computing for kind in self.kinds])

    @cached_property
    def stages(self) -> Phases:
        """Seconds of micro-batches, those of their slowest rank; shape (steps, 1, 1, micro-batches)."""
        slowest = [self._speeds[kind.ranks].min(axis=1) for kind in self.kinds]
        stages = (replace(kind.priced, modelled=self.modelled).stages for kind in self.kinds)
        return self._phases([Phases(f / speed, b / speed) for (f, b), speed in zip(stages, slowest, strict=True)])

    @cached_property
    def pipelines(self) -> PipelineTimes:
        """All forwards, then all backwards; each rank runs some of them."""
        forward, backward = (phase[:, 0, 0] for phase in self.stages)
        waits = self.costs.waiting_for_weights(forward[..., None])[..., 0] * ("weight gathers" in self.modelled)
        starts, ends = np.zeros_like(forward), np.zeros_like(forward)
        free = [[0.0] * self.costs.layout.pool_size for _ in forward]
        meet = "dp ranks" in self.modelled
        both, waiting = (forward + backward).tolist(), waits.tolist()  # lists: most micro-batches have one rank
        for step, place, group in self.runs:
            ranks, of_step = group.tolist(), free[step]
            mine = [of_step[rank] for rank in ranks]
            begins, seconds = max(mine), both[step][place] + waiting[step][place] * (0.0 in mine)
            starts[step, place], ends[step, place] = begins, begins + seconds
            for rank, since in zip(ranks, mine, strict=True):
                of_step[rank] = seconds + (begins if meet else since)
        of_ranks = np.array(free)
        turns = ends - backward
        return PipelineTimes(
            tuple(Operation(0, place, kind) for kind in (FORWARD, BACKWARD) for place in range(forward.shape[1])),
            np.concatenate([turns - starts, backward], axis=1).T[..., None],
            np.concatenate([turns, ends], axis=1).T[..., None],
            (of_ranks.max(axis=1) if meet else of_ranks.mean(axis=1))[None, :, None],
        )

    @property
    def ends(self) -> Array:
        return self.pipelines.rank_ends

    @property
    def imbalance(self) -> dict[str, Array]:
        """As in ``Steps``, over the ranks that run a micro-batch; ``dp`` compares the busy time of ranks."""
        computed = [kind.priced.micro_batch_seconds for kind in self.kinds]
        mean, slowest = (
            self._table([seconds(one, axis=-1) for one in computed])[:, 0] for seconds in (np.mean, np.max)
        )
        busy = np.zeros((len(mean), self.costs.layout.pool_size))
        for step, place, ranks in self.runs:
            busy[step, ranks] += self.stages.both[step, 0, 0, place]
        return {
            "gpus": slowest_over_mean(self.gpu_seconds, (1, 2, 3)),
            "cp": slowest.sum(axis=1) / mean.sum(axis=1),
            "micro_batches": mean.max(axis=1) * np.bincount([step for step, _, _ in self.runs]) / mean.sum(axis=1),
            "dp": slowest_over_mean(busy, (1,)),
            "pp": np.ones(len(mean)),
        }

    @property
    def tokens(self) -> Integers:
        """Tokens of the steps; shape (steps,)."""
        return np.asarray(self._table([kind.priced.shards.tokens.sum(axis=-1) for kind in self.kinds]).sum(axis=(1, 2)))

    @cached_property
    def gpu_seconds(self) -> Array:
        """Computing seconds of each GPU in the steps; shape (steps, 1, 1, cp)."""
        seconds = np.zeros((self.runs[-1][0] + 1, self.costs.layout.pool_size))
        for kind in self.kinds:
            np.add.at(seconds, (kind.step[:, None], kind.ranks), kind.priced.micro_batch_seconds[0, 0])
        return (seconds / self._speeds)[:, None, None]

    @property
    def _speeds(self) -> Array:
        """Speeds of the ranks; all 1 if the job does not know them."""
        return np.array(self.costs.job.speeds or [1.0] * self.costs.layout.pool_size)

    def _phases(self, of_kinds: Sequence[Phases]) -> Phases:
        """Phases of all micro-batches from those of each kind, which have one step, rank and stage."""
        of_all = ([phase[:, :, 0] for phase in of_kind] for of_kind in zip(*of_kinds, strict=True))
        return Phases(*(self._table(phases)[:, :, None] for phases in of_all))

    def _table(self, of_kinds: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Values of micro-batches, shape (steps, 1, micro-batches), or of their ranks, with a last axis cp."""
        steps, most = self.runs[-1][0] + 1, max(place for _, place, _ in self.runs) + 1
        table = np.zeros((steps, 1, most, self.costs.layout.pool_size)[: of_kinds[0].ndim], of_kinds[0].dtype)
        for (step, place, ranks, _), values in zip(self.kinds, of_kinds, strict=True):
            rows = (step, 0, place) if values.ndim == 3 else (step[:, None], 0, place[:, None], ranks)
            table[rows] = values[0, 0]
        return table
