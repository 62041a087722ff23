"""A virtual token store: documents of random lengths whose tokens are all zero and take no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from wlb.documents.store.index import TokenIndex
from wlb.documents.store.reader import TokenStore
from wlb.documents.synthetic import sample_lengths
from wlb.job.config import JobConfig
from wlb.job.configured_model import configured_model

_DOCUMENTS_PER_WINDOW = 100  # twice as many as fill a context window on average
_STEPS = 4
_MOST_DOCUMENTS = 2**20  # more steps begin with them again
_TOKEN_TYPE = np.dtype("<i4")


class SyntheticStore(TokenStore):
    """Stands for the store of a job where that is elsewhere; lengths are those of ``wlb.documents.synthetic``."""

    identity = "synthetic"

    def __init__(self, documents: int, context_window: int, vocab_size: int) -> None:
        self._arguments = documents, context_window, vocab_size
        offsets = np.concatenate([[0], np.cumsum(sample_lengths(documents, context_window))])
        tokens = np.broadcast_to(np.zeros(1, _TOKEN_TYPE), int(offsets[-1]))
        super().__init__(Path("synthetic"), TokenIndex(_TOKEN_TYPE, offsets), tokens, {"vocab_size": vocab_size})

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return SyntheticStore, self._arguments


def synthetic_store(config: JobConfig) -> SyntheticStore:
    """Documents for a few steps of ``config``, with the vocabulary of its model; it may name no store that exists."""
    window = config.data.context_window
    documents = min(_DOCUMENTS_PER_WINDOW * config.packing.micro_batches * _STEPS, _MOST_DOCUMENTS)
    return SyntheticStore(documents, window, configured_model(config.model).shape.vocab_size)
