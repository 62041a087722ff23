"""Everything that would stop a job at its start, found without starting it and without changing a file.

Where its token store is elsewhere, synthetic documents stand for it: their tokens are all zero and take no memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from wlb.documents.store.index import TokenIndex
from wlb.documents.store.reader import Shard, TokenStore
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.configured_shape import configured_shape
from wlb.job.job import limit_of_gpu
from wlb.training.preflight import CheckedJob, checked, memory_limit
from wlb.workload import hardware_preset

_DOCUMENTS_PER_WINDOW = 100  # twice as many as fill a context window on average
_STEPS = 4
_MOST_DOCUMENTS = 2**20  # more steps begin with them again
_TOKEN_TYPE = np.dtype("<i4")

_T = TypeVar("_T")


class SyntheticStore(TokenStore):
    """Stands for the store of a job where that is elsewhere; lengths are those of ``wlb.documents.synthetic``."""

    identity = "synthetic"

    def __init__(self, documents: int, context_window: int, vocab_size: int, stores: int = 1) -> None:
        """``stores`` stores of so many documents each."""
        self._arguments = documents, context_window, vocab_size, stores
        lengths = sample_lengths(documents, context_window)
        ends = np.cumsum(lengths)
        pointers, firsts = (ends - lengths) * _TOKEN_TYPE.itemsize, np.arange(documents + 1)
        index = TokenIndex("synthetic", _TOKEN_TYPE, lengths.astype(np.int32), pointers, firsts)
        tokens = np.broadcast_to(np.zeros(1, _TOKEN_TYPE), int(ends[-1]))
        self._drawn = Shard(index, tokens, {"vocab_size": vocab_size})
        super().__init__([["synthetic"]] * stores)

    def _open_shard(self, prefix: str) -> Shard:
        return self._drawn

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return SyntheticStore, self._arguments


def synthetic_store(config: JobConfig) -> SyntheticStore:
    """Documents for a few steps of ``config``, with the vocabulary of its model; it may name no store that exists."""
    window = config.data.context_window
    documents = min(_DOCUMENTS_PER_WINDOW * config.packing.micro_batches * _STEPS, _MOST_DOCUMENTS)
    return SyntheticStore(documents, window, configured_shape(config.model).vocab_size, len(config.data.stores))


@dataclass(frozen=True)
class FoundJob(CheckedJob):
    """A checked job, whether synthetic documents stand for its own, and what would stop it."""

    hardware: str
    problems: tuple[str, ...]
    synthetic: bool


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
        limit = memory_limit("cpu", config.parallel.layout.world_size)
    stored = tried(lambda: TokenStore.open(*config.data.stores))
    store = stored or synthetic_store(config)
    job = checked(config, store, hardware, limit, _check_could_write, tried)
    if stored:
        tried(job.check_data)
    return FoundJob(**vars(job), hardware=hardware, problems=tuple(problems), synthetic=stored is None)


def _check_could_write(name: str, directory: Path) -> None:
    """Raise ``UserError`` unless ``directory`` can be written, or made where it does not exist."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "" if existing == directory.absolute() else f": {existing} is not a directory that can be written"
        raise UserError(f"{name} {directory} cannot be written{what}")
