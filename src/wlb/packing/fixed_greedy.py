"""Fixed-length greedy packing (fixed-4D): whole documents, at most a context window per micro-batch.

Packing ``window`` global batches together balances better, at the price of changing which step trains which
document (WLB-LLM, sections 2.3 and 7.2).
"""

from __future__ import annotations

from wlb.packing.pooling import PoolingPacker
from wlb.workload.base import DocumentPrices


class FixedGreedyPacker(PoolingPacker):
    """Longest document first into the lightest micro-batch with room."""

    name = "fixed_greedy"

    def __init__(
        self,
        *,
        micro_batches: int,
        context_window: int,
        workload: DocumentPrices,
        window: int = 1,
        max_delay: int | None = None,
    ) -> None:
        super().__init__(
            micro_batches=micro_batches,
            context_window=context_window,
            workload=workload,
            capacity=context_window,
            window=window,
            max_delay=max_delay,
        )
