"""MagiAttention: cut a packed micro-batch into equal chunks and deal them to the ranks of a group by attention.

Source: SandAI-org/MagiAttention, ``magi_attention/meta/solver/dispatch_solver.py`` (``MinHeapDispatchAlg``, the
default) and ``_make_dispatch_meta.py``. A micro-batch is cut into equal chunks, regardless of documents. The chunk with
the most attention goes to the rank with the least so far, among ranks with fewer than ceil(chunks / ranks) chunks.
Tokens lie where they are attended, so ranks send only the keys and values that another rank attends.

Assumed: fixed groups, as large as a window needs; keys and values in four parts. Assumed in its favour: micro-batches
even in attention.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from wlb_studies.policies.filling import Integers, power_of_two
from wlb_studies.policies.plan import MovedPlan, Ranks, even_pools, joined, laid_in_a_row

CHUNKS = 8  # fewest chunks per rank, as published; the size of chunks follows from it


def dispatched(lengths: Integers, ranks: Ranks) -> MovedPlan:
    """Fixed groups, as large as a window needs; micro-batches even in attention (assumed)."""
    size = power_of_two(ranks.needed(ranks.window))
    pools, filled = even_pools(lengths, ranks, size)
    tables = []
    for first_lane, documents in filled:
        chunks = laid_in_a_row(sorted(documents), lengths, CHUNKS * size, first_lane=0)
        owner = dealt(np.bincount(chunks.lane, chunks.pairs, CHUNKS * size).tolist(), size)
        tables.append(chunks._replace(lane=first_lane + owner[chunks.lane]))
    work = joined(tables)
    return MovedPlan(lengths, pools, work, work, hidden_by="attention", reshuffled=True)


def dealt(areas: Sequence[float], ranks: int) -> Integers:
    """The rank of every chunk, given its attention; among equal chunks the last goes first."""
    most = -(-len(areas) // ranks)
    loads, chunks = [(0.0, rank) for rank in range(ranks)], [0] * ranks
    heapify(loads)
    owner = np.zeros(len(areas), np.int64)
    for chunk in np.argsort(areas, kind="stable")[::-1].tolist():
        load, rank = heappop(loads)
        owner[chunk] = rank
        chunks[rank] += 1
        if chunks[rank] < most:  # a full rank leaves the heap
            heappush(loads, (load + areas[chunk], rank))
    return owner
