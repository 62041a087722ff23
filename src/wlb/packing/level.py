"""A step planned as a whole: every rank runs its own list of micro-batches, and all lists take equally long.

Ranks of a pipeline stage that keep their weights through a step meet only where they share a document, and at the end.
So not every micro-batch has to be level, but the step. A document lies on as few ranks as hold it, or on as many as it
needs to be done when the others are. What is shared comes first, and short documents make the ranks even:

1. The largest groups are placed first, each on ranks of as few nodes as hold it: where its members would wait for each
   other least, of all places where it ends in time.
2. Where a member is free before the others it runs short documents until then.
3. The other short documents go, longest first, each to the rank that is free soonest, and are packed into its
   micro-batches.

Every rank runs its micro-batches in the order in which the plan lists them. So of all that are not done, the first can
always run, and no ranks wait for each other in a circle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from wlb.packing.bins import best_fit
from wlb.workload.base import DocumentPrices

Integers = NDArray[np.int64]

_TICKS = 1e9  # a second: whole numbers add up to the same on every machine
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
    def micro_batch(self) -> float:
        """What a micro-batch of one rank takes beside its documents."""

    def alone(self, lengths: Integers) -> NDArray[np.float64]:
        """What each document adds to a micro-batch of one rank that holds it whole."""

    def shared(self, lengths: Integers, ranks: int) -> NDArray[np.float64]:
        """What micro-batches of one document each take that is shared by so many ranks of as few nodes as hold them."""


class RankGroup(NamedTuple):
    """A micro-batch: ``documents``, numbers of a step's, that ``ranks`` run together; several where one is shared.

    Each of them is predicted to take ``seconds``.
    """

    ranks: tuple[int, ...]
    documents: tuple[int, ...]
    seconds: float


def level_step(lengths: Sequence[int], capacity: int, prices: StagePrices) -> list[RankGroup]:
    """The micro-batches of a step that trains documents of ``lengths`` tokens, in an order that every rank keeps to.

    Every document is in one of them, and no rank holds more than ``capacity`` tokens of any, if a document is shared
    evenly. A document must not be over the capacity of all ranks together.
    """
    return _Step(np.asarray(lengths, np.int64), capacity, prices).groups


class _Step:
    """``groups`` so far, and when each rank is free after its part of them, in ticks."""

    def __init__(self, lengths: Integers, capacity: int, prices: StagePrices) -> None:
        self.groups: list[RankGroup] = []
        self._per_node, self._capacity, self._lengths = prices.per_node, capacity, lengths.tolist()
        self._micro_batch = int(_ticks(prices.micro_batch))
        self._free = np.zeros(prices.ranks, np.int64)
        sizes, ticks = _sized(lengths, capacity, prices)
        self._ticks: list[int] = ticks.tolist()
        self._even = int((sizes * ticks).sum()) // prices.ranks
        shared, alone = np.flatnonzero(sizes > 1), np.flatnonzero(sizes == 1)
        self._short: list[int] = alone[np.argsort(ticks[alone], kind="stable")].tolist()
        self._short_ticks = [self._ticks[document] for document in self._short]
        for document in shared[np.lexsort((-ticks[shared], -sizes[shared]))].tolist():
            self._share(document, int(sizes[document]))
        self._deal_out()

    def _share(self, document: int, size: int) -> None:
        ranks = self._place(size, self._ticks[document])
        begins = int(self._free[ranks].max())
        for rank in ranks.tolist():
            self._fill(rank, begins - int(self._free[rank]))
        self._append(ranks.tolist(), (document,), self._ticks[document])
        self._free[ranks] = max(begins, int(self._free[ranks].max())) + self._ticks[document]

    def _place(self, size: int, ticks: int) -> Integers:
        """The ranks that wait least for each other, where they are done in time; else those that are done first."""
        choices = _choices(self._free, size, self._per_node)
        in_time = np.flatnonzero(choices.begins + ticks <= self._even)
        if len(in_time):
            return choices.ranks(int(in_time[choices.waiting[in_time].argmin()]))
        return choices.ranks(int(choices.begins.argmin()))

    def _fill(self, rank: int, gap: int) -> None:
        """Micro-batches of short documents for ``rank``, dearest first, which end before it has waited for ``gap``."""
        bins: list[list[int]] = []
        room = 0
        gap -= self._micro_batch
        while (place := bisect_right(self._short_ticks, gap) - 1) >= 0:
            length = self._lengths[self._short[place]]
            if not bins or length > room:
                gap -= self._micro_batch if bins else 0
                room = self._capacity
                bins.append([])
                continue
            bins[-1].append(self._short.pop(place))
            gap -= self._short_ticks.pop(place)
            room -= length
        self._run_alone(rank, [documents for documents in bins if documents])

    def _deal_out(self) -> None:
        """The short documents that are left."""
        per_token = self._micro_batch / self._capacity  # of micro-batches that are about full
        heap = [(free, rank) for rank, free in enumerate(self._free.tolist())]
        heapify(heap)
        mine: list[list[int]] = [[] for _ in heap]
        for document in reversed(self._short):
            free, rank = heap[0]
            mine[rank].append(document)
            heapreplace(heap, (free + self._ticks[document] + int(per_token * self._lengths[document]), rank))
        for rank, documents in enumerate(mine):
            self._run_alone(rank, self._binned(documents))

    def _binned(self, documents: Sequence[int]) -> list[list[int]]:
        """Micro-batches of one rank."""
        longest_first = sorted(documents, key=lambda document: -self._lengths[document])
        bins = best_fit([self._lengths[document] for document in longest_first], self._capacity)
        return [[longest_first[place] for place in members] for members in bins]

    def _run_alone(self, rank: int, bins: Sequence[Sequence[int]]) -> None:
        for documents in bins:
            ticks = self._micro_batch + sum(self._ticks[document] for document in documents)
            self._append((rank,), documents, ticks)
            self._free[rank] += ticks

    def _append(self, ranks: Sequence[int], documents: Sequence[int], ticks: int) -> None:
        self.groups.append(RankGroup(tuple(ranks), tuple(documents), ticks / _TICKS))


class _Choices(NamedTuple):
    """Sets of ranks for a group: when all are free, and how long they have waited by then, together.

    Set i is columns ``first[i]`` to ``first[i] + size`` of row ``row[i]`` of ``order``.
    """

    begins: Integers
    waiting: Integers
    order: Integers
    row: Integers
    first: Integers
    size: int

    def ranks(self, choice: int) -> Integers:
        first = self.first[choice]
        return np.sort(self.order[self.row[choice], first : first + self.size])


def _choices(free: Integers, size: int, per_node: int) -> _Choices:
    """Ranks that are free one after another: of one node; or, where that is too small, of nodes one after another."""
    nodes = free.reshape(-1, per_node)
    order = np.argsort(nodes, axis=1, kind="stable")
    if size > per_node:  # nodes by when the whole of each is free, in one row
        by_node = np.argsort(nodes.max(axis=1), kind="stable")
        order = (order + np.arange(len(nodes))[:, None] * per_node)[by_node].reshape(1, -1)
        step = per_node  # a set begins with a node
    else:
        order = order + np.arange(len(nodes))[:, None] * per_node
        step = 1
    times = free[order]
    before = np.concatenate([np.zeros((len(times), 1), np.int64), np.cumsum(times, axis=1)], axis=1)
    first = np.arange(0, order.shape[1] - size + 1, step)
    begins = times[:, first + size - 1]
    if size > per_node:  # of the last node not all ranks may be needed
        begins = np.maximum(begins, times[:, first + size // per_node * per_node - 1])
    waiting = size * begins - (before[:, first + size] - before[:, first])
    rows, columns = np.divmod(np.arange(begins.size), len(first))
    return _Choices(begins.ravel(), waiting.ravel(), order, rows, first[columns], size)


def _sized(lengths: Integers, capacity: int, prices: StagePrices) -> tuple[Integers, Integers]:
    """The ranks of every document, and the ticks that each of them needs for it.

    As few as hold it; more where a document would need longer than the mean rank has work.
    """
    sizes = np.maximum(1, -(-lengths // capacity))
    ticks = np.zeros_like(lengths)
    changed = np.arange(len(lengths))
    for _ in range(_ROUNDS):
        for size in np.unique(sizes[changed]).tolist():
            of_size = changed[sizes[changed] == size]
            seconds = prices.alone(lengths[of_size]) if size == 1 else prices.shared(lengths[of_size], size)
            ticks[of_size] = _ticks(seconds)
        even = int((sizes * ticks).sum()) / prices.ranks
        changed = np.flatnonzero((ticks > even) & (sizes < prices.ranks))
        if not len(changed):
            break
        sizes[changed] = np.minimum(prices.ranks, np.ceil(sizes[changed] * ticks[changed] / even)).astype(np.int64)
    return sizes, ticks


def _ticks(seconds: float | NDArray[np.float64]) -> Integers:
    return np.rint(np.asarray(seconds) * _TICKS).astype(np.int64)
