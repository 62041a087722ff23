"""FCP: attention in blocks of 4K tokens, each on any rank.

Source: arXiv 2605.08524 (MLSys '26), known at second hand; no code is published. Documents are taken longest first;
their blocks go in pairs from both ends to the rank with room that has the least attention. Data are reshuffled where
attention begins and ends. Keys and values travel point to point, ordered so that no adapter serves two at once.

Assumed: a memory cap of 1.25 even shares; reshuffling is not hidden; keys and values travel in four parts. Assumed in
its favour: no adapter ever serves two at once.
"""

import numpy as np

from wlb.workload.flops import attended_pairs
from wlb_studies.policies.distca import even_micro_batches
from wlb_studies.policies.filling import Integers
from wlb_studies.policies.plan import MovedPlan, Ranks, joined, laid_in_a_row, tasks_of

BLOCK = 4096  # tokens
MEMORY = 1.25  # tokens that a rank may attend, over an even share; assumed


def blocks(lengths: Integers, ranks: Ranks) -> MovedPlan:
    """Put each block whole on one rank; all ranks form one pool."""
    homes, rows = [], []
    micro_batches = even_micro_batches(lengths, ranks)
    for slot, documents in enumerate(micro_batches):
        first_lane = slot * ranks.count
        homes.append(laid_in_a_row(documents, lengths, ranks.count, first_lane))
        rows += _dealt(documents, lengths, ranks.count, first_lane)
    return MovedPlan(
        lengths,
        np.zeros((ranks.count, len(micro_batches)), np.int64),
        joined(homes),
        tasks_of(rows),
        hidden_by="attention",
        reshuffled=True,
    )


def _dealt(
    documents: list[int], lengths: Integers, ranks: int, first_lane: int
) -> list[tuple[int, int, int, int, float]]:
    loads, tokens = np.zeros(ranks), np.zeros(ranks)
    even = float(lengths[documents].sum()) / ranks
    most = max(MEMORY * even, even + 2 * BLOCK)
    rows: list[tuple[int, int, int, int, float]] = []
    for document in sorted(documents, key=lambda d: -lengths[d]):
        length = int(lengths[document])
        starts = range(0, length, BLOCK)
        for low in range((len(starts) + 1) // 2):
            pair = [(starts[i], min(starts[i] + BLOCK, length)) for i in sorted({low, len(starts) - 1 - low})]
            size = sum(stop - start for start, stop in pair)
            rank = int(np.where(tokens + size <= most, loads, np.inf).argmin())
            tokens[rank] += size
            loads[rank] += sum(float(attended_pairs(stop) - attended_pairs(start)) for start, stop in pair)
            rows += [(first_lane + rank, document, start, stop, 1.0) for start, stop in pair]
    return rows
