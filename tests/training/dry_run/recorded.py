"""The calls of every rank of a small job, recorded by dry runs of all of them."""

from __future__ import annotations

from typing import Any

from tests.training.jobs import settings
from wlb.job.config import JobConfig
from wlb.training.dry_run.calls import Call
from wlb.training.dry_run.problems import find_problems
from wlb.training.dry_run.rank import run_ranks

STEPS = (1, 2)  # later steps gather weights in another order than the first


def small_job(folder: Any, preset: str = "best", **changes: dict[str, Any]) -> JobConfig:
    sections = settings(folder, **changes)
    return JobConfig.model_validate({"preset": preset, **sections})


def recorded_calls(config: JobConfig, hardware: str = "cpu") -> dict[int, list[Call]]:
    """How every rank sets itself up, and two of its steps, played as one after the other."""
    found = find_problems(config, hardware)
    runs = run_ranks(found, range(config.parallel.layout.world_size), STEPS)
    return {run.rank: joined((run.setup, *run.calls)) for run in runs}


def joined(steps: tuple[tuple[Call, ...], ...]) -> list[Call]:
    return [call for step in steps for call in step]
