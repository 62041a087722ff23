"""The jobs of the paper's evaluation, and the one of its introduction, in its layouts.

Quoted: WLB-LLM (arXiv 2503.17924), Table 1, for model, context window and (tp, cp, pp, dp); section 1 for the job of
405B parameters on 8,192 GPUs. Assumed: its layout, and as many micro-batches of a data-parallel rank as there are
pipeline ranks. ``wlb.simulate.job`` has the same jobs without layouts.
"""

from typing import Any, NamedTuple

from wlb.job.job import Job
from wlb.schedules.layout import Layout
from wlb.simulate import simulated_job


class PaperJob(NamedTuple):
    """A model, a context window in tokens, and a layout; ``rank_micro_batches`` are by default ``pp``."""

    model: str
    context_window: int
    layout: Layout
    rank_micro_batches: int | None = None

    def under(self, preset: str, **settings: Any) -> Job:
        """The job under one of the systems of ``PRESETS``; ``settings`` are further keywords of ``simulated_job``."""
        sizes = vars(self.layout) | {"micro_batches": self.rank_micro_batches}
        return simulated_job(self.model, self.context_window, preset, **(sizes | settings))


_64K, _128K = 65_536, 131_072

PAPER_JOBS: dict[str, PaperJob] = {
    "550m-64k": PaperJob("550m", _64K, Layout(2, 2, 4, 2)),
    "550m-128k": PaperJob("550m", _128K, Layout(2, 4, 4, 1)),
    "7b-64k": PaperJob("7b", _64K, Layout(4, 2, 4, 1)),
    "7b-128k": PaperJob("7b", _128K, Layout(8, 2, 4, 1)),
    "30b-64k": PaperJob("30b", _64K, Layout(8, 2, 4, 1)),
    "30b-128k": PaperJob("30b", _128K, Layout(8, 4, 4, 1)),
    "70b-64k": PaperJob("70b", _64K, Layout(16, 4, 4, 1)),
    "70b-128k": PaperJob("70b", _128K, Layout(16, 4, 4, 1)),
}
LARGEST = "405b-128k"
ALL_JOBS = PAPER_JOBS | {LARGEST: PaperJob("llama3-405b", _128K, Layout(8, 16, 16, 4))}
