"""What a document adds to the seconds of a micro-batch whose context-parallel group shards it.

W_a + W_l says what a document costs a group that shares it evenly and exchanges everything. But a short document stays
whole on one rank under hybrid sharding and exchanges nothing, while a long one is cut, and where ranks are far apart
its keys and values take longer than the attention that hides them. So documents are probed: micro-batches with one
document each, among short ones, are sharded and priced as a group (``wlb.sharding.latency``), and what the document
adds, over W_a + W_l, is the correction for its length. Between probes it is interpolated.

Micro-batches that are even by these prices are closer to even when they run than by W_a + W_l. In large groups they are
not quite even: what is added depends on what is there, as one exchange hides behind the attention of several documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.packing.plan import MicroBatch, StepPlan
from wlb.sharding import MicroBatches, shard_many
from wlb.sharding.latency import group_seconds
from wlb.sharding.pieces import locality
from wlb.workload import Hardware, ModelShape, Workload, make_workload
from wlb.workload.base import DocumentPrices, Seconds

_PROBES = np.arange(2, 17) / 16  # lengths of documents, in context windows
_SHORT = 64  # short documents fill a window
_AMONG = (0.5, 0.75, 1.0, 1.25)  # windows of short documents beside the probed one; their mean evens out roundings
_ALONE = 0.5  # windows of short documents alone, and three times as many
_DECIMALS = 4  # of corrections, so that rounding on different CPUs does not make plans differ
# Corrections. Short documents that stay whole in a group of 64 ranks cost 0.07 of W_a + W_l, which has them exchanged;
# outside these bounds, the window is too short to be probed.
_LEAST, _MOST = 0.05, 4.0


@dataclass(frozen=True)
class ShardedPrices:
    """Documents priced with a correction that depends on their length; ``lengths`` in tokens, ascending."""

    alone: Workload
    lengths: NDArray[np.float64]
    corrections: NDArray[np.float64]

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """Seconds that each document adds, forward and backward; shape of ``lengths`` (tokens)."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.alone.document_seconds(tokens) * np.interp(tokens, self.lengths, self.corrections)


@lru_cache(maxsize=64)
def sharded_prices(
    shape: ModelShape, hardware: Hardware, tp: int, cp: int, strategy: str, context_window: int
) -> DocumentPrices:
    """Prices of documents of up to ``context_window`` tokens on tp x cp GPUs that shard by ``strategy``."""
    alone = make_workload(shape, hardware, tp=tp, cp=cp)
    if cp == 1:
        return alone
    short = max(1, context_window // _SHORT)
    probes = np.unique((_PROBES * context_window).astype(np.int64).clip(1))
    few, *among = [max(1, round(windows * context_window / short)) for windows in (_ALONE, *_AMONG)]
    many = 3 * few
    micro_batches = [[short] * few, [short] * many]
    micro_batches += [[probe, *[short] * count] for probe in probes.tolist() for count in among]
    seconds = _group_seconds(micro_batches, make_workload(shape, hardware, tp=tp), cp, strategy)
    each = (seconds[1] - seconds[0]) / (many - few)  # of a short document
    fixed = seconds[0] - few * each  # of every micro-batch
    added = seconds[2:].reshape(len(probes), -1) - fixed - each * np.array(among)
    ratios = [each / float(alone.document_seconds(short)), *(added.mean(axis=1) / alone.document_seconds(probes))]
    corrections = np.clip(np.round(ratios, _DECIMALS), _LEAST, _MOST)
    return ShardedPrices(alone, np.array([short, *probes], np.float64), corrections)


def priced_as_sharded(plan: StepPlan, workload: Workload, cp: int, strategy: str) -> StepPlan:
    """``plan`` with the seconds that groups of ``cp`` ranks take for its micro-batches, as sharded, for workloads.

    ``workload`` is that of one of these ranks. Seconds are whole nanoseconds, so that machines agree.
    """
    filled = [list(micro_batch.lengths) for micro_batch in plan.micro_batches if micro_batch.segments]
    seconds = iter(np.round(_group_seconds(filled, workload, cp, strategy), 9).tolist())

    def priced(micro_batch: MicroBatch) -> MicroBatch:
        return replace(micro_batch, workload=next(seconds)) if micro_batch.segments else micro_batch

    return replace(plan, ranks=tuple(tuple(map(priced, rank)) for rank in plan.ranks))


def _group_seconds(micro_batches: list[list[int]], workload: Workload, cp: int, strategy: str) -> NDArray[np.float64]:
    counts = np.array([len(lengths) for lengths in micro_batches])
    sizes = np.array([length for lengths in micro_batches for length in lengths])
    pieces = shard_many(MicroBatches(sizes, counts), cp, strategy, workload)
    return group_seconds(pieces, locality(pieces, len(sizes), len(counts), cp), workload)
