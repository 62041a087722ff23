"""The data of a report on document lengths: every preset simulated on the same documents.

The job's own recommendation comes first: the least activation checkpointing that leaves room for L_max, then L_max.
Every system is then simulated step by step, and the packing methods are compared by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from wlb.documents.filling import documents_for
from wlb.job.config import PRESETS
from wlb.job.memory.fit import fits, largest_factor, predicted_memory
from wlb.job.memory.layers import Checkpointing
from wlb.job.planner import StepPlanner
from wlb.report.gain import Gain, gain
from wlb.sharding import STRATEGIES, ShardPlan, make_shard_plan
from wlb.simulate import SimulatedJob, SimulationResult, simulate
from wlb.simulate.compare import MethodResult, compare_packer, packer_for
from wlb.simulate.search import packed_as
from wlb.simulate.timeline import Timeline, timeline

BASELINE, BEST, ELASTIC = "plain-4d", "best", "elastic"  # presets
METHODS = ("sequential", "fixed_greedy", "fixed_greedy:8", "variable_length:paper")
RECOMMENDED = "makespan"

LENGTH_FACTORS = (1.0, 1.25, 1.5, 2.0)
AS_FAST = 0.01  # L_max within so much of the fastest differ in what waits, not in speed
_ENOUGH_ROOM = 1.5  # windows: checkpointing is not raised to make micro-batches longer than this

Progress = Callable[[str], None]


@dataclass(frozen=True)
class TriedLength:
    """What ``best`` does with an L_max of ``max_length_factor`` windows.

    ``speed`` is at equal work, over that of the fastest; ``memory_bytes`` are those of a GPU in the worst step.
    """

    max_length_factor: float
    speed: float
    token_delay: float
    memory_bytes: int


@dataclass(frozen=True)
class Evidence:
    """Everything that the report on ``lengths`` shows; all of it is simulated."""

    lengths: NDArray[np.int64]
    systems: dict[str, SimulationResult]
    methods: list[MethodResult]
    tried: list[TriedLength]  # by rising L_max
    fits: bool  # whether the memory model finds room for a window on every GPU

    @property
    def job(self) -> SimulatedJob:
        return self.systems[BEST].job

    @cached_property
    def winner(self) -> str:
        """The preset to set: ``elastic`` where it fits and is about as fast as ``best``, as it delays no document."""
        if ELASTIC not in self.systems:
            return BEST
        as_fast = self.gains[ELASTIC].factor >= (1 - AS_FAST) * self.gains[BEST].factor
        return ELASTIC if as_fast and fits(self.systems[ELASTIC].job) else BEST

    @property
    def recommended(self) -> TriedLength:
        """The L_max that ``best`` is simulated with."""
        return next(one for one in self.tried if one.max_length_factor == self.job.packing.length_factor)

    @cached_property
    def gains(self) -> dict[str, Gain]:
        """Of every system over the baseline, at equal work."""
        return self._gains(lambda system: system.step_work_seconds)

    @cached_property
    def gains_in_tokens(self) -> dict[str, Gain]:
        """The same in tokens/s, which also count what is cut away, and what still waits, as a gain."""
        return self._gains(lambda system: system.step_tokens)

    @cached_property
    def usual_steps(self) -> dict[str, Timeline]:
        """Of the baseline, of ``best`` and of the winner, the step with the most usual seconds for its work."""
        names = {BASELINE, BEST, self.winner}
        return {name: _usual_step(self.systems[name], self.lengths) for name in names}

    @cached_property
    def shards(self) -> list[ShardPlan]:
        """The heaviest micro-batch of ``best``'s usual step by every strategy; none without context parallelism."""
        job = self.job
        if job.layout.cp == 1:
            return []
        heaviest = max(self.usual_steps[BEST].plan.micro_batches, key=lambda micro_batch: micro_batch.workload)
        return [
            make_shard_plan(heaviest.lengths, job.layout.cp, name, workload=job.sharding_workload)
            for name in STRATEGIES
        ]

    def _gains(self, done: Callable[[SimulationResult], NDArray[Any]]) -> dict[str, Gain]:
        before = self.systems[BASELINE]
        return {
            name: gain(done(before), before.step_seconds, done(after), after.step_seconds)
            for name, after in self.systems.items()
            if name != BASELINE
        }


