"""Adaptive sharding: whichever of per-sequence and per-document is predicted to be faster (WLB-LLM, section 5.3).

Per-document sharding balances the ranks, but cuts short documents into chunks that waste the attention kernel's tiles;
per-sequence sharding does the opposite. Which one wins is decided for every micro-batch.
"""

from __future__ import annotations

import numpy as np

from wlb.sharding.candidates import Candidates, Prices, joined, one_each, pieces_of_plans, price
from wlb.sharding.pieces import Integers, MicroBatches, Pieces
from wlb.sharding.static import per_document, per_sequence
from wlb.workload.base import Workload


def adaptive(micro_batches: MicroBatches, cp_size: int, workload: Workload) -> Pieces:
    """Per-document sharding, unless per-sequence sharding makes the group faster."""
    candidates = joined(static_candidates(micro_batches, cp_size), micro_batches, cp_size)
    prices = price(candidates, micro_batches, cp_size, workload)
    return pieces_of_plans(faster_static(prices, micro_batches), candidates, micro_batches, cp_size)


def static_candidates(micro_batches: MicroBatches, cp_size: int) -> list[Candidates]:
    """The plans that ``adaptive`` chooses from: per-document ones, then per-sequence ones."""
    return [one_each(make(micro_batches, cp_size), micro_batches) for make in (per_document, per_sequence)]


def faster_static(prices: Prices, micro_batches: MicroBatches) -> Integers:
    """The plan that ``adaptive`` chooses for each micro-batch, where ``static_candidates`` come first."""
    count = len(micro_batches.counts)
    by_document, by_sequence = prices.seconds[:count], prices.seconds[count : 2 * count]
    return np.arange(count) + count * (by_sequence < by_document)
