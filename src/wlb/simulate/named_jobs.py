"""Jobs that ``wlb simulate`` knows by name: those of the paper's evaluation, and the one of its motivation.

Quoted: WLB-LLM (arXiv 2503.17924), Table 1, model, context window and (tp, cp, pp, dp); and section 1 for the job on
8,192 GPUs, a model of 405B parameters. Assumed: its shape is that of Llama 3 405B, and a data-parallel rank runs as
many micro-batches as there are pipeline ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from wlb.errors import UserError
from wlb.simulate.job import SimulatedJob, simulated_job


class NamedJob(NamedTuple):
    """A model, a context window in tokens, and a layout; ``micro_batches`` of a rank, by default as many as ``pp``."""

    model: str
    context_window: int
    tp: int
    cp: int
    pp: int
    dp: int
    micro_batches: int | None = None

    @property
    def layout(self) -> dict[str, Any]:
        """Keywords of ``simulated_job``."""
        return {name: getattr(self, name) for name in ("tp", "cp", "pp", "dp", "micro_batches")}

    @property
    def sizes(self) -> str:
        return f"{self.tp},{self.cp},{self.pp},{self.dp}"

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


_64K, _128K = 65_536, 131_072

PAPER_JOBS: dict[str, NamedJob] = {
    "550m-64k": NamedJob("550m", _64K, 2, 2, 4, 2),
    "550m-128k": NamedJob("550m", _128K, 2, 4, 4, 1),
    "7b-64k": NamedJob("7b", _64K, 4, 2, 4, 1),
    "7b-128k": NamedJob("7b", _128K, 8, 2, 4, 1),
    "30b-64k": NamedJob("30b", _64K, 8, 2, 4, 1),
    "30b-128k": NamedJob("30b", _128K, 8, 4, 4, 1),
    "70b-64k": NamedJob("70b", _64K, 16, 4, 4, 1),
    "70b-128k": NamedJob("70b", _128K, 16, 4, 4, 1),
}
NAMED_JOBS = PAPER_JOBS | {"405b-128k": NamedJob("llama3-405b", _128K, 8, 16, 16, 4)}


def named_job(name: str, preset: str = "best", **settings: object) -> SimulatedJob:
    """The job called ``name`` under one of the systems of ``wlb.config.PRESETS``.

    ``settings`` are further keywords of ``simulated_job``. Raises ``UserError`` that lists the names.
    """
    if name not in NAMED_JOBS:
        raise UserError(f"unknown job {name!r}; choose one of {', '.join(NAMED_JOBS)}, or give a configuration file")
    job = NAMED_JOBS[name]
    return simulated_job(job.model, job.context_window, preset, **(job.layout | settings))
