"""The pieces of many shard plans in one table, and which ranks attend whose keys.

What has to be found out of thousands of plans, or of the few that a strategy chooses from, then is a few NumPy
operations however many they are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.sharding.plan import Table, exchange_parts, keeps_received
from wlb.workload.flops import attended_pairs

Integers = NDArray[np.int64]


class MicroBatches(NamedTuple):
    """Segments of many micro-batches, one after another; none of them is empty."""

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


def last_keys(pieces: Pieces, lanes: int) -> Integers:
    """The key up to which each lane's longest piece attends, shape (lanes,); 0 for none."""
    longest = np.zeros(lanes, np.int64)
    np.maximum.at(longest, pieces.lane, pieces.stop)
    return longest


class Locality(NamedTuple):
    """What ranks attend among their own tokens, and what travels; arrays of lanes are (plans, cp_size)."""

    tokens: Integers  # of every lane
    own_share: NDArray[np.float64]  # of the query-key pairs of every lane: those whose keys it holds; 1 where none are
    received: Integers  # tokens whose keys every lane receives
    sent: Integers  # tokens whose keys it sends, counted once for each receiver
    waits_for: Integers  # the most that it, or a rank that it shares a segment with, moves; 0 if it shares none
    merged_tokens: Integers  # of every lane, that attend received keys
    gathered_tokens: Integers  # of every plan, whose keys and values another rank attends
    kept: NDArray[np.bool_]  # whether the ranks of every plan keep what they receive until the backward
    parts: Integers  # in which keys and values of every plan arrive
    alone: NDArray[np.bool_]  # whether every plan has one segment only