def gather_evidence(
    lengths: NDArray[np.int64], job: SimulatedJob, steps: int, on_progress: Progress = lambda what: None
) -> Evidence:
    """Simulate ``steps`` steps, or as many as the documents fill, of ``job``, which is ``best``, under every preset.

    Raises ``UserError`` where the documents do not fill one step.
    """
    documents, _ = documents_for(lengths, job.packing.micro_batches, job.context_window, steps=steps)
    filled = sum(document.length for document in documents) // (job.packing.micro_batches * job.context_window)
    job, room = with_least_checkpointing(job)
    most = room or 1.0

    def run(tried: SimulatedJob) -> SimulationResult:
        return simulate(tried, lengths, min(steps, filled), work_prices=job.work_prices)

    systems = {}
    for name in PRESETS:
        if name == ELASTIC and job.phases:
            continue  # pools know no phases
        on_progress(f"simulating {name}")
        if name == BEST:
            candidates = [run(job.with_length_factor(factor)) for factor in LENGTH_FACTORS if factor <= most]
            systems[name] = fast_with_least_delay(candidates)
        else:
            systems[name] = run(_with_length_within(most, packed_as(job, name)))
    best = systems[BEST].job
    methods = []
    for method in (*METHODS, RECOMMENDED):
        on_progress(f"packing {method}")
        packer = packer_for(method, best, max_length_factor=float(best.packing.length_factor))
        methods.append(compare_packer(method, packer, documents, best))
    fastest = max(candidate.work_rate for candidate in candidates)
    tried = [
        TriedLength(
            float(candidate.job.packing.length_factor),
            candidate.work_rate / fastest,
            candidate.token_delay,
            predicted_memory(candidate.job).total,
        )
        for candidate in candidates
    ]
    return Evidence(lengths, systems, methods, tried, room is not None)


def with_least_checkpointing(job: SimulatedJob) -> tuple[SimulatedJob, float | None]:
    """``job`` with the least checkpointing under which GPUs hold L_max, and the L_max they hold; None if nothing fits.

    Where no checkpointing leaves enough room, it is the least that leaves most.
    """
    found: tuple[SimulatedJob, float | None] = replace(job, activation_checkpointing="none"), None
    for level in get_args(Checkpointing):  # cheapest first
        tried = replace(job, activation_checkpointing=level)
        factor = largest_factor(tried) or 0.0
        if factor > (found[1] or 0.0):
            found = tried, factor
        if factor >= _ENOUGH_ROOM:
            break
    return found


def fast_with_least_delay(candidates: Sequence[SimulationResult]) -> SimulationResult:
    """Of ``candidates`` about as fast as the fastest, the one in which tokens wait least."""
    enough = (1 - AS_FAST) * max(candidate.work_rate for candidate in candidates)
    fast = (candidate for candidate in candidates if candidate.work_rate >= enough)
    return min(fast, key=lambda candidate: candidate.token_delay)


def _with_length_within(most: float, job: SimulatedJob) -> SimulatedJob:
    """With an L_max that fits; that of pools is decided with them."""
    return job if job.pools else job.with_length_factor(min(float(job.packing.length_factor), most))


def _usual_step(result: SimulationResult, lengths: NDArray[np.int64]) -> Timeline:
    """The step of ``result`` with the most usual seconds for its work, planned again."""
    usual = int(np.abs(result.step_seconds / result.step_work_seconds - 1 / result.work_rate).argmin())
    return timeline(next(islice(StepPlanner(result.job, lengths).plans(), usual, None)), result.job)
