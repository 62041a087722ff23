"""Everything that would stop a job at its start, found without starting it and without changing a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from wlb.documents.store.mixture import open_stores
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.memory.step import limit_of_gpu
from wlb.training.dry_run.synthetic_store import SyntheticStore, synthetic_store
from wlb.training.memory_budget import memory_limit
from wlb.training.preflight import CheckedJob, checked
from wlb.workload import hardware_preset

_T = TypeVar("_T")


@dataclass(frozen=True)
class FoundJob(CheckedJob):
    """A checked job, the documents it is tried on, and what would stop it."""

    hardware: str
    problems: tuple[str, ...]


def find_problems(config: JobConfig, hardware: str) -> FoundJob:
    """What would stop ``config`` on machines of ``hardware``, a preset's name, which see the files that this one does.

    Raises ``UserError`` where so much is wrong that no step can be planned.
    """
    problems: dict[str, None] = {}

    def tried(check: Callable[[], _T]) -> _T | None:
        try:
            return check()
        except UserError as error:
            problems[str(error)] = None
            return None

    rates = hardware_preset(hardware)
    limit = limit_of_gpu(rates.memory_bytes)
    if rates.device_type == "cpu":
        limit = memory_limit(config.training, "cpu", config.parallel.world_size)
    store = tried(lambda: open_stores(config.data.stores)) or synthetic_store(config)
    job = checked(config, store, hardware, limit, _check_could_write, tried)
    if not isinstance(store, SyntheticStore):
        tried(job.check_data)
    return FoundJob(**vars(job), hardware=hardware, problems=tuple(problems))


def _check_could_write(name: str, directory: Path) -> None:
    """Raise ``UserError`` unless ``directory`` can be written, or made where it does not exist."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "" if existing == directory.absolute() else f": {existing} is not a directory that can be written"
        raise UserError(f"{name} {directory} cannot be written{what}")
