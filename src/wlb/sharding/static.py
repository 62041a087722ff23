"""Head-tail (zigzag) sharding, of every document (``per_document``) or of the whole micro-batch (``per_sequence``).

Both cut into 2 x CP chunks and give rank r chunks r and 2 x CP - 1 - r: a cheap head with its expensive tail.
"""

import numpy as np

from wlb.sharding.pieces import Integers, MicroBatches, Pieces, merged
from wlb.workload import Costs


def per_document(micro_batches: MicroBatches, cp_size: int, workload: Costs | None = None) -> Pieces:
    """Cut every document, so that every rank attends about the same area of each (WLB-LLM, section 5.1).

    Remainder tokens are dealt one per chunk, rank after rank, and the next document of the micro-batch continues where
    the last one stopped. Nothing is padded, and ranks differ by at most one token in total.
    """
    sizes, counts = micro_batches
    remainders = sizes % (2 * cp_size)
    dealt = np.cumsum(remainders) - remainders
    dealt -= np.repeat(dealt[micro_batches.first], counts)
    starts, stops, ranks = _chunks(sizes, cp_size, dealt)
    micro_batch = np.repeat(np.arange(len(counts)), counts * 2 * cp_size)
    segment = np.repeat(np.arange(len(sizes)), 2 * cp_size)
    return merged(micro_batch * cp_size + ranks, segment, starts, stops)


def per_sequence(micro_batches: MicroBatches, cp_size: int, workload: Costs | None = None) -> Pieces:
    """Cut the micro-batch regardless of documents (Llama 3, Megatron; plain-4D): ranks differ where several fill it.

    Where the total is not a multiple of 2 x ``cp_size``, chunks and ranks differ by at most one token.
    """
    ends = np.cumsum(micro_batches.sizes)
    starts = ends - micro_batches.sizes
    totals = np.add.reduceat(micro_batches.sizes, micro_batches.first)
    _, stops, _ = _chunks(totals, cp_size, np.zeros_like(totals))
    chunk_ends = stops + np.repeat(np.cumsum(totals) - totals, 2 * cp_size)
    cuts = np.unique(np.concatenate([[0], ends, chunk_ends]))
    left, right = cuts[:-1], cuts[1:]
    segment = np.searchsorted(ends, left, side="right")
    micro_batch, chunk = np.divmod(np.searchsorted(chunk_ends, left, side="right"), 2 * cp_size)
    lane = micro_batch * cp_size + np.minimum(chunk, 2 * cp_size - 1 - chunk)
    return merged(lane, segment, left - starts[segment], right - starts[segment])


def _chunks(lengths: Integers, cp_size: int, dealt: Integers) -> tuple[Integers, Integers, Integers]:
    """Start, stop and rank of the 2 x ``cp_size`` chunks of each of ``lengths``, one length after another.

    ``dealt`` counts the remainder tokens dealt before each length, to ranks in turn.
    """
    chunks = 2 * cp_size
    turn = np.concatenate([np.arange(cp_size), np.arange(chunks - 1, cp_size - 1, -1)])  # chunks by dealing turn
    extra = np.empty((len(lengths), chunks), dtype=np.int64)
    extra[:, turn] = (np.arange(chunks) - dealt[:, None]) % chunks < (lengths % chunks)[:, None]
    sizes = lengths[:, None] // chunks + extra
    stops = np.cumsum(sizes, axis=1)
    chunk = np.arange(chunks)
    ranks = np.broadcast_to(np.minimum(chunk, chunks - 1 - chunk), stops.shape)
    return (stops - sizes).ravel(), stops.ravel(), ranks.ravel()
