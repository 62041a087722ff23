"""Sharding and pricing of many micro-batches at once, for those who simulate thousands of steps.

The pieces of all micro-batches stand in one table, so that sharding and pricing them are a few NumPy operations however
many they are. They are exactly the pieces that ``make_shard_plan`` makes, one micro-batch at a time.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.sharding import check_strategy
from wlb.sharding.hybrid import hybrid_choice, hybrid_choices
from wlb.sharding.latency import Candidate, group_seconds, priced
from wlb.sharding.per_document import chunk_table
from wlb.sharding.pieces import Integers, Pieces, locality
from wlb.sharding.plan import owners
from wlb.workload.base import Workload


class MicroBatches(NamedTuple):
    """Segments of many micro-batches, one after another; none of them is empty."""

    sizes: Integers  # tokens of every segment
    counts: Integers  # segments of every micro-batch

    @property
    def first(self) -> Integers:
        """The first segment of every micro-batch."""
        return np.cumsum(self.counts) - self.counts


def shard_many(micro_batches: MicroBatches, cp_size: int, strategy: str, workload: Workload) -> Pieces:
    """The pieces that ``make_shard_plan`` makes of each micro-batch; arguments as there.

    Raises ``UserError`` for an unknown strategy.
    """
    check_strategy(strategy)
    if strategy == "per_document":
        return _per_document(micro_batches, cp_size)
    if strategy == "per_sequence":
        return _per_sequence(micro_batches, cp_size)
    adaptive, slowest, gathered = _adaptive(micro_batches, cp_size, workload)
    if strategy == "adaptive":
        return adaptive
    return _hybrid(micro_batches, cp_size, workload, adaptive, slowest, gathered)


def _per_document(micro_batches: MicroBatches, cp_size: int) -> Pieces:
    sizes, counts = micro_batches
    remainders = sizes % (2 * cp_size)
    dealt = np.cumsum(remainders) - remainders
    dealt -= np.repeat(dealt[micro_batches.first], counts)
    rank, table = chunk_table(np.arange(len(sizes)), sizes, cp_size, dealt)
    micro_batch = np.repeat(np.arange(len(counts)), counts * 2 * cp_size)
    return _merged(micro_batch * cp_size + rank, *table.T)


def _per_sequence(micro_batches: MicroBatches, cp_size: int) -> Pieces:
    ends = np.cumsum(micro_batches.sizes)
    starts = ends - micro_batches.sizes
    totals = np.add.reduceat(micro_batches.sizes, micro_batches.first)
    chunks = 2 * cp_size
    _, table = chunk_table(np.arange(len(totals)), totals, cp_size, np.zeros_like(totals))
    chunk_ends = table[:, 2] + np.repeat(np.cumsum(totals) - totals, chunks)
    cuts = np.unique(np.concatenate([[0], ends, chunk_ends]))
    left, right = cuts[:-1], cuts[1:]
    segment = np.searchsorted(ends, left, side="right")
    micro_batch, chunk = np.divmod(np.searchsorted(chunk_ends, left, side="right"), chunks)
    lane = micro_batch * cp_size + np.minimum(chunk, chunks - 1 - chunk)
    return _merged(lane, segment, left - starts[segment], right - starts[segment])


def _adaptive(
    micro_batches: MicroBatches, cp_size: int, workload: Workload
) -> tuple[Pieces, NDArray[np.float64], Integers]:
    """Pieces, and of each micro-batch the group's seconds and the tokens gathered."""
    candidates = [make(micro_batches, cp_size) for make in (_per_document, _per_sequence)]
    prices = [_price(pieces, micro_batches, cp_size, workload) for pieces in candidates]
    (documents_slowest, documents_gathered), (sequence_slowest, sequence_gathered) = prices
    by_sequence = sequence_slowest < documents_slowest
    pieces = _chosen(candidates[0], candidates[1], by_sequence, cp_size)
    return (
        pieces,
        np.where(by_sequence, sequence_slowest, documents_slowest),
        np.where(by_sequence, sequence_gathered, documents_gathered),
    )


def _price(
    pieces: Pieces, micro_batches: MicroBatches, cp_size: int, workload: Workload
) -> tuple[NDArray[np.float64], Integers]:
    """Of each micro-batch the group's seconds, and the tokens gathered."""
    where = locality(pieces, len(micro_batches.sizes), len(micro_batches.counts), cp_size)
    return group_seconds(pieces, where, workload), where.gathered_tokens


def _hybrid(
    micro_batches: MicroBatches,
    cp_size: int,
    workload: Workload,
    adaptive: Pieces,
    slowest: NDArray[np.float64],
    gathered: Integers,
) -> Pieces:
    first = micro_batches.first
    choices = [[*hybrid_choices(sizes, cp_size, workload)] for sizes in np.split(micro_batches.sizes, first[1:])]
    segments = np.repeat(micro_batches.counts, [len(plans) for plans in choices])
    candidates = iter(priced([*chain.from_iterable(choices)], segments.tolist(), workload))
    lanes, tables = [np.empty(0, np.int64)], [np.empty((0, 3), np.int64)]
    better = np.zeros(len(choices), np.bool_)
    for index, plans in enumerate(choices):
        known = Candidate(float(slowest[index]), int(gathered[index]), ())
        pieces = hybrid_choice(known, [*islice(candidates, len(plans))]).pieces
        if pieces:
            better[index] = True
            lanes.append(owners(pieces) + index * cp_size)
            tables.append(np.concatenate(pieces) + np.array([first[index], 0, 0]))
    lane, table = np.concatenate(lanes), np.concatenate(tables)
    order = np.lexsort((table[:, 1], table[:, 0]))
    return _chosen(adaptive, Pieces(lane[order], *table[order].T), better, cp_size)


def _chosen(pieces: Pieces, others: Pieces, of_others: NDArray[np.bool_], cp_size: int) -> Pieces:
    """The pieces of ``others`` for the micro-batches that ``of_others`` marks, or else of ``pieces``."""
    stay = ~of_others[pieces.lane // cp_size]
    come = of_others[others.lane // cp_size]
    columns = [np.concatenate([mine[stay], its[come]]) for mine, its in zip(pieces, others, strict=True)]
    order = np.argsort(columns[1], kind="stable")  # by segment; those of one segment are in order already
    return Pieces(*(column[order] for column in columns))


def _merged(lane: Integers, segment: Integers, start: Integers, stop: Integers) -> Pieces:
    """Pieces without empty ones, and those that continue each other on one rank made one."""
    keep = stop > start
    lane, segment, start, stop = (column[keep] for column in (lane, segment, start, stop))
    continues = (lane[1:] == lane[:-1]) & (segment[1:] == segment[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    last = np.append(first[1:], len(lane)) - 1
    return Pieces(lane[first], segment[first], start[first], stop[last])
