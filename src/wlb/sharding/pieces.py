"""The pieces of many shard plans in one table, and what each rank then attends and exchanges (``Shards``).

With all plans in one table, a question about thousands of plans takes only a few NumPy operations.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.sharding.plan import Table, exchange_parts, keeps_received
from wlb.workload import Costs
from wlb.workload.base import Phase, Seconds
from wlb.workload.flops import attended_pairs

Integers = NDArray[np.int64]


class MicroBatches(NamedTuple):
    """Segments of many non-empty micro-batches, one after another."""

    sizes: Integers  # tokens of every segment
    counts: Integers  # segments of every micro-batch

    @property
    def first(self) -> Integers:
        """The first segment of every micro-batch."""
        return np.cumsum(self.counts) - self.counts

    @property
    def each(self) -> list[Integers]:
        """The segments of every micro-batch."""
        return np.split(self.sizes, self.first[1:])


class Pieces(NamedTuple):
    """Queries ``start`` to ``stop`` of a segment, ascending by segment and start.

    ``lane`` is plan x cp_size + rank; ``segment`` counts over all plans.
    """

    lane: Integers
    segment: Integers
    start: Integers
    stop: Integers


class Shards(NamedTuple):
    """What each rank of each micro-batch holds, exchanges and attends; arrays have shape (..., micro_batches, cp).

    ``locality`` makes them from pieces, without seconds of attention.
    """

    tokens: Integers
    own_share: Seconds  # share of the rank's attention whose keys it holds; 1 without attention
    received: Integers  # tokens whose keys the rank receives
    sent: Integers  # tokens whose keys it sends, counted once per receiver
    waits_for: Integers  # most tokens moved by it or by a rank that shares a segment with it; 0 if it moves none
    merged_tokens: Integers  # tokens of the rank that attend received keys
    kept: NDArray[np.bool_]  # whether ranks keep what they receive until the backward, shape (..., micro_batches)
    parts: Integers  # number of parts in which keys and values arrive, shape (..., micro_batches)
    alone: NDArray[np.bool_]  # whether it has only one segment, shape (..., micro_batches)
    attention_forward: Seconds
    attention_backward: Seconds

    def attending(self, pieces: Pieces, costs: Costs) -> Self:
        """The same with the seconds of attention over ``pieces``; shape (micro_batches, cp)."""
        forward, backward = _attention_seconds(pieces, self.tokens.shape, costs)
        return self._replace(attention_forward=forward, attention_backward=backward)

    def with_slices(self, pieces: Pieces, sizes: Integers, earlier: Integers, costs: Costs) -> Self:
        """The same with one more slice in each micro-batch: ``pieces`` of ``sizes`` tokens, after ``earlier`` tokens.

        All ranks receive the keys of the whole slice; they already have the keys of earlier slices.
        """
        shape, before_piece = self.tokens.shape, earlier[pieces.segment]
        deeper = pieces._replace(start=pieces.start + before_piece, stop=pieces.stop + before_piece)
        held = np.bincount(pieces.lane, pieces.stop - pieces.start, self.tokens.size).astype(np.int64).reshape(shape)
        forward, backward = _attention_seconds(deeper, shape, costs)
        tokens, cp = self.tokens + held, shape[1]
        total, before = sizes[:, None], earlier[:, None]
        own = np.clip((before + held / 2) / (before + total / 2), 0, 1)  # held share of the attended keys
        both = self.attention_forward + forward
        share = np.divide(
            self.own_share * self.attention_forward + own * forward, both, out=np.ones(shape), where=both > 0
        )
        received, sent = self.received + (total - held), self.sent + (cp - 1) * held
        moved = np.maximum(received, sent)
        return self._replace(
            tokens=tokens,
            attention_forward=both,
            attention_backward=self.attention_backward + backward,
            own_share=share,
            received=received,
            sent=sent,
            waits_for=np.broadcast_to(moved.max(axis=1, keepdims=True), shape),
            merged_tokens=self.merged_tokens + held,
            kept=np.ones_like(self.kept),
            parts=exchange_parts(moved.max(axis=1), tokens.sum(axis=1), cp),
            alone=np.zeros_like(self.alone),
        )

    def map(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Self:
        """The same with every column changed."""
        return type(self)(*map(change, self))

    def reshaped(self, *shape: int) -> Self:
        """The same with the first axis, micro-batches, reshaped to ``shape``."""
        return self.map(lambda column: column.reshape(*shape, *column.shape[1:]))


def _attention_seconds(pieces: Pieces, shape: tuple[int, ...], costs: Costs) -> list[Seconds]:
    """Forward and backward of the attention of every rank over its ``pieces``, each of ``shape`` (plans, cp)."""
    lanes = math.prod(shape)
    longest = np.zeros(lanes, np.int64)
    np.maximum.at(longest, pieces.lane, pieces.stop)  # the last key that any piece of a lane attends
    phases: tuple[Phase, Phase] = "forward", "backward"
    pairs = [np.bincount(pieces.lane, costs.piece_seconds(pieces.start, pieces.stop, phase), lanes) for phase in phases]
    drains = [costs.drain_seconds(longest, phase) for phase in phases]
    return [(pair.astype(np.float64) + drain).reshape(shape) for pair, drain in zip(pairs, drains, strict=True)]


def merged(lane: Integers, segment: Integers, start: Integers, stop: Integers) -> Pieces:
    """Pieces from columns in order of segment and start; drops empty ones and joins adjacent ones of a lane."""
    keep = stop > start
    lane, segment, start, stop = (column[keep] for column in (lane, segment, start, stop))
    continues = (lane[1:] == lane[:-1]) & (segment[1:] == segment[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    last = np.append(first[1:], len(lane)) - 1
    return Pieces(lane[first], segment[first], start[first], stop[last])


def in_order(pieces: Pieces) -> Pieces:
    """Sort ``pieces`` by segment and start."""
    order = np.lexsort((pieces.start, pieces.segment))
    return Pieces(*(column[order] for column in pieces))


def rank_tables(pieces: Pieces, cp_size: int) -> tuple[Table, ...]:
    """The pieces of one plan by rank, as ``ShardPlan`` holds them."""
    order = np.argsort(pieces.lane, kind="stable")
    table = np.stack([pieces.segment, pieces.start, pieces.stop], axis=1)[order]
    table.setflags(write=False)  # plans are cached and shared
    bounds = np.searchsorted(pieces.lane[order], np.arange(cp_size + 1)).tolist()
    return tuple([table[start:stop] for start, stop in pairwise(bounds)])


def locality(pieces: Pieces, segments: int, plans: int, cp_size: int) -> Shards:
    """Who attends whose keys, in ``plans`` plans with ``segments`` segments together.

    A rank attends every key of a segment up to the end of its last piece, and receives the keys that it does not hold.
    A piece goes to every other rank that holds a later one. If a rank holds t tokens of a segment, it attends
    t (t + 1) / 2 pairs without receiving anything, wherever the tokens lie.

    Two ranks share a segment of 6 tokens: rank 0 has both ends, rank 1 the middle. Rank 1 also has a segment of 3:

    >>> pieces = Pieces(*np.array([[0, 0, 0, 2], [1, 0, 2, 4], [0, 0, 4, 6], [1, 1, 0, 3]]).T)
    >>> found = locality(pieces, segments=2, plans=1, cp_size=2)
    >>> found.tokens.tolist()
    [[4, 5]]

    Rank 0 attends keys 0 to 6 and holds 4 of them, so it receives the 2 in the middle. Rank 1 attends keys 0 to 4 and
    holds 2, so it receives the 2 at the head. Nobody receives the tail and the segment of 3, so 4 tokens are sent:

    >>> found.received.tolist(), found.sent.tolist(), found.waits_for.tolist()
    ([[2, 2]], [[2, 2]], [[2, 2]])
    >>> found.kept.tolist(), found.parts.tolist()
    ([True], [1])

    The tail of rank 0 and the middle of rank 1 attend received keys:

    >>> found.merged_tokens.tolist()
    [[2, 2]]

    Rank 0 attends 3 + 11 pairs, of which 4 x 5 / 2 = 10 lie among its own tokens; rank 1 attends 7 + 6, of which 3 + 6:

    >>> (found.own_share * [14, 13]).round().tolist()
    [[10.0, 9.0]]
    """
    lane, segment, start, stop = pieces
    size = stop - start

    # The last piece of every rank in every segment: pieces are in order, so the last one overwrites the others.
    holding = segment * cp_size + lane % cp_size
    last_piece = np.full(segments * cp_size, -1)
    last_piece[holding] = np.arange(len(lane))
    last = last_piece[last_piece >= 0]
    held = np.bincount(holding, size, segments * cp_size)[holding[last]]
    received = stop[last] - held

    # A piece goes to all other ranks whose last piece of the segment comes later.
    is_last = np.zeros(len(lane), np.bool_)
    is_last[last] = True
    ranks_until = np.cumsum(np.bincount(segment[last], minlength=segments))  # over this segment and all before it
    receivers = ranks_until[segment] - np.cumsum(is_last) - ~is_last

    def of_ranks(values: ArrayLike, which: Integers | slice = slice(None)) -> Integers:
        sums = np.bincount(lane[which], values, plans * cp_size)
        return sums.astype(np.int64).reshape(plans, cp_size)

    tokens, received_tokens, sent_tokens = of_ranks(size), of_ranks(received, last), of_ranks(receivers * size)
    own_pairs, pairs = of_ranks(attended_pairs(held), last), of_ranks(attended_pairs(stop) - attended_pairs(start))
    begins = np.diff(segment, prepend=-1) > 0  # whether the piece is the first of its segment
    most_received = received_tokens.max(axis=1)
    busiest = np.maximum(most_received, sent_tokens.max(axis=1))
    none = np.zeros((plans, cp_size))
    return Shards(
        tokens=tokens,
        own_share=np.divide(own_pairs, pairs, out=np.ones(pairs.shape), where=pairs > 0),
        received=received_tokens,
        sent=sent_tokens,
        waits_for=_waits_for(pieces, np.maximum(received_tokens, sent_tokens), segments),
        merged_tokens=of_ranks(np.where(start > _held_before(pieces, holding), size, 0)),
        kept=keeps_received(most_received, tokens.sum(axis=1), cp_size),
        parts=exchange_parts(busiest, tokens.sum(axis=1), cp_size),
        alone=np.bincount(lane[begins] // cp_size, minlength=plans) == 1,
        attention_forward=none,
        attention_backward=none,
    )


def _waits_for(pieces: Pieces, moved: Integers, segments: int) -> Integers:
    """Most tokens moved by a lane or by one that shares a segment with it; shape (plans, cp_size)."""
    lane, segment, _, _ = pieces
    of_segment = np.zeros(segments, np.int64)
    np.maximum.at(of_segment, segment, moved.ravel()[lane])
    most = np.zeros(moved.size, np.int64)
    np.maximum.at(most, lane, of_segment[segment])
    return np.where(moved > 0, most.reshape(moved.shape), 0)


def _held_before(pieces: Pieces, holding: Integers) -> Integers:
    """Tokens of the same segment that a lane holds before each piece; ``holding`` numbers (segment, lane)."""
    order = np.argsort(holding, kind="stable")  # pieces of a segment are already in order
    size = (pieces.stop - pieces.start)[order]
    before = np.cumsum(size) - size
    first = np.flatnonzero(np.diff(holding[order], prepend=-1))
    held = np.empty(len(before), np.int64)
    held[order] = before - np.repeat(before[first], np.diff(np.append(first, len(order))))
    return held
