"""One system of a report, simulated step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from wlb.packing.statistics import PackingStatistics
from wlb.simulate import SimulatedJob, simulate_steps
from wlb.simulate.costs import JobCosts
from wlb.simulate.run import planned_steps
from wlb.simulate.step import StepResults
from wlb.simulate.timeline import Timeline, timeline

_MICRO_BATCHES_AT_ONCE = 512


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


def simulate_system(job: SimulatedJob, lengths: NDArray[np.int64], steps: int) -> SystemSteps:
    """The first ``steps`` steps of ``job`` on documents of ``lengths`` tokens."""
    costs = JobCosts(job)
    plans = list(islice(planned_steps(job, lengths), steps))
    packed = PackingStatistics()
    packed.add(plans)
    at_once = max(1, _MICRO_BATCHES_AT_ONCE // job.packing.micro_batches)
    groups = [simulate_steps(plans[start : start + at_once], costs) for start in range(0, steps, at_once)]

    def whole(column: Callable[[StepResults], NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.concatenate([column(group) for group in groups])

    seconds = whole(lambda group: group.seconds)
    tokens = np.concatenate([group.tokens for group in groups])
    gpu_seconds = whole(lambda group: group.gpu_seconds)
    prices = job.work_prices
    work = np.array([prices.document_seconds([s.length for s in plan.segments]).sum() for plan in plans])
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
