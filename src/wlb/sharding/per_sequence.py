"""Per-sequence sharding: the micro-batch as one run, cut regardless of documents (Llama 3, Megatron; plain-4D).

Head and tail chunks are paired, so ranks would be balanced if one document filled the micro-batch. With several
documents the cuts fall anywhere in them and the attended areas differ (WLB-LLM, section 5.1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.plan import Table, split_by_rank


def per_sequence_pieces(lengths: NDArray[np.int64], cp_size: int) -> tuple[Table, ...]:
    """Cut the micro-batch into 2 x ``cp_size`` chunks; rank r holds chunks r and 2 x ``cp_size`` - 1 - r.

    Chunks differ by at most one token where the total is not a multiple of 2 x ``cp_size``.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(ends[-1])
    chunk_ends = np.arange(1, 2 * cp_size) * total // (2 * cp_size)
    cuts = np.unique(np.concatenate([[0], ends, chunk_ends]))
    left, right = cuts[:-1], cuts[1:]
    segment = np.searchsorted(ends, left, side="right")
    chunk = np.searchsorted(chunk_ends, left, side="right")
    rank = np.minimum(chunk, 2 * cp_size - 1 - chunk)
    table = np.stack([segment, left - starts[segment], right - starts[segment]], axis=1)
    return split_by_rank(rank, table, cp_size)
