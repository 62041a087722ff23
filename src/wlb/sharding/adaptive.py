"""Adaptive sharding: per-sequence or per-document, whichever is predicted to be faster (WLB-LLM, section 5.3).

Per-document sharding balances the ranks, but cuts short documents into chunks that waste tiles of the attention kernel;
per-sequence (head-tail) sharding does the opposite. The faster one is chosen for every micro-batch.
"""

import numpy as np

from wlb.sharding.latency import Priced
from wlb.sharding.pieces import MicroBatches, Pieces, in_order, locality
from wlb.sharding.static import per_document, per_sequence
from wlb.workload import Costs
from wlb.workload.base import Seconds


def adaptive(micro_batches: MicroBatches, cp_size: int, workload: Costs) -> Pieces:
    """Per-document sharding, unless per-sequence (head-tail) sharding makes the group faster.

    ``workload`` is that of one GPU, with cp = 1.
    """

    def seconds(pieces: Pieces) -> Seconds:
        shards = locality(pieces, len(micro_batches.sizes), len(micro_batches.counts), cp_size)
        return Priced.of(shards.attending(pieces, workload), workload).whole.both

    plans = [make(micro_batches, cp_size) for make in (per_document, per_sequence)]
    fastest = np.argmin([seconds(pieces) for pieces in plans], axis=0)
    chosen = [
        [column[fastest[pieces.lane // cp_size] == number] for column in pieces] for number, pieces in enumerate(plans)
    ]
    return in_order(Pieces(*map(np.concatenate, zip(*chosen, strict=True))))
