"""What level steps take.

In a level step (``wlb.packing.level``) every rank runs micro-batches of its own, and waits only for those that it
shares a document with, and at the end of the step for all. Micro-batches are priced as those of every other step are
(``wlb.simulate.step``), each as a context-parallel group of its own size; they begin when all of their ranks are free.
Weights stay gathered from the start of the step to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.job.config import PackingConfig, ShardingConfig
from wlb.job.job import Job
from wlb.job.prices import LEVEL_SHARDING
from wlb.packing.plan import StepPlan
from wlb.sharding import price_shards
from wlb.sharding.latency import Shards
from wlb.simulate.costs import JobCosts
from wlb.simulate.fsdp import reduced_behind, waiting_for_weights
from wlb.simulate.step import CAUSES, EVERYTHING, Steps

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

_AFTER_RANKS = ("dp ranks", "gradient reduction", "optimizer")


class _Turn(NamedTuple):
    """A micro-batch: its step, and the ranks that run it."""

    step: int
    ranks: NDArray[np.intp]


@dataclass(frozen=True)
class LevelSteps:
    """Some level steps when only the ``modelled`` of ``CAUSES`` are taken into account; as ``Steps``.

    ``runs`` are the micro-batches, and ``by_size`` has those of each kind of groups with their places among ``runs``.
    """

    costs: JobCosts
    steps: int
    runs: tuple[_Turn, ...]
    by_size: tuple[tuple[NDArray[np.intp], Steps], ...]
    modelled: frozenset[str] = EVERYTHING

    @classmethod
    def of_plans(cls, plans: Sequence[StepPlan], costs: JobCosts) -> LevelSteps:
        everyone = tuple(range(costs.layout.cp))
        runs, lengths = [], []
        for step, plan in enumerate(plans):
            for micro_batch in plan.micro_batches:
                runs.append(_Turn(step, np.array(micro_batch.ranks or everyone)))
                lengths.append(micro_batch.lengths)
        kinds = np.array([(len(run.ranks), nodes_of(run.ranks, costs.job)) for run in runs])
        by_size = []
        for size, nodes in np.unique(kinds, axis=0).tolist():
            places = np.flatnonzero((kinds == (size, nodes)).all(axis=1))
            by_size.append((places, _group_steps([lengths[place] for place in places], costs.job, size, nodes)))
        return cls(costs, len(plans), tuple(runs), tuple(by_size))

    @property
    def of_sizes(self) -> tuple[Steps, ...]:
        """The micro-batches of each kind of groups, as one step each."""
        return tuple(steps for _, steps in self.by_size)

    @cached_property
    def shards(self) -> Shards:
        """What every rank computes and exchanges in every micro-batch, in the shape (steps, 1, micro-batches, cp).

        Ranks that do not run a micro-batch have nothing of it; nor has any of those by which a step has fewer.
        """
        shards: Shards | None = None
        for places, steps in self.by_size:
            rows, ranks, shape = self._rows[places], self._ranks_of(places), self._shape
            columns = steps.shards.map(lambda column: column[0, 0])
            shards = shards or columns.map(partial(_empty, shape))
            for column, table in zip(columns, shards, strict=True):
                table[(rows[:, None], ranks) if column.ndim == 2 else rows] = column
        assert shards is not None
        return shards.reshaped(self.steps, 1, -1)

    @property
    def computing(self) -> tuple[Array, Array]:
        """What ranks compute in every run, forward and backward; shape (runs, cp), 0 for those that do not run it."""
        phases = np.zeros((2, len(self.runs), self.costs.layout.cp))
        for places, steps in self.by_size:
            for phase, of_size in zip(phases, steps.computing, strict=False):
                phase[places[:, None], self._ranks_of(places)] = of_size[0, 0].sum(axis=0)
        return phases[0], phases[1]

    @cached_property
    def seconds(self) -> Array:
        """What the steps take; shape (steps,)."""
        ends = self._times[1]
        of_steps = ends.max(axis=1) if "dp ranks" in self.modelled else ends.mean(axis=1)
        if "gradient reduction" in self.modelled:
            of_steps = of_steps + self.late_reduction
        return np.asarray(of_steps + float(self.costs.optimizer[0]) * ("optimizer" in self.modelled))

    @cached_property
    def where(self) -> dict[str, Array]:
        """The part of ``seconds`` that each of ``CAUSES`` adds, shape (steps,) each."""
        names = [cause for cause in CAUSES if cause not in _AFTER_RANKS]
        names += _AFTER_RANKS  # ranks are level in all that they do, not in what they compute
        modelled = [frozenset(names[:count]) for count in range(1, len(names) + 1)]
        seconds = [replace(self, modelled=causes).seconds for causes in modelled]
        where = dict(zip(names, np.diff(seconds, axis=0, prepend=0.0), strict=True))
        return {cause: where[cause] for cause in CAUSES}

    @property
    def imbalance(self) -> dict[str, Array]:
        """As that of ``Steps``, of the ranks that run a micro-batch; ``dp`` is of all that ranks do but wait."""
        gpus = self.gpu_seconds[:, 0, 0]
        mean = self._of_runs([of_size.mean(axis=1) for of_size in self._computed])
        slowest = self._of_runs([of_size.max(axis=1) for of_size in self._computed])
        of_steps = np.array([(of_one.max(), of_one.mean()) for of_one in self._by_step(mean)]).T
        busy = np.zeros((self.steps, self.costs.layout.cp))
        for (step, ranks), seconds in zip(self.runs, np.add(*self.phases), strict=True):
            busy[step, ranks] += seconds
        return {
            "gpus": gpus.max(axis=1) / gpus.mean(axis=1),
            "cp": np.bincount(self._step_of_run, slowest) / np.bincount(self._step_of_run, mean),
            "micro_batches": of_steps[0] / of_steps[1],
            "dp": busy.max(axis=1) / busy.mean(axis=1),
            "pp": np.ones(self.steps),
        }

    @property
    def tokens(self) -> Integers:
        """Tokens of the steps; shape (steps,)."""
        of_runs = self._of_runs([steps.shards.tokens.sum(axis=-1).ravel() for _, steps in self.by_size])
        return np.bincount(self._step_of_run, of_runs, self.steps).astype(np.int64)

    @cached_property
    def gpu_seconds(self) -> Array:
        """What each GPU computes in the steps; shape (steps, 1, 1, cp)."""
        seconds = np.zeros((self.steps, self.costs.layout.cp))
        for (places, _), of_size in zip(self.by_size, self._computed, strict=True):
            np.add.at(seconds, (self._step_of_run[places, None], self._ranks_of(places)), of_size)
        return seconds[:, None, None]

    @cached_property
    def _computed(self) -> list[Array]:
        """What the ranks of runs compute, of each kind of groups; shape (runs, ranks of each)."""
        return [steps.micro_batch_seconds[0, 0] for _, steps in self.by_size]

    @cached_property
    def phases(self) -> tuple[Array, Array]:
        """Forward and backward of every run, shape (runs,)."""
        priced = [replace(steps, modelled=self.modelled).stages for _, steps in self.by_size]
        return (
            self._of_runs([of_size.forward[0, 0, 0] for of_size in priced]),
            self._of_runs([of_size.backward[0, 0, 0] for of_size in priced]),
        )

    @property
    def times(self) -> Array:
        """When runs begin and end, from the start of their step; shape (2, runs)."""
        return self._times[0]

    @cached_property
    def _times(self) -> tuple[Array, Array]:
        """The same, and when ranks are done with theirs, shape (steps, cp)."""
        times, ends = np.zeros((2, len(self.runs))), np.zeros((self.steps, self.costs.layout.cp))
        forward, backward = self.phases
        waits = waiting_for_weights(self.costs, forward[:, None])[:, 0] * ("weight gathers" in self.modelled)
        meet = "dp ranks" in self.modelled
        for place, (step, ranks) in enumerate(self.runs):
            free = ends[step, ranks]
            seconds = forward[place] + backward[place] + waits[place] * bool((free == 0).any())
            times[:, place] = free.max(), free.max() + seconds
            ends[step, ranks] = seconds + (free.max() if meet else free)
        return times, ends

    @property
    def late_reduction(self) -> Array:
        """What reducing gradients adds after the last backward; shape (steps,).

        It can begin while the last micro-batches go backward, but not in one that is not the last of all of its ranks.
        """
        last = np.full((self.steps, self.costs.layout.cp), -1)
        for place, (step, ranks) in enumerate(self.runs):
            last[step, ranks] = place
        beside = np.zeros(last.shape)
        for place in np.unique(last[last >= 0]).tolist():
            step, ranks = self.runs[place]
            if (last[step, ranks] == place).all():
                beside[step, ranks] = self.phases[1][place]
        return reduced_behind(self.costs, beside.min(axis=1), kept=True)

    @cached_property
    def _step_of_run(self) -> Integers:
        return np.array([run.step for run in self.runs])

    @cached_property
    def _rows(self) -> Integers:
        """The place of every run in a table of as many rows for each step."""
        counts = np.bincount(self._step_of_run, minlength=self.steps)
        first = np.cumsum(counts) - counts
        return np.asarray(self._step_of_run * counts.max() + np.arange(len(self.runs)) - first[self._step_of_run])

    @property
    def _shape(self) -> tuple[int, int]:
        """Rows of that table, and ranks."""
        most = int(np.bincount(self._step_of_run).max())
        return self.steps * most, self.costs.layout.cp

    def _ranks_of(self, places: Integers) -> Integers:
        """Of runs of as many ranks; shape (places, ranks of each)."""
        return np.stack([self.runs[place].ranks for place in places])

    def _by_step(self, of_runs: Array) -> list[Array]:
        """Values of runs, which are in order of their steps."""
        return np.split(of_runs, np.searchsorted(self._step_of_run, np.arange(1, self.steps)))

    def _of_runs(self, of_sizes: Sequence[NDArray[np.float64]]) -> Array:
        values = np.zeros(len(self.runs))
        for (places, _), of_size in zip(self.by_size, of_sizes, strict=True):
            values[places] = of_size
        return values


def _empty(shape: tuple[int, int], column: NDArray[Any]) -> NDArray[Any]:
    return np.zeros(shape[: column.ndim], column.dtype)


def nodes_of(ranks: Iterable[int], job: Job) -> int:
    """How many nodes these ranks of a stage of ``job`` lie on."""
    return len({rank // job.ranks_per_node for rank in ranks})


@lru_cache(maxsize=4096)
def group_costs(job: Job, size: int, sharding: str, nodes: int | None = None) -> JobCosts:
    """Prices of a context-parallel group of ``size`` of the ranks of a stage of ``job``, as ``JobCosts``."""
    return JobCosts(
        replace(
            job,
            layout=replace(job.layout, cp=size, dp=1),
            packing=PackingConfig().changed(micro_batches=job.layout.pp),
            sharding=ShardingConfig(strategy=sharding),
        ),
        nodes,
    )


def _group_steps(lengths: Sequence[Sequence[int]], job: Job, size: int, nodes: int | None = None) -> Steps:
    """Groups of ``size`` ranks, each with segments of ``lengths``, as the micro-batches of one step."""
    costs = group_costs(job, size, LEVEL_SHARDING, nodes)
    shards = price_shards(lengths, size, LEVEL_SHARDING, costs.rank)
    return Steps.of_shards(shards.reshaped(1, 1, len(lengths)), costs)
