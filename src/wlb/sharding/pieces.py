"""The pieces of many shard plans in one table, and which ranks attend whose keys.

What has to be found out of thousands of plans, or of the few that a strategy chooses from, then is a few NumPy
operations however many they are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.plan import ShardPlan, Table, keeps_received, owners

_FAR = np.int64(2**40)  # beyond every start of a piece
Integers = NDArray[np.int64]


class MicroBatches(NamedTuple):
    """Segments of many micro-batches, one after another; none of them is empty."""

    sizes: Integers  # tokens of every segment
    counts: Integers  # segments of every micro-batch

    @property
    def first(self) -> Integers:
        """The first segment of every micro-batch."""
        return np.cumsum(self.counts) - self.counts


class Pieces(NamedTuple):
    """Queries ``start`` to ``stop`` of a segment, ascending by segment and start.

    ``lane`` is plan x cp_size + rank; ``segment`` counts over all plans.
    """

    lane: Integers
    segment: Integers
    start: Integers
    stop: Integers


class Locality(NamedTuple):
    """What ranks attend among their own tokens, and what travels; arrays of lanes are (plans, cp_size)."""

    tokens: Integers  # of every lane
    own_share: NDArray[np.float64]  # of the query-key pairs of every lane: those whose keys it holds; 1 where none are
    exchanged_tokens: Integers  # that the busiest rank of every plan sends or receives
    gathered_tokens: Integers  # of every plan, whose keys and values another rank attends
    kept: NDArray[np.bool_]  # whether the ranks of every plan keep what they receive until the backward


def merged(lane: Integers, segment: Integers, start: Integers, stop: Integers) -> Pieces:
    """Pieces from columns in order of segment and start: drops empty ones, joins those that continue each other."""
    keep = stop > start
    lane, segment, start, stop = (column[keep] for column in (lane, segment, start, stop))
    continues = (lane[1:] == lane[:-1]) & (segment[1:] == segment[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    last = np.append(first[1:], len(lane)) - 1
    return Pieces(lane[first], segment[first], start[first], stop[last])


def pieces_of(plan: ShardPlan) -> Pieces:
    """The pieces of one plan."""
    segment, start, stop = np.concatenate(plan.pieces).T
    order = np.lexsort((start, segment))
    return Pieces(owners(plan.pieces)[order], segment[order], start[order], stop[order])


def rank_tables(pieces: Pieces, cp_size: int) -> tuple[Table, ...]:
    """The pieces of one plan by rank, as ``ShardPlan`` holds them."""
    order = np.argsort(pieces.lane, kind="stable")
    table = np.stack([pieces.segment, pieces.start, pieces.stop], axis=1)[order]
    table.setflags(write=False)  # plans are shared by whoever asks for them again
    bounds = np.searchsorted(pieces.lane[order], np.arange(cp_size + 1)).tolist()
    return tuple([table[start:stop] for start, stop in pairwise(bounds)])


def locality(pieces: Pieces, segments: int, plans: int, cp_size: int) -> Locality:
    """Who attends whose keys, in ``plans`` plans with ``segments`` segments together.

    A rank that holds t tokens of a segment attends t (t + 1) / 2 pairs among them, wherever they lie. It receives all
    other tokens before its last piece; a piece goes to every rank that holds a later one.
    """
    lane, segment, start, stop = pieces
    lanes, size = plans * cp_size, stop - start
    holding = segment * cp_size + lane % cp_size  # what one rank holds of one segment
    held = np.bincount(holding, size, segments * cp_size).astype(np.int64)
    last = np.full(segments * cp_size, -1)
    last[holding] = np.arange(len(holding))  # pieces stand in order, so the last one is written last
    holders = np.flatnonzero(last >= 0)
    last_piece = last[holders]
    received = start[last_piece] - (held[holders] - size[last_piece])
    last_starts = np.full(segments * cp_size, -1)
    last_starts[holders] = start[last_piece]
    keys = np.sort(last_starts.reshape(-1, cp_size), axis=1) + (np.arange(segments) * _FAR)[:, None]
    before = np.searchsorted(keys.ravel(), segment * _FAR + start, side="right")
    is_last = last[holding] == np.arange(len(holding))
    receivers = (segment + 1) * cp_size - before - ~is_last

    def of_lanes(lane: Integers, values: Integers) -> Integers:
        return np.bincount(lane, values, lanes).astype(np.int64).reshape(-1, cp_size)

    tokens = of_lanes(lane, size)
    own_pairs = of_lanes(lane[last_piece], _triangle(held[holders]))
    pairs = of_lanes(lane, _triangle(stop) - _triangle(start))
    most_received = of_lanes(lane[last_piece], received).max(axis=1)
    return Locality(
        tokens,
        np.divide(own_pairs, pairs, out=np.ones(pairs.shape), where=pairs > 0),
        np.maximum(most_received, of_lanes(lane, receivers * size).max(axis=1)),
        np.bincount(lane // cp_size, np.where(receivers > 0, size, 0), plans).astype(np.int64),
        keeps_received(most_received, tokens.sum(axis=1), cp_size),
    )


def _triangle(length: Integers) -> Integers:
    return length * (length + 1) // 2
