"""A step planned as a whole: every rank runs its own list of micro-batches, and all lists take equally long.

Ranks of a pipeline stage that keep their weights through a step meet only where they share a document, and at the end.
So not every micro-batch has to be level, but the step. A document lies on as few ranks as hold it, or on as many as it
needs to be done when the others are. What is shared comes first, and short documents make the ranks even:

1. The largest groups are placed first, each on ranks of as few nodes as hold it: where its members would lose least to
   each other, of all places where it ends in time.
2. Where a member is free before the others it runs short documents until then.
3. The other short documents go, longest first, each to the rank that is free soonest, into one of its micro-batches.

Groups as large as documents need may leave ranks over that nothing else fills, such as 6 of 32 beside 26. So the step
is planned a second time, with groups that fill nodes or divide one, and the plan that is done sooner is taken. Where
ranks still end unevenly, as with few documents, larger groups are tried: such that one, two, three ... of a kind take
as long as the mean rank, or that divide all ranks; and the longest documents of one rank are shared by two.

Every rank runs its micro-batches in the order in which the plan lists them. So of all that are not done, the first can
always run, and no ranks wait for each other in a circle.

Ranks may differ in speed. A slow rank takes longer for its own micro-batches, and a shared one takes as long as its
slowest member. So groups are of ranks alike in speed where there are enough on as few nodes, and slow ranks run more of
the short documents. Speeds are whole per cent and times whole ticks, so that all machines plan alike.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from wlb.settings import MOST_RANKS
from wlb.workload.base import DocumentPrices

Integers = NDArray[np.int64]

_TICKS = 1e9  # a second: whole numbers add up to the same on every machine
_SHARED_TOO = 4  # documents that one rank could hold
_EVENLY = 1.01
_PACE = 3  # a wait for a slower rank costs so many waits to begin, in which short documents can run
_ROUNDS = 4  # of giving more ranks to documents that would be done too late


@runtime_checkable
class StagePrices(DocumentPrices, Protocol):
    """The ranks of a pipeline stage, and seconds that documents take on them, forward and backward.

    Arrays in, arrays of the same shape out.
    """

    @property
    def ranks(self) -> int:
        """How many share the weights of the stage."""

    @property
    def per_node(self) -> int:
        """How many of them a node has; a divisor of ``ranks``."""

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """Of each rank, 1 for one that takes as long as these prices say, 0.9 for one that is 10% slow; None: all 1."""

    def alone(self, lengths: Integers) -> NDArray[np.float64]:
        """What each document adds to a micro-batch of one rank that holds it whole."""

    def beginning(self, lengths: Integers) -> NDArray[np.float64]:
        """What micro-batches of one rank take beside that, each with a longest document of ``lengths``."""

    def shared(self, lengths: Integers, ranks: int) -> NDArray[np.float64]:
        """What micro-batches of one document each take that is shared by so many ranks of as few nodes as hold them."""


class RankGroup(NamedTuple):
    """A micro-batch: ``documents`` of a step, by number, and the ``ranks`` that run it, several where one is shared.

    A rank of speed 1 is predicted to take ``seconds``.
    """

    ranks: tuple[int, ...]
    documents: tuple[int, ...]
    seconds: float


def level_groups(lengths: Sequence[int], capacity: int, prices: StagePrices) -> list[RankGroup]:
    """The micro-batches of a step that trains documents of ``lengths`` tokens, in an order that every rank keeps to.

    Every document is in one of them, and no rank holds more than ``capacity`` tokens of any, if a document is shared
    evenly. A document must not be over the capacity of all ranks together, nor of ``MOST_RANKS``.
    """
    tokens = np.asarray(lengths, np.int64)
    needed, ticks = _sized(tokens, capacity, prices)
    best = _Step(tokens, needed, ticks, capacity, prices)

    def attempt(sizes: Integers) -> _Step:
        if (sizes == needed).all():
            return best
        changed = _group_ticks(tokens, sizes, ticks, sizes != needed, prices)
        return min(best, _Step(tokens, sizes, changed, capacity, prices), key=lambda plan: plan.end)

    best = attempt(_dividing(needed, prices.per_node, prices))
    if not best.is_even:
        in_turn = _in_turn(needed, ticks, prices)
        for sizes in (in_turn, _dividing(in_turn, prices.per_node, prices), _dividing(needed, prices.ranks, prices)):
            best = attempt(sizes)
    for longest in np.lexsort((-tokens, best.sizes))[:_SHARED_TOO]:
        if best.is_even or best.sizes[longest] > 1 or prices.ranks == 1:
            break
        sizes = best.sizes.copy()
        sizes[longest] = 2
        best = attempt(sizes)
    return best.groups


class _Step:
    """``groups`` so far, and when each rank is free after its part of them, in ticks."""

    def __init__(self, lengths: Integers, sizes: Integers, ticks: Integers, capacity: int, prices: StagePrices) -> None:
        self.groups: list[RankGroup] = []
        self.sizes = sizes
        self._per_node, self._capacity, self._lengths = prices.per_node, capacity, lengths.tolist()
        self._free = np.zeros(prices.ranks, np.int64)
        self._speeds = _percent(prices)
        self._differ = bool((self._speeds != self._speeds[0]).any())
        self._nodes = np.arange(0, prices.ranks, prices.per_node)[:, None]  # the first rank of each
        self._even = 100 * int((sizes * ticks).sum()) // int(self._speeds.sum())
        full = np.array([capacity])
        self._full = int(_ticks(prices.alone(full) + prices.beginning(full))[0])
        shared, alone = np.flatnonzero(sizes > 1), np.flatnonzero(sizes == 1)
        alone = alone[np.lexsort((alone, lengths[alone]))]
        adds = _ticks(prices.alone(lengths[alone]))
        # Documents that are still to go to one rank, shortest first, and what each adds, and adds with a micro-batch.
        self._short: list[int] = alone.tolist()
        self._adds: list[int] = adds.tolist()
        self._begins: list[int] = (adds + _ticks(prices.beginning(lengths[alone]))).tolist()
        for document in shared[np.lexsort((-ticks[shared], -sizes[shared]))].tolist():
            self._share(document, int(sizes[document]), int(ticks[document]))
        self._deal_out()

    @property
    def end(self) -> int:
        """When the last rank is done."""
        return int(self._free.max())

    @property
    def is_even(self) -> bool:
        """Whether all ranks are done at nearly the same time."""
        return self.end <= _EVENLY * self._even

    def _share(self, document: int, size: int, ticks: int) -> None:
        ranks = self._place(size, ticks)
        begins = int(self._free[ranks].max())
        for rank in ranks.tolist():
            self._fill(rank, (begins - int(self._free[rank])) * int(self._speeds[rank]) // 100)
        self._free[ranks] = max(begins, int(self._free[ranks].max())) + int(_taken(ticks, self._speeds[ranks].min()))
        self.groups.append(RankGroup(tuple(ranks.tolist()), (document,), ticks / _TICKS))

    def _place(self, size: int, ticks: int) -> Integers:
        """The ranks that lose least to each other, where they are done in time; else those that are done first.

        In time, if possible, for a micro-batch of each rank's own, beside whose backward gradients are reduced.
        """
        takes = _taken(ticks, self._speeds)
        sets = self._sets(size, self._free + takes)
        free, alone = self._free[sets], takes[sets]
        begins, slowest = free.max(axis=0), alone.max(axis=0)
        ends, lost = begins + slowest, size * (begins + _PACE * slowest) - (free + _PACE * alone).sum(axis=0)
        late = (ends > self._even - self._full).astype(int) + (ends > self._even)
        least_late = np.flatnonzero(late == late.min())
        best = least_late[(lost if late.min() < 2 else ends)[least_late].argmin()]
        return np.sort(sets[:, best])

    def _sets(self, size: int, busy: Integers) -> Integers:
        """Sets of ranks that may share a document, on as few nodes as hold them; shape (``size``, sets).

        Neighbours by when they are free and, where speeds differ, the fastest and the slowest of nodes.
        """
        busy, nodes = busy.reshape(-1, self._per_node), -(-size // self._per_node)
        of_each = -(-size // nodes)
        order = np.argsort(busy, axis=1, kind="stable") + self._nodes
        if nodes > 1:
            order = order[np.argsort(busy.max(axis=1), kind="stable")]  # by when the whole of each is free
        tables = [order]
        if self._differ and of_each < self._per_node:
            by_speed = np.take_along_axis(order, np.argsort(-self._speeds[order], axis=1, kind="stable"), axis=1)
            tables += [by_speed[:, :of_each], by_speed[:, -of_each:]]
        places = _starts(size, *(table.shape for table in tables)) + np.arange(size)[:, None]
        ranks: Integers = np.concatenate([table.ravel() for table in tables])
        return ranks.take(places)

    def _fill(self, rank: int, gap: int) -> None:
        """Give ``rank`` documents that take no longer than ``gap``, dearest first."""
        own = _OwnMicroBatches(self._capacity)
        while self._short:
            place = bisect_right(self._adds, gap) - 1
            if place < 0:
                break
            if not own.has_room(self._lengths[self._short[place]]):
                place = bisect_right(self._begins, gap) - 1
                if place < 0:
                    break
            gap -= self._give(place, own)
        self._run_alone(rank, own)

    def _deal_out(self) -> None:
        """The documents that are left, longest first, each to the rank that is free first."""
        speeds = self._speeds.tolist()
        heap = [(free, rank) for rank, free in enumerate(self._free.tolist())]
        heapify(heap)
        own = [_OwnMicroBatches(self._capacity) for _ in heap]
        while self._short:
            free, rank = heap[0]
            heapreplace(heap, (free + _taken(self._give(-1, own[rank]), speeds[rank]), rank))
        for rank, micro_batches in enumerate(own):
            self._run_alone(rank, micro_batches)

    def _give(self, place: int, own: _OwnMicroBatches) -> int:
        """Put the document at ``place`` into ``own``; the ticks that it adds there."""
        document, adds, begins = self._short.pop(place), self._adds.pop(place), self._begins.pop(place)
        return own.put(document, self._lengths[document], adds, begins)

    def _run_alone(self, rank: int, own: _OwnMicroBatches) -> None:
        """Those of ``own``, the longest last: while it goes backward, gradients are reduced."""
        for documents, ticks in sorted(own.filled, key=lambda micro_batch: micro_batch[1]):
            self.groups.append(RankGroup((rank,), tuple(documents), ticks / _TICKS))
            self._free[rank] += _taken(ticks, self._speeds[rank])


class _OwnMicroBatches:
    """Micro-batches of one rank, by best fit; ``filled`` are the documents of each, longest first, and its ticks."""

    def __init__(self, capacity: int) -> None:
        self.filled: list[tuple[list[int], int]] = []
        self._capacity = capacity
        self._rooms: list[tuple[int, int]] = []  # of micro-batches, ascending, and which they are of

    def has_room(self, length: int) -> bool:
        return bool(self._rooms) and self._rooms[-1][0] >= length

    def put(self, document: int, length: int, adds: int, begins: int) -> int:
        """Put ``document`` where it fills best; the ticks that this takes: ``adds``, or with a new one ``begins``."""
        if self.has_room(length):
            room, index = self._rooms.pop(bisect_left(self._rooms, (length, 0)))
        else:
            room, index, adds = self._capacity, len(self.filled), begins
            self.filled.append(([], 0))
        documents, ticks = self.filled[index]
        documents.append(document)
        self.filled[index] = documents, ticks + adds
        insort(self._rooms, (room - length, index))
        return adds


@lru_cache
def _starts(size: int, *shapes: tuple[int, int]) -> Integers:
    """Where ``size`` in a row begin in tables of ``shapes``: in one line, or where that is too short, with a line."""
    starts, before = [], 0
    for lines, width in shapes:
        places = np.arange(lines * width - size + 1)
        starts.append(before + places[places % width <= max(0, width - size)])
        before += lines * width
    return np.concatenate(starts)


def _sized(lengths: Integers, capacity: int, prices: StagePrices) -> tuple[Integers, Integers]:
    """The ranks of every document, and the ticks that each of them needs for it.

    As few as hold it, but more where a document would need longer than the mean rank has work.
    """
    most = min(prices.ranks, MOST_RANKS)
    sizes = np.maximum(1, -(-lengths // capacity))
    fixed = float(prices.beginning(np.array([capacity]))[0]) / capacity  # a token's part of what micro-batches cost
    ticks = _group_ticks(lengths, sizes, _ticks(prices.alone(lengths) + fixed * lengths), sizes > 1, prices)
    for _ in range(_ROUNDS):
        even = _even(sizes, ticks, prices)
        late = (ticks > even) & (sizes < most)
        if not late.any():
            break
        sizes[late] = np.minimum(most, np.ceil(sizes[late] * ticks[late] / even)).astype(np.int64)
        ticks = _group_ticks(lengths, sizes, ticks, late, prices)
    return sizes, ticks


def _dividing(sizes: Integers, unit: int, prices: StagePrices) -> Integers:
    """``sizes`` of groups, raised to whole units of so many ranks or, inside a unit, to an even part of it."""
    whole = np.minimum(prices.ranks, -(-sizes // unit) * unit)
    raised = np.where(sizes > unit, whole, unit // np.maximum(1, unit // sizes))
    return np.minimum(raised, np.maximum(sizes, MOST_RANKS))


def _in_turn(sizes: Integers, ticks: Integers, prices: StagePrices) -> Integers:
    """``sizes`` of groups, raised so that one, two, three ... of a kind take as long as the mean rank."""
    even = _even(sizes, ticks, prices)
    turns = np.ceil(even / np.maximum(1, ticks))
    larger = np.ceil(sizes * ticks * turns / even).astype(np.int64)
    return np.where(sizes > 1, np.clip(larger, sizes, min(prices.ranks, MOST_RANKS)), sizes)


def _group_ticks(
    lengths: Integers, sizes: Integers, ticks: Integers, changed: NDArray[np.bool_], prices: StagePrices
) -> Integers:
    """``ticks``, in which those of documents ``changed`` are of groups of ``sizes`` ranks."""
    ticks = ticks.copy()
    for size in np.unique(sizes[changed]).tolist():
        of_size = changed & (sizes == size)
        ticks[of_size] = _ticks(prices.shared(lengths[of_size], size))
    return ticks


def _ticks(seconds: float | NDArray[np.float64]) -> Integers:
    return np.rint(np.asarray(seconds) * _TICKS).astype(np.int64)


def _even(sizes: Integers, ticks: Integers, prices: StagePrices) -> float:
    """When all ranks would be done, were they done together."""
    return 100 * int((sizes * ticks).sum()) / int(_percent(prices).sum())


def _percent(prices: StagePrices) -> Integers:
    """The speeds of ranks, in whole per cent."""
    speeds = np.ones(prices.ranks) if prices.speeds is None else np.array(prices.speeds)
    return np.maximum(1, np.rint(100 * speeds).astype(np.int64))


def _taken(ticks: Any, percent: Any) -> Any:
    """What ranks of these speeds take for what others do in ``ticks``."""
    return ticks * 100 // percent