def merged(lane: Integers, segment: Integers, start: Integers, stop: Integers) -> Pieces:
    """Pieces from columns in order of segment and start: drops empty ones, joins those that continue each other."""
    keep = stop > start
    lane, segment, start, stop = (column[keep] for column in (lane, segment, start, stop))
    continues = (lane[1:] == lane[:-1]) & (segment[1:] == segment[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    last = np.append(first[1:], len(lane)) - 1
    return Pieces(lane[first], segment[first], start[first], stop[last])


def in_order(pieces: Pieces) -> Pieces:
    """``pieces`` by segment and start."""
    order = np.lexsort((pieces.start, pieces.segment))
    return Pieces(*(column[order] for column in pieces))


def rank_tables(pieces: Pieces, cp_size: int) -> tuple[Table, ...]:
    """The pieces of one plan by rank, as ``ShardPlan`` holds them."""
    order = np.argsort(pieces.lane, kind="stable")
    table = np.stack([pieces.segment, pieces.start, pieces.stop], axis=1)[order]
    table.setflags(write=False)  # plans are shared by whoever asks for them again
    bounds = np.searchsorted(pieces.lane[order], np.arange(cp_size + 1)).tolist()
    return tuple([table[start:stop] for start, stop in pairwise(bounds)])


def locality(pieces: Pieces, segments: int, plans: int, cp_size: int) -> Locality:
    """Who attends whose keys, in ``plans`` plans with ``segments`` segments together.

    A rank attends every key of a segment up to the end of its last piece of it, and receives those that it does not
    hold. A piece goes to every other rank that holds a later one. Of the t tokens that a rank holds of a segment, it
    attends t (t + 1) / 2 pairs without receiving anything, wherever they lie.

    Two ranks share a segment of 6 tokens, rank 0 has both ends and rank 1 the middle; rank 1 also has a segment of 3:

    >>> pieces = Pieces(*np.array([[0, 0, 0, 2], [1, 0, 2, 4], [0, 0, 4, 6], [1, 1, 0, 3]]).T)
    >>> found = locality(pieces, segments=2, plans=1, cp_size=2)
    >>> found.tokens.tolist()
    [[4, 5]]

    Rank 0 attends keys 0 to 6 and holds 4 of them, so it receives 2, the middle; rank 1 attends keys 0 to 4 and holds
    2, so it receives 2, the head. The tail and the segment of 3 go to nobody, so 4 tokens travel:

    >>> found.received.tolist(), found.sent.tolist(), found.waits_for.tolist()
    ([[2, 2]], [[2, 2]], [[2, 2]])
    >>> found.gathered_tokens.tolist(), found.kept.tolist(), found.parts.tolist()
    ([4], [True], [1])

    The tail of rank 0 and the middle of rank 1 attend what was received:

    >>> found.merged_tokens.tolist()
    [[2, 2]]

    Of its 3 + 11 pairs rank 0 attends 4 x 5 / 2 = 10 among its own tokens; rank 1 of its 7 + 6 pairs 3 + 6:

    >>> (found.own_share * [14, 13]).round().tolist()
    [[10.0, 9.0]]
    """
    lane, segment, start, stop = pieces
    size = stop - start

    # Every rank's last piece of every segment: pieces stand in order, so of several the last one is written last.
    holding = segment * cp_size + lane % cp_size
    last_piece = np.full(segments * cp_size, -1)
    last_piece[holding] = np.arange(len(lane))
    last = last_piece[last_piece >= 0]
    held = np.bincount(holding, size, segments * cp_size)[holding[last]]
    received = stop[last] - held

    # A piece goes to the ranks whose last piece of the segment is still to come, but for its own.
    is_last = np.zeros(len(lane), np.bool_)
    is_last[last] = True
    ranks_until = np.cumsum(np.bincount(segment[last], minlength=segments))  # of this segment and those before it
    receivers = ranks_until[segment] - np.cumsum(is_last) - ~is_last

    def of_ranks(values: ArrayLike, which: Integers | slice = slice(None)) -> Integers:
        sums = np.bincount(lane[which], values, plans * cp_size)
        return sums.astype(np.int64).reshape(plans, cp_size)

    tokens, received_tokens, sent_tokens = of_ranks(size), of_ranks(received, last), of_ranks(receivers * size)
    own_pairs, pairs = of_ranks(attended_pairs(held), last), of_ranks(attended_pairs(stop) - attended_pairs(start))
    begins = np.append(True, segment[1:] != segment[:-1])  # of its segment, in whose order pieces are
    most_received = received_tokens.max(axis=1)
    busiest = np.maximum(most_received, sent_tokens.max(axis=1))
    return Locality(
        tokens=tokens,
        own_share=np.divide(own_pairs, pairs, out=np.ones(pairs.shape), where=pairs > 0),
        received=received_tokens,
        sent=sent_tokens,
        waits_for=_waits_for(pieces, np.maximum(received_tokens, sent_tokens), segments),
        merged_tokens=of_ranks(np.where(start > _held_before(pieces, holding), size, 0)),
        gathered_tokens=of_ranks(np.where(receivers > 0, size, 0)).sum(axis=1),
        kept=keeps_received(most_received, tokens.sum(axis=1), cp_size),
        parts=exchange_parts(busiest, tokens.sum(axis=1), cp_size),
        alone=np.bincount(lane[begins] // cp_size, minlength=plans) == 1,
    )


def _waits_for(pieces: Pieces, moved: Integers, segments: int) -> Integers:
    """The most tokens that a lane, or one that shares a segment with it, moves; of shape (plans, cp_size)."""
    lane, segment, _, _ = pieces
    of_segment = np.zeros(segments, np.int64)
    np.maximum.at(of_segment, segment, moved.ravel()[lane])
    most = np.zeros(moved.size, np.int64)
    np.maximum.at(most, lane, of_segment[segment])
    return np.where(moved > 0, most.reshape(moved.shape), 0)


def _held_before(pieces: Pieces, holding: Integers) -> Integers:
    """Tokens of its segment that a piece's lane holds before the piece; ``holding`` is one number for each of both."""
    order = np.argsort(holding, kind="stable")  # pieces of one segment are in order already
    size = (pieces.stop - pieces.start)[order]
    before = np.cumsum(size) - size
    first = np.flatnonzero(np.append(True, np.diff(holding[order]) > 0))
    held = np.empty(len(before), np.int64)
    held[order] = before - np.repeat(before[first], np.diff(np.append(first, len(order))))
    return held
