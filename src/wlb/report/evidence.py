"""The data of a report on document lengths: every preset simulated on the same documents.

The job's own recommendation comes first: the least activation checkpointing that leaves room for L_max, then L_max.
Every system is then simulated step by step, and the packing methods are compared by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.config import PRESETS
from wlb.documents.filling import documents_for
from wlb.documents.segments import Segment
from wlb.memory.layers import Checkpointing
from wlb.packing.statistics import PackingStatistics
from wlb.planning.memory import fits, largest_factor, predicted_memory
from wlb.planning.planner import StepPlanner
from wlb.report.gain import Gain, gain
from wlb.sharding import STRATEGIES, ShardPlan, make_shard_plan
from wlb.simulate import SimulatedJob, StepResults, simulate_steps
from wlb.simulate.compare import Cluster, MethodResult, compare_packer, packer_for
from wlb.simulate.costs import JobCosts
from wlb.simulate.decide import decide
from wlb.simulate.timeline import Timeline, timeline
from wlb.workload.base import DocumentPrices

BASELINE, BEST, ELASTIC = "plain-4d", "best", "elastic"  # presets
METHODS = ("sequential", "fixed_greedy", "fixed_greedy:8", "variable_length:paper")
RECOMMENDED = "makespan"

LENGTH_FACTORS = (1.0, 1.25, 1.5, 2.0)
AS_FAST = 0.01  # L_max within so much of the fastest differ in what waits, not in speed
_MICRO_BATCHES_AT_ONCE = 512
_ENOUGH_ROOM = 1.5  # windows: checkpointing is not raised to make micro-batches longer than this

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SystemSteps:
    """Every step's tokens and seconds, where the time goes on average, and one step in full.

    The one step is that with the most usual seconds for its work; ``gpu_seconds`` has shape (pp, dp, cp).
    ``token_delay`` is the mean number of steps that a token waits; ``work_seconds`` are W_a + W_l of what each step
    trains.
    """

    job: SimulatedJob
    tokens: NDArray[np.int64]
    seconds: NDArray[np.float64]
    where: dict[str, float]
    imbalance: float
    token_delay: float
    work_seconds: NDArray[np.float64]
    gpu_seconds: NDArray[np.float64]
    timeline: Timeline

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def work_rate(self) -> float:
        """Work over seconds: unlike tokens/s, it does not rise while long documents wait."""
        return float(self.work_seconds.sum() / self.seconds.sum())


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
    systems: dict[str, SystemSteps]
    methods: list[MethodResult]
    tried: list[TriedLength]  # by rising L_max
    fits: bool  # whether the memory model finds room for a window on every GPU
    shards: list[ShardPlan]  # of one micro-batch, every strategy; empty without context parallelism

    @property
    def job(self) -> SimulatedJob:
        return self.systems[BEST].job

    @cached_property
    def winner(self) -> str:
        """The preset to set: ``elastic`` where it fits and is about as fast as ``best``, as it delays no document."""
        elastic = self.systems[ELASTIC].job
        as_fast = self.gains[ELASTIC].factor >= (1 - AS_FAST) * self.gains[BEST].factor
        return ELASTIC if as_fast and fits(elastic) else BEST

    @property
    def recommended(self) -> TriedLength:
        """The L_max that ``best`` is simulated with."""
        return next(one for one in self.tried if one.max_length_factor == self.job.packing.length_factor)

    @cached_property
    def gains(self) -> dict[str, Gain]:
        """Of every system over the baseline, at equal work."""
        return self._gains(lambda system: system.work_seconds)

    @cached_property
    def gains_in_tokens(self) -> dict[str, Gain]:
        """The same in tokens/s, which also count what is cut away, and what still waits, as a gain."""
        return self._gains(lambda system: system.tokens)

    def _gains(self, done: Callable[[SystemSteps], NDArray[Any]]) -> dict[str, Gain]:
        before = self.systems[BASELINE]
        return {
            name: gain(done(before), before.seconds, done(after), after.seconds)
            for name, after in self.systems.items()
            if name != BASELINE
        }


def gather_evidence(
    lengths: NDArray[np.int64],
    job: Callable[[str], SimulatedJob],
    steps: int,
    on_progress: Progress = lambda what: None,
) -> Evidence:
    """Simulate ``steps`` steps, or as many as the documents fill, of ``job(preset)`` for every preset.

    Raises ``UserError`` where the documents do not fill one step.
    """
    best = job(BEST)
    cluster = Cluster(best.packing.micro_batches, best.context_window, best.dp, best.pp)
    documents, _ = documents_for(lengths, cluster.micro_batches, cluster.context_window, steps=steps)
    step_tokens = best.packing.micro_batches * best.context_window
    steps = min(steps, sum(document.length for document in documents) // step_tokens)
    checkpointing, room = least_checkpointing(best)
    systems = {}
    for name in PRESETS:
        if name != BEST:
            on_progress(f"simulating {name}")
            other = decide(replace(job(name), activation_checkpointing=checkpointing), lengths)
            if other.pools is None:
                other = other.with_length_factor(min(float(other.packing.length_factor), room or 1.0))
            systems[name] = simulate_system(other, lengths, steps, best.work_prices)
    candidates = []
    for factor in LENGTH_FACTORS:
        if factor <= (room or 1.0):
            on_progress(f"simulating {BEST}, L_max {factor:g}")
            settled = _settled(best, checkpointing, factor)
            candidates.append(simulate_system(settled, lengths, steps, best.work_prices))
    systems[BEST] = fast_with_least_delay(candidates)
    results = []
    for method in (*METHODS, RECOMMENDED):
        on_progress(f"packing {method}")
        results.append(_pack(method, documents, cluster, systems[BEST].job))
    fastest = max(candidate.work_rate for candidate in candidates)
    tried = [_tried(candidate, candidate.work_rate / fastest) for candidate in candidates]
    systems = {name: systems[name] for name in PRESETS}
    return Evidence(lengths, systems, results, tried, room is not None, _shards(systems[BEST]))


def simulate_system(job: SimulatedJob, lengths: NDArray[np.int64], steps: int, prices: DocumentPrices) -> SystemSteps:
    """The first ``steps`` steps of ``job`` on documents of ``lengths`` tokens, their work valued by ``prices``."""
    costs = JobCosts(job)
    plans = list(islice(StepPlanner(job, lengths).plans(), steps))
    packed = PackingStatistics()
    packed.add(plans)
    at_once = max(1, _MICRO_BATCHES_AT_ONCE // job.packing.micro_batches)
    groups = [simulate_steps(plans[start : start + at_once], costs) for start in range(0, steps, at_once)]

    def whole(column: Callable[[StepResults], NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.concatenate([column(group) for group in groups])

    seconds = whole(lambda group: group.seconds)
    tokens = np.concatenate([group.tokens for group in groups])
    gpu_seconds = whole(lambda group: group.gpu_seconds)
    work = np.array([prices.document_seconds(plan.table[:, 2]).sum() for plan in plans])
    usual = int(np.abs(seconds / work - seconds.sum() / work.sum()).argmin())
    over_gpus = (1, 2, 3)
    return SystemSteps(
        job=job,
        tokens=tokens,
        seconds=seconds,
        where={cause: float(whole(lambda group, cause=cause: group.where[cause]).mean()) for cause in groups[0].where},  # type: ignore[misc]
        imbalance=float((gpu_seconds.max(axis=over_gpus) / gpu_seconds.mean(axis=over_gpus)).mean()),
        token_delay=packed.mean_token_delay,
        work_seconds=work,
        gpu_seconds=gpu_seconds[usual],
        timeline=timeline(plans[usual], job),
    )


def least_checkpointing(job: SimulatedJob) -> tuple[Checkpointing, float | None]:
    """The least checkpointing under which GPUs hold L_max, and the L_max they hold; None if nothing fits."""
    best: tuple[Checkpointing, float | None] = ("none", None)
    levels: tuple[Checkpointing, ...] = ("none", "selective", "full")
    for level in levels:
        tried = replace(job, activation_checkpointing=level)
        factor = largest_factor(tried)
        if factor is not None and (best[1] is None or factor > best[1]):
            best = level, factor
        if factor is not None and factor >= _ENOUGH_ROOM:
            break
    return best


def fast_with_least_delay(candidates: Sequence[SystemSteps]) -> SystemSteps:
    """Of ``candidates`` about as fast as the fastest, the one in which tokens wait least."""
    enough = (1 - AS_FAST) * max(candidate.work_rate for candidate in candidates)
    fast = (candidate for candidate in candidates if candidate.work_rate >= enough)
    return min(fast, key=lambda candidate: candidate.token_delay)


def _settled(job: SimulatedJob, checkpointing: Checkpointing, max_length_factor: float) -> SimulatedJob:
    return replace(job.with_length_factor(max_length_factor), activation_checkpointing=checkpointing)


def _tried(system: SystemSteps, speed: float) -> TriedLength:
    return TriedLength(
        float(system.job.packing.length_factor),
        speed,
        system.token_delay,
        predicted_memory(system.job).total,
    )


def _pack(method: str, documents: Sequence[Segment], cluster: Cluster, best: SimulatedJob) -> MethodResult:
    """``method`` by itself; the recommended one too packs by W_a + W_l here, so that all are judged by one price."""
    workload = best.workload
    if method == RECOMMENDED:
        packer = best.priced(packed_by=workload).packer()
    else:
        factor = float(best.packing.length_factor)
        packer = packer_for(method, cluster, workload, max_length_factor=factor)
    return compare_packer(method, packer, documents, cluster, workload)


def _shards(best: SystemSteps) -> list[ShardPlan]:
    """The step's heaviest micro-batch, shared by every strategy."""
    job = best.job
    if job.cp == 1:
        return []
    heaviest = max(best.timeline.plan.micro_batches, key=lambda micro_batch: micro_batch.workload)
    return [
        make_shard_plan(heaviest.lengths, job.cp, strategy, workload=job.sharding_workload) for strategy in STRATEGIES
    ]
