"""Seconds and tokens of every context-parallel rank, for many micro-batches at once.

The pieces of all micro-batches stand in one table, so that pricing them is a few NumPy operations however many they
are. The numbers are those of ``wlb.sharding.shard_latency``, piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.sharding import make_shard_plan
from wlb.sharding.plan import owners
from wlb.simulate.costs import Direction, JobCosts

_FAR = np.int64(2**40)  # beyond every start of a piece


class Pieces(NamedTuple):
    """Rows of all micro-batches: queries ``start`` to ``stop`` of a segment, on lane micro-batch x cp + rank."""

    lane: NDArray[np.int64]
    segment: NDArray[np.int64]  # numbered over all micro-batches
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


class Shards(NamedTuple):
    """What each rank of each micro-batch computes and exchanges; arrays have shape (micro_batches, cp)."""

    tokens: NDArray[np.int64]
    attention_forward: NDArray[np.float64]  # seconds
    attention_backward: NDArray[np.float64]
    own_share: NDArray[np.float64]  # of the rank's attention, which needs no keys of other ranks
    exchanged: NDArray[np.int64]  # tokens that the busiest rank sends or receives, shape (micro_batches,)

    def reshaped(self, *shape: int) -> Shards:
        """The same with micro-batches arranged in ``shape``."""
        return Shards(
            self.tokens.reshape(*shape, -1),
            self.attention_forward.reshape(*shape, -1),
            self.attention_backward.reshape(*shape, -1),
            self.own_share.reshape(*shape, -1),
            self.exchanged.reshape(*shape),
        )


def price_shards(lengths: Sequence[Sequence[int]], costs: JobCosts) -> Shards:
    """Shard micro-batches with segments of ``lengths`` tokens as the job does, and price them."""
    pieces = _pieces(lengths, costs)
    micro_batches, cp = len(lengths), costs.job.cp
    lanes = micro_batches * cp
    size = pieces.stop - pieces.start

    def attention(direction: Direction) -> NDArray[np.float64]:
        seconds = costs.attention(pieces.start, pieces.stop, direction)
        return np.bincount(pieces.lane, seconds, lanes).astype(np.float64).reshape(-1, cp)

    own_share, exchanged = _locality(pieces, lanes, cp)
    return Shards(
        np.bincount(pieces.lane, size, lanes).astype(np.int64).reshape(-1, cp),
        attention("forward"),
        attention("backward"),
        own_share.reshape(-1, cp),
        exchanged,
    )


def _pieces(lengths: Sequence[Sequence[int]], costs: JobCosts) -> Pieces:
    job = costs.job
    sizes = np.fromiter((length for of_one in lengths for length in of_one), np.int64)
    counts = np.array([len(of_one) for of_one in lengths], np.int64)
    if job.cp == 1:
        lane = np.repeat(np.arange(len(lengths)), counts)
        return Pieces(lane, np.arange(len(sizes)), np.zeros_like(sizes), sizes)
    first = np.cumsum(counts) - counts
    workload = job.sharding_workload
    tables, lanes = [np.empty((0, 3), np.int64)], [np.empty(0, np.int64)]
    for index, of_one in enumerate(lengths):
        if not of_one:
            continue
        plan = make_shard_plan(of_one, job.cp, job.sharding.strategy, workload=workload)
        tables.append(np.concatenate(plan.pieces) + np.array([first[index], 0, 0]))
        lanes.append(owners(plan.pieces) + index * job.cp)
    table = np.concatenate(tables)
    return Pieces(np.concatenate(lanes), table[:, 0], table[:, 1], table[:, 2])


def _locality(pieces: Pieces, lanes: int, cp: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Of each lane, the share of its attention over its own keys; of each micro-batch, the busiest rank's traffic.

    A rank that holds t tokens of a segment attends t (t + 1) / 2 pairs among them, wherever they lie. It receives all
    other tokens before its last piece; a piece goes to every rank that holds a later one.
    """
    if cp == 1:
        return np.ones(lanes), np.zeros(lanes, np.int64)
    order = np.lexsort((pieces.start, pieces.segment))
    lane, segment, start, stop = (column[order] for column in pieces)
    size = stop - start
    # Holdings: what one rank holds of one segment.
    _, holding = np.unique(segment * lanes + lane, return_inverse=True)
    count = int(holding.max()) + 1 if len(holding) else 0
    held = np.bincount(holding, size, count).astype(np.int64)
    last = np.zeros(count, np.int64)
    last[holding] = np.arange(len(holding))  # pieces stand in order, so the last one is written last
    of_lane = lane[last]
    pairs = np.bincount(lane, _triangle(stop) - _triangle(start), lanes)
    own = np.bincount(of_lane, _triangle(held), lanes)
    received = np.bincount(of_lane, start[last] - (held - size[last]), lanes)
    # Of each piece, the ranks whose last piece of its segment starts later.
    keys = np.sort(segment[last] * _FAR + start[last])
    segment_ends = np.searchsorted(keys, (segment + 1) * _FAR)
    later = segment_ends - np.searchsorted(keys, segment * _FAR + start, side="right")
    is_last = last[holding] == np.arange(len(holding))
    sent = np.bincount(lane, (later - ~is_last) * size, lanes)
    busiest = np.maximum(received, sent).reshape(-1, cp).max(axis=1)
    return np.divide(own, pairs, out=np.ones(lanes), where=pairs > 0), busiest.astype(np.int64)


def _triangle(length: NDArray[np.int64]) -> NDArray[np.int64]:
    return length * (length + 1) // 2
