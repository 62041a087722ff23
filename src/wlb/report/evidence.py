"""What a report on document lengths is drawn from: the four systems simulated on the same documents.

The job's own recommendation comes first: the least activation checkpointing that leaves room for L_max, then the
thresholds and the L_max that ``wlb.packing.tuning`` finds. Every system is then simulated step by step, and the
packing methods are compared by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from wlb.config import PRESETS
from wlb.documents.segments import Segment
from wlb.packing import packer_from_config
from wlb.packing.tuning import Trial, search
from wlb.report.gain import Gain, gain
from wlb.sharding import STRATEGIES, ShardPlan, make_shard_plan
from wlb.simulate import SimulatedJob, simulate_steps
from wlb.simulate.compare import Cluster, MethodResult, compare_packer, documents_for, packer_for
from wlb.simulate.costs import JobCosts
from wlb.simulate.memory import memory_settings, usable_bytes
from wlb.simulate.run import planned_steps
from wlb.simulate.step import StepResults
from wlb.simulate.timeline import Timeline, timeline
from wlb.workload.layer_memory import Checkpointing
from wlb.workload.memory import largest_length_factor

BASELINE, BEST = "plain-4d", "best"  # presets
METHODS = ("sequential", "fixed_greedy", "fixed_greedy:8", "variable_length:paper")
TUNED = "variable_length, tuned"

_ENOUGH_ROOM = 1.5  # windows: checkpointing is not raised to make micro-batches longer than this
_LENGTH_FACTORS = (1.0, 1.25, 1.5, 2.0)
_TUNING_STEPS = 48
_TUNING_MICRO_BATCHES = 4  # a balance that holds for few micro-batches holds for many
_MICRO_BATCHES_AT_ONCE = 512

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SystemSteps:
    """One system: every step's tokens and seconds, where the time goes on average, and one step in full.

    The one step is that with the most usual seconds per token; ``gpu_seconds`` has shape (pp, dp, cp).
    """

    job: SimulatedJob
    tokens: NDArray[np.int64]
    seconds: NDArray[np.float64]
    where: dict[str, float]
    imbalance: float
    gpu_seconds: NDArray[np.float64]
    timeline: Timeline

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())


@dataclass(frozen=True)
class Evidence:
    """Everything that the report on ``lengths`` shows; all of it is simulated."""

    lengths: NDArray[np.int64]
    systems: dict[str, SystemSteps]
    methods: list[MethodResult]
    recommended: Trial
    fits: bool  # whether the memory model finds room for a window on every GPU
    shards: list[ShardPlan]  # of one micro-batch, every strategy; empty without context parallelism

    @property
    def job(self) -> SimulatedJob:
        return self.systems[BEST].job

    @property
    def tuned(self) -> MethodResult:
        """The recommended setting beside other packing methods."""
        return next(result for result in self.methods if result.method == TUNED)

    @cached_property
    def gains(self) -> dict[str, Gain]:
        """Of every system over the baseline."""
        before = self.systems[BASELINE]
        return {
            name: gain(before.tokens, before.seconds, after.tokens, after.seconds)
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

    Raises ``UserError`` where the documents fill not a single step.
    """
    best = job(BEST)
    cluster = Cluster(best.packing.micro_batches, best.context_window, best.dp, best.pp)
    documents, _ = documents_for(lengths, cluster, steps=steps)
    step_tokens = best.packing.micro_batches * best.context_window
    steps = min(steps, sum(document.length for document in documents) // step_tokens)
    on_progress("tuning")
    checkpointing, room = least_checkpointing(best)
    recommended = _tune(best, documents, min(room or 1.0, _LENGTH_FACTORS[-1]))
    systems = {}
    for name in PRESETS:
        on_progress(f"simulating {name}")
        systems[name] = _simulate(_settled(job(name), name, checkpointing, room, recommended), lengths, steps)
    results = []
    for method in (*METHODS, TUNED):
        on_progress(f"packing {method}")
        results.append(_pack(method, documents, cluster, systems[BEST].job))
    return Evidence(lengths, systems, results, recommended, room is not None, _shards(systems[BEST]))


def least_checkpointing(job: SimulatedJob) -> tuple[Checkpointing, float | None]:
    """The least checkpointing under which GPUs hold L_max, and the L_max they hold; None if nothing fits."""
    best: tuple[Checkpointing, float | None] = ("none", None)
    levels: tuple[Checkpointing, ...] = ("none", "selective", "full")
    for level in levels:
        tried = replace(job, activation_checkpointing=level)
        factor = largest_length_factor(memory_settings(tried), tried.context_window, usable_bytes(tried))
        if factor is not None and (best[1] is None or factor > best[1]):
            best = level, factor
        if factor is not None and factor >= _ENOUGH_ROOM:
            break
    return best


def _tune(job: SimulatedJob, documents: Sequence[Segment], room: float) -> Trial:
    micro_batches = min(job.packing.micro_batches, _TUNING_MICRO_BATCHES)
    wanted = _TUNING_STEPS * micro_batches * job.context_window
    ends = np.cumsum([document.length for document in documents])
    sample = documents[: int(np.searchsorted(ends, wanted)) + 1]
    return search(
        [document.length for document in sample],
        micro_batches=micro_batches,
        context_window=job.context_window,
        workload=job.workload,
        factors=[factor for factor in _LENGTH_FACTORS if factor <= room],
        max_delay=job.packing.max_delay,
    )[0]


def _settled(
    job: SimulatedJob, name: str, checkpointing: Checkpointing, room: float | None, recommended: Trial
) -> SimulatedJob:
    """``job`` with the checkpointing of all systems and an L_max that fits; ``best`` as recommended."""
    if name == BEST:
        changes = {
            "max_length_factor": recommended.max_length_factor,
            "outlier_thresholds": recommended.outlier_thresholds,
        }
    else:
        changes = {"max_length_factor": min(float(job.packing.max_length_factor), room or 1.0)}
    packing = job.packing.model_copy(update=changes)
    return replace(job, activation_checkpointing=checkpointing, packing=packing)


def _simulate(job: SimulatedJob, lengths: NDArray[np.int64], steps: int) -> SystemSteps:
    costs = JobCosts(job)
    plans = list(islice(planned_steps(job, lengths), steps))
    at_once = max(1, _MICRO_BATCHES_AT_ONCE // job.packing.micro_batches)
    groups = [simulate_steps(plans[start : start + at_once], costs) for start in range(0, steps, at_once)]

    def whole(column: Callable[[StepResults], NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.concatenate([column(group) for group in groups])

    seconds = whole(lambda group: group.seconds)
    tokens = np.concatenate([group.tokens for group in groups])
    gpu_seconds = whole(lambda group: group.gpu_seconds)
    usual = int(np.abs(seconds / tokens - seconds.sum() / tokens.sum()).argmin())
    over_gpus = (1, 2, 3)
    return SystemSteps(
        job=job,
        tokens=tokens,
        seconds=seconds,
        where={cause: float(whole(lambda group, cause=cause: group.where[cause]).mean()) for cause in groups[0].where},  # type: ignore[misc]
        imbalance=float((gpu_seconds.max(axis=over_gpus) / gpu_seconds.mean(axis=over_gpus)).mean()),
        gpu_seconds=gpu_seconds[usual],
        timeline=timeline(plans[usual], job),
    )


def _pack(method: str, documents: Sequence[Segment], cluster: Cluster, best: SimulatedJob) -> MethodResult:
    workload = best.workload
    if method != TUNED:
        factor = float(best.packing.max_length_factor)
        return compare_packer(
            method, packer_for(method, cluster, workload, max_length_factor=factor), documents, cluster, workload
        )
    packer = packer_from_config(best.packing, best.context_window, best.packing_prices)
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
