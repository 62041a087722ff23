"""The rate at which steps do their work, for every command that compares jobs.

``wlb check``, ``wlb simulate``, its search and the report all divide predicted seconds of work by simulated seconds. So
do the studies, whose policies without a ``StepPlan`` sum them themselves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from wlb.documents.store.reader import DocumentLengths
from wlb.job.job import Job
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.simulate.costs import JobCosts
from wlb.simulate.level import LevelSteps
from wlb.simulate.step import Steps
from wlb.workload.base import DocumentPrices
from wlb.workload.phases import segment_seconds

_MICRO_BATCHES_AT_ONCE = 512


@dataclass
class Rate:
    """Work and time of the steps added so far; memory grows by three numbers a step.

    ``work_seconds`` are the predicted W_a + W_l of everything trained, by ``work_prices``. A cut document counts only
    for its computed attention, and a document that still waits after the last step does not count.
    """

    work_prices: DocumentPrices
    work_seconds: float = 0.0
    step_tokens: list[int] = field(default_factory=list)
    step_work_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    def add(self, plans: Sequence[StepPlan], steps: Steps | LevelSteps) -> None:
        """Add ``plans``, which were simulated as ``steps``."""
        tables = [plan.table for plan in plans]
        owner = np.repeat(np.arange(len(plans)), [len(table) for table in tables])
        seconds = segment_seconds(self.work_prices, np.concatenate(tables))
        self.work_seconds += float(seconds.sum())
        self.step_work_seconds += np.bincount(owner, seconds, len(plans)).tolist()
        self.step_tokens += steps.tokens.tolist()
        self.step_seconds += steps.seconds.tolist()

    @property
    def tokens(self) -> int:
        return sum(self.step_tokens)

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def work_rate(self) -> float:
        """Seconds of work done per second. Unlike tokens/s, it does not rise while long documents wait."""
        return self.work_seconds / self.seconds


def rate(job: Job, lengths: DocumentLengths, steps: int, work_prices: DocumentPrices, warm_up: int = 0) -> Rate:
    """The rate of ``steps`` steps of ``job`` on documents of ``lengths`` tokens, after ``warm_up`` uncounted steps."""
    rated = Rate(work_prices)
    for plans, priced in first_steps(job, lengths, steps, warm_up):
        rated.add(plans, priced)
    return rated


def simulate_steps(plans: Sequence[StepPlan], job: Job) -> Steps | LevelSteps:
    """Simulate ``plans``, which are already dealt to the data-parallel ranks of ``job``."""
    return (LevelSteps if job.levels_steps else Steps).of_plans(plans, JobCosts(job))


def first_steps(
    job: Job, lengths: DocumentLengths, steps: int, warm_up: int = 0
) -> Iterator[tuple[list[StepPlan], Steps | LevelSteps]]:
    """Plans of the trainer's planner and their simulated steps; a few at a time, so memory does not grow with steps.

    ``warm_up`` steps are planned before them and left out.
    """
    plans = islice(StepPlanner(job, lengths).plans(warm_up), steps)
    while group := [*islice(plans, max(1, _MICRO_BATCHES_AT_ONCE // job.step_micro_batches))]:
        yield group, simulate_steps(group, job)
