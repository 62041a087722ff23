"""Adaptive sharding: whichever of per-sequence and per-document is predicted to be faster (WLB-LLM, section 5.3).

Per-document sharding balances the ranks, but cuts short documents into chunks that waste the attention kernel's tiles;
per-sequence sharding does the opposite. Which one wins is decided for every micro-batch: all plans are priced together
as ``Candidates``, and the chosen ones' pieces are picked out. ``wlb.sharding.hybrid`` adds candidates of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from wlb.sharding.latency import Shards, group_seconds
from wlb.sharding.pieces import Integers, MicroBatches, Pieces, locality, merged, pieces_of_rows
from wlb.sharding.plan import Table
from wlb.sharding.static import per_document, per_sequence
from wlb.workload import Costs
from wlb.workload.base import Seconds


class Candidates(NamedTuple):
    """Plans of micro-batches, any number of each; lanes and segments of ``pieces`` count over all plans."""

    micro_batch: Integers  # of every plan
    pieces: Pieces


def adaptive(micro_batches: MicroBatches, cp_size: int, workload: Costs) -> Pieces:
    """Per-document sharding, unless per-sequence sharding makes the group faster."""
    candidates = joined(static_candidates(micro_batches, cp_size), micro_batches, cp_size)
    seconds, _ = price(candidates, micro_batches, cp_size, workload)
    return pieces_of_plans(faster_static(seconds, micro_batches), candidates, micro_batches, cp_size)


def static_candidates(micro_batches: MicroBatches, cp_size: int) -> list[Candidates]:
    """The plans that ``adaptive`` chooses from: per-document ones, then per-sequence ones."""
    one_each = np.arange(len(micro_batches.counts))
    return [Candidates(one_each, make(micro_batches, cp_size)) for make in (per_document, per_sequence)]


def faster_static(seconds: Seconds, micro_batches: MicroBatches) -> Integers:
    """The plan that ``adaptive`` chooses for each micro-batch, where ``static_candidates`` come first."""
    count = len(micro_batches.counts)
    by_document, by_sequence = seconds[:count], seconds[count : 2 * count]
    return np.arange(count) + count * (by_sequence < by_document)


def candidates_of(
    plans: Iterable[tuple[int, Integers, Table]], micro_batches: MicroBatches, cp_size: int
) -> Candidates:
    """From the micro-batch of every plan, and the ranks and rows (segment, start, stop) of its pieces in any order."""
    chosen: list[int] = []
    lanes, tables, segments = [], [], 0
    for micro_batch, ranks, table in plans:
        lanes.append(ranks + len(chosen) * cp_size)
        tables.append(table + np.array([segments, 0, 0]))
        chosen.append(micro_batch)
        segments += int(micro_batches.counts[micro_batch])
    if not chosen:
        return Candidates(np.empty(0, np.int64), Pieces(*np.empty((4, 0), np.int64)))
    return Candidates(np.array(chosen), merged(*pieces_of_rows(lanes, tables)))


def joined(candidates: Sequence[Candidates], micro_batches: MicroBatches, cp_size: int) -> Candidates:
    """All ``candidates`` as one, in order."""
    columns, plans, segments = [], 0, 0
    for micro_batch, pieces in candidates:
        lane, segment, start, stop = pieces
        columns.append((lane + plans * cp_size, segment + segments, start, stop))
        plans += len(micro_batch)
        segments += int(micro_batches.counts[micro_batch].sum())
    together = Pieces(*map(np.concatenate, zip(*columns, strict=True)))
    return Candidates(np.concatenate([micro_batch for micro_batch, _ in candidates]), together)


def price(
    candidates: Candidates, micro_batches: MicroBatches, cp_size: int, workload: Costs
) -> tuple[Seconds, Integers]:
    """Seconds of every plan's group by the ``workload`` of one GPU without context parallelism; tokens that travel."""
    plans = len(candidates.micro_batch)
    segments = int(micro_batches.counts[candidates.micro_batch].sum())
    where = locality(candidates.pieces, segments, plans, cp_size)
    shards = Shards.of_pieces(candidates.pieces, where, workload)
    return group_seconds(shards, workload).both, where.gathered_tokens


def pieces_of_plans(chosen: Integers, candidates: Candidates, micro_batches: MicroBatches, cp_size: int) -> Pieces:
    """The pieces of one plan for each micro-batch, ``chosen[i]`` for the i-th."""
    counts = micro_batches.counts[candidates.micro_batch]
    to_micro_batch = np.full(len(counts), -1)
    to_micro_batch[chosen] = np.arange(len(chosen))
    to_segment = micro_batches.first[candidates.micro_batch] - (np.cumsum(counts) - counts)
    lane, segment, start, stop = candidates.pieces
    plan, rank = np.divmod(lane, cp_size)
    keep = np.flatnonzero(to_micro_batch[plan] >= 0)
    plan = plan[keep]
    lane, segment = to_micro_batch[plan] * cp_size + rank[keep], segment[keep] + to_segment[plan]
    order = np.argsort(segment, kind="stable")  # those of one segment are in order already
    return Pieces(lane[order], segment[order], start[keep][order], stop[keep][order])
