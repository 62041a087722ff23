"""Adaptive sharding: per-sequence or per-document, whichever is predicted to be faster (WLB-LLM, section 5.3).

Per-document sharding balances the ranks, but cuts short documents into chunks that waste tiles of the attention kernel;
per-sequence (head-tail) sharding does the opposite. The faster one is chosen for every micro-batch: all plans are
priced together as ``Candidates``, and the pieces of the best ones are picked. ``hybrid`` and ``balanced`` have
candidates of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.latency import Shards, group_seconds
from wlb.sharding.pieces import Integers, MicroBatches, Pieces, in_order, locality, merged
from wlb.sharding.plan import Table
from wlb.sharding.static import per_document, per_sequence
from wlb.workload import Costs
from wlb.workload.base import Seconds


class Candidates(NamedTuple):
    """Plans of ``micro_batches``, any number for each; lanes and segments of ``pieces`` count over all plans."""

    micro_batches: MicroBatches
    cp_size: int
    micro_batch: Integers  # the micro-batch of every plan
    pieces: Pieces

    @property
    def segments(self) -> Integers:
        """Number of segments of every plan."""
        return self.micro_batches.counts[self.micro_batch]


def adaptive(micro_batches: MicroBatches, cp_size: int, workload: Costs) -> Pieces:
    """Per-document sharding, unless per-sequence (head-tail) sharding makes the group faster."""
    candidates = static_candidates(micro_batches, cp_size)
    seconds, _ = price(candidates, workload)
    return best_pieces(candidates, seconds)


def static_candidates(micro_batches: MicroBatches, cp_size: int) -> Candidates:
    """The plans that ``adaptive`` chooses from: first per-document, then per-sequence plans."""
    one_each = np.arange(len(micro_batches.counts))
    plans = (make(micro_batches, cp_size) for make in (per_document, per_sequence))
    return joined([Candidates(micro_batches, cp_size, one_each, pieces) for pieces in plans])


def candidates_of(
    plans: Iterable[tuple[int, Integers, Table]], micro_batches: MicroBatches, cp_size: int
) -> Candidates:
    """Candidates from plans: a micro-batch, and the ranks and rows (segment, start, stop) of pieces in any order."""
    chosen, ranks, tables = [*zip(*plans, strict=True)] or ((), (), ())
    candidates = Candidates(micro_batches, cp_size, np.array(chosen, np.int64), Pieces(*np.empty((4, 0), np.int64)))
    if not chosen:
        return candidates
    plan, segments = np.repeat(np.arange(len(chosen)), [*map(len, tables)]), candidates.segments
    segment, start, stop = np.concatenate(tables).T
    segment = segment + (np.cumsum(segments) - segments)[plan]
    pieces = Pieces(np.concatenate(ranks) + cp_size * plan, segment, start, stop)
    return candidates._replace(pieces=merged(*in_order(pieces)))


def joined(candidates: Sequence[Candidates]) -> Candidates:
    """Concatenate ``candidates`` of the same micro-batches, in order."""
    columns, plans, segments = [], 0, 0
    for each in candidates:
        lane, segment, start, stop = each.pieces
        columns.append((lane + plans * each.cp_size, segment + segments, start, stop))
        plans += len(each.micro_batch)
        segments += int(each.segments.sum())
    together = Pieces(*map(np.concatenate, zip(*columns, strict=True)))
    micro_batch = np.concatenate([each.micro_batch for each in candidates])
    return candidates[0]._replace(micro_batch=micro_batch, pieces=together)


def price(candidates: Candidates, workload: Costs) -> tuple[Seconds, Integers]:
    """Group seconds of every plan, by the ``workload`` of one GPU with cp = 1, and the tokens that are gathered."""
    segments, plans = int(candidates.segments.sum()), len(candidates.micro_batch)
    where = locality(candidates.pieces, segments, plans, candidates.cp_size)
    shards = Shards.of_pieces(candidates.pieces, where, workload)
    return group_seconds(shards, workload).both, where.gathered_tokens


def best_pieces(candidates: Candidates, *keys: NDArray[Any]) -> Pieces:
    """The pieces of the plan with the smallest ``keys`` for each micro-batch; the last key counts most."""
    best_first = np.lexsort((*keys, candidates.micro_batch))
    _, first = np.unique(candidates.micro_batch[best_first], return_index=True)
    chosen, segments = best_first[first], candidates.segments
    to_micro_batch = np.full(len(segments), -1)
    to_micro_batch[chosen] = np.arange(len(chosen))
    to_segment = candidates.micro_batches.first[candidates.micro_batch] - (np.cumsum(segments) - segments)
    lane, segment, start, stop = candidates.pieces
    plan, rank = np.divmod(lane, candidates.cp_size)
    keep = np.flatnonzero(to_micro_batch[plan] >= 0)
    plan = plan[keep]
    lane, segment = to_micro_batch[plan] * candidates.cp_size + rank[keep], segment[keep] + to_segment[plan]
    order = np.argsort(segment, kind="stable")  # pieces of a segment are already in order
    return Pieces(lane[order], segment[order], start[keep][order], stop[keep][order])
