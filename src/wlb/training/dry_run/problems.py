"""Everything that would stop a job at its start, found without starting it and without changing a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from wlb.config import JobConfig
from wlb.documents.store.mixture import TrainedStore, document_lengths, open_stores
from wlb.errors import UserError
from wlb.planning.job import JobSpec
from wlb.planning.memory import MemoryLimit, largest_factor, limit_of_gpu, too_large
from wlb.simulate.pools import with_decided_pools
from wlb.training.data.loader import check_identity, data_identity
from wlb.training.dry_run.synthetic_store import SyntheticStore, synthetic_store
from wlb.training.memory_budget import memory_limit
from wlb.training.preflight import arranged_as, directory_checks, saved_loader_state, settings_checks
from wlb.training.runtime.environment import trained_model

_T = TypeVar("_T")


@dataclass(frozen=True)
class FoundJob:
    """A configuration in which nothing is left to decide, the documents it is tried on, and what would stop it."""

    config: JobConfig
    store: TrainedStore
    job: JobSpec
    hardware: str
    limit: MemoryLimit
    problems: tuple[str, ...]


def find_problems(config: JobConfig, hardware: str) -> FoundJob:
    """What would stop ``config`` on machines of ``hardware``, a preset's name, which see the files that this one does.

    Raises ``UserError`` where so much is wrong that no step can be planned.
    """
    problems: list[str] = []

    def tried(check: Callable[[], _T]) -> _T | None:
        try:
            return check()
        except UserError as error:
            problems.append(str(error))
            return None

    store = tried(lambda: open_stores(config.data.stores)) or synthetic_store(config)
    model = trained_model(config, store)
    for check in (*settings_checks(config, store, model), *directory_checks(config, _check_could_write)):
        tried(check)
    saved = tried(lambda: saved_loader_state(config, model))
    job = JobSpec.from_config(config, hardware, model=model)
    limit = _limit(config, job)
    job = with_decided_pools(job, document_lengths(store), limit)
    config = arranged_as(config, job)
    if job.packing.length_factor == "auto":
        job = job.with_length_factor(largest_factor(job, limit) or job.least_length_factor)
    if problem := too_large(job, limit):
        problems.append(problem)
    config = config.model_copy(update={"packing": job.packing})
    if saved is not None and not isinstance(store, SyntheticStore):
        allowed = config.checkpoint.allow_changed_data
        tried(lambda: check_identity(saved, data_identity(store, config), allow_changes=allowed))
    return FoundJob(config, store, job, hardware, limit, tuple(problems))


def _limit(config: JobConfig, job: JobSpec) -> MemoryLimit:
    if job.hardware.device_type == "cpu" or config.training.memory_gib is not None:
        return memory_limit(config, job.hardware.device_type, config.parallel.world_size)
    return limit_of_gpu(job.hardware.memory_bytes)


def _check_could_write(name: str, directory: Path) -> None:
    """Raise ``UserError`` unless ``directory`` can be written, or made where it does not exist."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "" if existing == directory.absolute() else f": {existing} is not a directory that can be written"
        raise UserError(f"{name} {directory} cannot be written{what}")
