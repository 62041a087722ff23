"""Per-sequence sharding: the micro-batch as one run, cut regardless of documents (Llama 3, Megatron; plain-4D).

Head and tail chunks are paired, so ranks would be balanced if one document filled the micro-batch. With several
documents the cuts fall anywhere in them and the attended areas differ (WLB-LLM, section 5.1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.per_document import chunk_table
from wlb.sharding.plan import Table, split_by_rank


def per_sequence_pieces(lengths: NDArray[np.int64], cp_size: int) -> tuple[Table, ...]:
    """Cut the micro-batch into 2 x ``cp_size`` chunks; rank r holds chunks r and 2 x ``cp_size`` - 1 - r.

    Where the total is not a multiple of 2 x ``cp_size``, chunks and ranks differ by at most one token.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    _, chunks = chunk_table(np.zeros(1, dtype=np.int64), ends[-1:], cp_size)
    chunk_ends = chunks[:-1, 2]
    cuts = np.unique(np.concatenate([[0], ends, chunk_ends]))
    left, right = cuts[:-1], cuts[1:]
    segment = np.searchsorted(ends, left, side="right")
    chunk = np.searchsorted(chunk_ends, left, side="right")
    rank = np.minimum(chunk, 2 * cp_size - 1 - chunk)
    table = np.stack([segment, left - starts[segment], right - starts[segment]], axis=1)
    return split_by_rank(rank, table, cp_size)
