"""Running the paper's systems, and ours, on one job and the same documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from wlb.reproduce.documents import cut_by_loader
from wlb.reproduce.experiment import Documents, Settings
from wlb.simulate import SimulatedJob, SimulationResult, simulate, simulated_job
from wlb.simulate.job import NamedJob

# The paper runs interleaved 1F1B (section 6) with "several chunks of layers" on each rank (section 2.1), and as many
# micro-batches as pipeline ranks (section 7.1). Assumed: two chunks.
CHUNKS = 2
SCHEDULE = {"schedule": "interleaved_1f1b", "virtual_pp": CHUNKS}
ASSUMED = (
    f"interleaved 1F1B as in the paper, {CHUNKS} chunks on each rank (assumed); H100 preset; L_max 1.5 windows; "
    f"WLB-LLM with 2 outlier queues as in the paper, whose thresholds are assumed"
)
Treatment = Literal["cut", "whole"]


class Bench:
    """One job's documents and number of steps; what differs between systems is given to ``run``.

    ``treatment`` says whether a data loader has cut documents at the window for every system alike, or each system gets
    them whole, and only Plain-4D cuts them.
    """

    def __init__(
        self, job: NamedJob, documents: Documents, steps: int, settings: Settings, treatment: Treatment = "cut"
    ) -> None:
        self._job = job
        self.steps = steps
        self._cut = treatment == "cut"
        self._seed = settings.seed
        lengths = documents.lengths
        self.lengths = cut_by_loader(lengths, job.context_window, settings.seed) if self._cut else lengths

    def run(self, preset: str, **settings: Any) -> SimulationResult:
        """Simulate the job under ``preset``; ``settings`` are those of ``simulated_job``."""
        return self.simulate(self.job(preset, **settings))

    def simulate(self, job: SimulatedJob) -> SimulationResult:
        return simulate(job, self.lengths, self.steps)

    def fastest(self, preset: str, shardings: Iterable[str]) -> SimulationResult:
        """Under the best of several sharding strategies."""
        return max((self.run(preset, sharding=name) for name in shardings), key=tokens_per_second)

    def job(self, preset: str, **settings: Any) -> SimulatedJob:
        job = self._job
        simulated = simulated_job(job.model, job.context_window, preset, **(job.layout | SCHEDULE | settings))
        order = {"shuffle": False} if self._cut else {"seed": self._seed}
        return replace(simulated, data=simulated.data.model_copy(update=order))

    def fixed_4d(self) -> SimulationResult:
        """Fixed-4D with the better of both static shardings, as the paper compares it (section 7.1)."""
        return self.fastest("fixed-4d", ("per_sequence", "per_document"))


def tokens_per_second(result: SimulationResult) -> float:
    return result.tokens_per_second


def speedup(result: SimulationResult, over: SimulationResult) -> float:
    return result.tokens_per_second / over.tokens_per_second
