"""Per-document sharding: every document in 2 x CP chunks, head and tail chunks paired (WLB-LLM, section 5.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.plan import Table, split_by_rank


def per_document_pieces(lengths: NDArray[np.int64], cp_size: int) -> tuple[Table, ...]:
    """Split every document into 2 x ``cp_size`` chunks and give rank r chunks r and 2 x ``cp_size`` - 1 - r.

    Rank r pairs a cheap head chunk with its expensive tail chunk, so every rank attends about the same area of
    every document. The remainder of a length is dealt one token a chunk, rank after rank, going on with the next
    document where the last one stopped: no padding, and ranks differ by at most one token in all.
    """
    return split_by_rank(*chunk_table(np.arange(len(lengths)), lengths, cp_size), cp_size)


def chunk_table(
    segments: NDArray[np.int64], lengths: NDArray[np.int64], cp_size: int, dealt: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], Table]:
    """Ranks and rows (segment, start, stop) of all chunks of ``segments``, whose lengths are ``lengths``.

    ``dealt`` counts the remainder tokens dealt before each segment, by default those of the segments before it.
    """
    chunks = 2 * cp_size
    turn = np.concatenate([np.arange(cp_size), np.arange(chunks - 1, cp_size - 1, -1)])  # chunks by dealing turn
    if dealt is None:
        dealt = np.cumsum(lengths % chunks) - lengths % chunks
    extra = np.empty((len(lengths), chunks), dtype=np.int64)
    extra[:, turn] = (np.arange(chunks) - dealt[:, None]) % chunks < (lengths % chunks)[:, None]
    stops = np.cumsum(lengths[:, None] // chunks + extra, axis=1)
    starts = np.concatenate([np.zeros((len(lengths), 1), dtype=np.int64), stops[:, :-1]], axis=1)
    chunk = np.broadcast_to(np.arange(chunks), stops.shape)
    table = np.stack([np.repeat(segments, chunks), starts.ravel(), stops.ravel()], axis=1)
    return np.minimum(chunk, chunks - 1 - chunk).ravel(), table
