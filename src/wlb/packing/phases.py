"""What the forward and the backward of a micro-batch take: attention and all the rest have different shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.packing.plan import MicroBatch
from wlb.workload.base import Phase, Workload

_PHASES: tuple[Phase, ...] = ("forward", "backward")


def micro_batch_seconds(ranks: Sequence[Sequence[MicroBatch]], workload: Workload) -> NDArray[np.float64]:
    """Predicted seconds of all layers, shape (2, ranks, micro-batches per rank): forward, then backward."""
    micro_batches = [micro_batch for rank in ranks for micro_batch in rank]
    lengths = np.array([length for micro_batch in micro_batches for length in micro_batch.lengths], np.int64)
    owner = np.repeat(np.arange(len(micro_batches)), [len(micro_batch.segments) for micro_batch in micro_batches])
    tokens = np.bincount(owner, lengths, len(micro_batches))
    rows = [
        np.bincount(owner, workload.attention_seconds(lengths, phase), len(micro_batches))
        + workload.linear_seconds(tokens, phase)
        for phase in _PHASES
    ]
    return np.array(rows).reshape(2, len(ranks), -1)
