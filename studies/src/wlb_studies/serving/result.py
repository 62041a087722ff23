"""Figures of a simulated prefill: time to the first token, throughput, GPU-seconds and energy."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from wlb_studies.serving.job import PrefillJob
from wlb_studies.serving.prefill import GpuGroup, Pass, PrefillRun


@dataclass(frozen=True)
class GroupResult:
    """The tokens that groups of one kind ran."""

    prompts: str  # the prompts they serve
    tp: int
    cp: int
    clock: float  # share of the full clock
    count: int  # most such groups at a time
    passes: int
    tokens: int


@dataclass(frozen=True)
class PrefillResult:
    """One row of the comparison. Seconds are simulated, to the first token; ``busy`` is mean over slowest rank.

    ``gpu_seconds`` counts GPUs that a pass occupies, whether they compute or wait for a slower rank.
    ``energy_joules`` is the energy of all GPUs until the last first token, None if watts are unknown.
    """

    method: str
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float
    mean_seconds: float
    longest_seconds: float
    tokens_per_second: float
    passes: int
    longest_pass_seconds: float
    busy: float
    gpu_seconds: float
    energy_joules: float | None
    groups: tuple[GroupResult, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def prefill_result(method: str, run: PrefillRun, job: PrefillJob) -> PrefillResult:
    """The figures of ``run`` for ``job``."""
    p50, p95, p99 = np.percentile(run.first_token_seconds, (50, 95, 99)).tolist()
    slowest = [float(each.seconds.max()) for each in run.passes]
    gpus = [len(each.seconds) * each.group.gpus for each in run.passes]
    return PrefillResult(
        method=method,
        p50_seconds=p50,
        p95_seconds=p95,
        p99_seconds=p99,
        mean_seconds=float(run.first_token_seconds.mean()),
        longest_seconds=float(run.first_token_seconds.max()),
        tokens_per_second=float(job.lengths.sum() / run.seconds),
        passes=len(run.passes),
        longest_pass_seconds=max(slowest),
        busy=sum(float(each.seconds.mean()) for each in run.passes) / sum(slowest),
        gpu_seconds=sum(seconds * held for seconds, held in zip(slowest, gpus, strict=True)),
        energy_joules=_joules(run, job),
        groups=_groups(run),
    )


def _joules(run: PrefillRun, job: PrefillJob) -> float | None:
    if job.power is None:
        return None
    computing: dict[float, float] = defaultdict(float)
    for each in run.passes:
        computing[each.group.clock] += float(each.seconds.sum()) * each.group.gpus
    return job.power.joules(job.gpus, run.seconds, computing)


def _groups(run: PrefillRun) -> tuple[GroupResult, ...]:
    by_group: dict[GpuGroup, list[Pass]] = defaultdict(list)
    for each in run.passes:
        by_group[each.group].append(each)
    in_order = sorted(by_group.items(), key=lambda item: (item[0].cp, min(each.engine for each in item[1])))
    return tuple(
        GroupResult(group.prompts, group.tp, group.cp, group.clock, group.count, len(passes), _tokens(passes))
        for group, passes in in_order
    )


def _tokens(passes: Sequence[Pass]) -> int:
    return sum(chunk.stop - chunk.start for each in passes for batch in each.batches for chunk in batch)
