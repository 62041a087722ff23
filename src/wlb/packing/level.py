"""Level steps: every rank runs its own list of micro-batches, and all ranks finish together.

Ranks of a pipeline stage keep their weights through the step, so they meet only where they share a document, and at the
end. The step has to be balanced, not each micro-batch. A document runs on as few ranks as can hold it, or on more if it
would otherwise finish last. Shared documents are placed first, and short ones even out the ranks:

1. Place the largest groups first, each on as few nodes as possible. Of all places where a group finishes in time, take
   the one where its ranks wait least for each other.
2. A rank that is free before the rest of its group runs short documents meanwhile.
3. Give each remaining document, longest first, to the rank that is free soonest, or to one that is free a little later
   and has begun a micro-batch with room for it.

A micro-batch of few tokens takes as long as launching its kernels, or reading its weights. So ranks begin one only
where that time fits, and fill it before others begin theirs.

Groups of exactly the size that documents need may leave ranks that nothing fills, such as 6 of 32 beside a group of 26.
So the step is planned again with groups that fill nodes or divide one, and the faster plan is kept. If ranks still
finish unevenly, as with few documents, larger groups are tried: sizes at which one, two, three ... such groups in turn
take as long as the mean rank, sizes that divide all ranks, two ranks for the longest documents of a single rank, and
last smaller groups that fill nodes or divide one, so that more run at once.

Every rank runs its micro-batches in the order of the plan. The first unfinished micro-batch can therefore always run,
and ranks cannot deadlock.

Ranks may differ in speed, and a shared micro-batch takes as long as its slowest rank. So a group gets ranks of similar
speed if as few nodes have enough of them, and slow ranks run fewer short documents. Speeds are whole per cent and times
whole ticks, so that all machines make the same plan.
"""

from bisect import bisect_left, bisect_right, insort
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.packing.plan import Integers, PlannedMicroBatch, StageRanks
from wlb.settings import MOST_RANKS
from wlb.workload.base import TICKS, DocumentPrices, in_ticks

_SHARED_TOO = 4  # longest documents of single ranks that are tried on two ranks
_EVENLY = 1.01  # a step that ends within this factor of perfect balance is good enough
_PACE = 3  # weight of waiting for a slower rank; while ranks wait to begin, they can run short documents
_ROUNDS = 4  # of giving more ranks to documents that would finish too late


class StagePrices(DocumentPrices, Protocol):
    """Seconds of documents on the ranks of a pipeline stage, forward and backward.

    Arrays in, arrays of the same shape out. ``document_seconds`` are those that each adds to a micro-batch of one rank.
    """

    @property
    def least(self) -> float:
        """Seconds that a micro-batch of one rank takes at least, however few its tokens are."""

    def beginning(self, lengths: Integers) -> NDArray[np.float64]:
        """Further seconds of one-rank micro-batches, whose longest documents have ``lengths`` tokens."""

    def shared(self, lengths: Integers, ranks: int) -> NDArray[np.float64]:
        """Seconds of micro-batches of one document each, shared by ``ranks`` ranks on as few nodes as possible."""


def level_groups(
    lengths: ArrayLike, max_tokens: int, prices: StagePrices, ranks: StageRanks
) -> list[PlannedMicroBatch]:
    """The micro-batches of a step that trains documents of ``lengths`` tokens, in an order that every rank keeps to.

    Every document is in exactly one. No rank holds more than ``max_tokens`` tokens of a micro-batch if ranks share a
    document evenly. A document may have at most ``max_tokens`` for each rank, and for each of ``MOST_RANKS`` ranks.

    Ranks that share experts run every micro-batch together. All of this is then of such groups instead of ranks:
    prices, ``max_tokens`` and ``ranks.count``; only the returned micro-batches name ranks.
    """
    tokens = np.asarray(lengths, np.int64)
    needed, ticks = _sized(tokens, max_tokens, prices, ranks)
    best = _Step(tokens, needed, ticks, max_tokens, prices, ranks)

    def attempt(sizes: Integers) -> "_Step":
        if (sizes == needed).all():
            return best
        changed = _group_ticks(tokens, sizes, ticks, sizes != needed, prices)
        return min(best, _Step(tokens, sizes, changed, max_tokens, prices, ranks), key=lambda plan: plan.end)

    best = attempt(_dividing(needed, ranks.per_node, ranks))
    if not best.is_even:
        in_turn = _in_turn(needed, ticks, ranks)
        for sizes in (in_turn, _dividing(in_turn, ranks.per_node, ranks), _dividing(needed, ranks.count, ranks)):
            best = attempt(sizes)
    for longest in np.lexsort((-tokens, best.sizes))[:_SHARED_TOO]:
        if best.is_even or best.sizes[longest] > 1 or ranks.count == 1:
            break
        sizes = best.sizes.copy()
        sizes[longest] = 2
        best = attempt(sizes)
    if not best.is_even:  # smaller groups, which fill nodes or divide one if they hold the document
        unit, held = ranks.per_node, np.maximum(1, -(-tokens // max_tokens))
        fewer = np.where(needed >= unit, needed // unit * unit, unit // -(-unit // needed))
        best = attempt(np.maximum(held, fewer))
    return [one._replace(ranks=ranks.of_groups(one.ranks)) for one in best.groups]


class _Step:
    """The ``groups`` placed so far, and when each rank is free after them, in ticks."""

    def __init__(
        self,
        lengths: Integers,
        sizes: Integers,
        ticks: Integers,
        max_tokens: int,
        prices: StagePrices,
        ranks: StageRanks,
    ) -> None:
        self.groups: list[PlannedMicroBatch] = []
        self.sizes = sizes
        self._per_node, self._max_tokens, self._lengths = ranks.per_node, max_tokens, lengths.tolist()
        self._free = np.zeros(ranks.count, np.int64)
        self._speeds = _percent(ranks)
        self._differ = bool((self._speeds != self._speeds[0]).any())
        self._nodes = np.arange(0, ranks.count, ranks.per_node)[:, None]  # the first rank of each node
        self._even = 100 * int((sizes * ticks).sum()) // int(self._speeds.sum())
        full = np.array([max_tokens])
        self._full = int(in_ticks(prices.document_seconds(full) + prices.beginning(full))[0])
        self._least = int(in_ticks(prices.least))
        shared, alone = np.flatnonzero(sizes > 1), np.flatnonzero(sizes == 1)
        alone = alone[np.lexsort((alone, lengths[alone]))]
        adds = in_ticks(prices.document_seconds(lengths[alone]))
        # Unplaced documents for single ranks, shortest first; ticks that each adds to a micro-batch, or with a new one.
        self._short: list[int] = alone.tolist()
        self._adds: list[int] = adds.tolist()
        self._begins: list[int] = (adds + in_ticks(prices.beginning(lengths[alone]))).tolist()
        for document in shared[np.lexsort((-ticks[shared], -sizes[shared]))].tolist():
            self._share(document, int(sizes[document]), int(ticks[document]))
        self._deal_out()

    @property
    def end(self) -> int:
        """When the last rank finishes, in ticks."""
        return int(self._free.max())

    @property
    def is_even(self) -> bool:
        """Whether all ranks finish at nearly the same time."""
        return self.end <= _EVENLY * self._even

    def _share(self, document: int, size: int, ticks: int) -> None:
        ranks = self._place(size, ticks)
        begins = int(self._free[ranks].max())
        for rank in ranks.tolist():
            self._fill(rank, (begins - int(self._free[rank])) * int(self._speeds[rank]) // 100)
        self._free[ranks] = max(begins, int(self._free[ranks].max())) + int(_taken(ticks, self._speeds[ranks].min()))
        self.groups.append(PlannedMicroBatch((document,), ticks / TICKS, tuple(ranks.tolist())))

    def _place(self, size: int, ticks: int) -> Integers:
        """The ranks that wait least for each other and finish in time; if none does, the ranks that finish first.

        Finishing in time leaves, if possible, time for a micro-batch on each rank, whose backward hides the gradient
        reduction.
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
        """Sets of ranks that may share a document, on as few nodes as possible; shape (``size``, sets).

        Ranks that become free one after another and, if speeds differ, the fastest and the slowest ranks of nodes.
        """
        busy, nodes = busy.reshape(-1, self._per_node), -(-size // self._per_node)
        of_each = -(-size // nodes)
        order = np.argsort(busy, axis=1, kind="stable") + self._nodes
        if nodes > 1:
            order = order[np.argsort(busy.max(axis=1), kind="stable")]  # by when all ranks of a node are free
        tables = [order]
        if self._differ and of_each < self._per_node:
            by_speed = np.take_along_axis(order, np.argsort(-self._speeds[order], axis=1, kind="stable"), axis=1)
            tables += [by_speed[:, :of_each], by_speed[:, -of_each:]]
        places = _starts(size, *(table.shape for table in tables)) + np.arange(size)[:, None]
        ranks: Integers = np.concatenate([table.ravel() for table in tables])
        return ranks.take(places)

    def _fill(self, rank: int, gap: int) -> None:
        """Give ``rank`` documents that fit into ``gap`` ticks, most expensive first."""
        own = _OwnMicroBatches(self._max_tokens, self._least)
        while (place := bisect_right(self._adds, gap + own.spare) - 1) >= 0:
            if not own.filled or own.room < self._lengths[self._short[place]]:
                place = bisect_right(self._begins, gap) - 1
                if place < 0 or self._least > gap:
                    break
            gap -= self._give(place, own)
        self._run_alone(rank, own)

    def _deal_out(self) -> None:
        """Give each remaining document, longest first, to a rank that is free early, with room if possible."""
        speeds = self._speeds.tolist()
        own = [_OwnMicroBatches(self._max_tokens, self._least) for _ in speeds]
        # When ranks are free, each with one micro-batch of its own at least.
        free = [when + _taken(self._least, speed) for when, speed in zip(self._free.tolist(), speeds, strict=True)]
        ranks = [(when, rank) for rank, when in enumerate(free)]
        heapify(ranks)
        roomy = [*ranks]  # the same of ranks that had room for the document when they were put here
        rooms: list[tuple[int, int]] = []  # of the others: room in tokens, negative, and the rank
        while self._short:
            length, anew = self._lengths[self._short[-1]], max(self._least, self._begins[-1]) - self._adds[-1]
            while rooms and -rooms[0][0] >= length:
                rank = heappop(rooms)[1]
                heappush(roomy, (free[rank], rank))
            while ranks[0][0] < free[ranks[0][1]]:
                heappop(ranks)
            while roomy and (roomy[0][0] < free[roomy[0][1]] or own[roomy[0][1]].room < length):
                heappop(roomy)
            _, rank = roomy[0] if roomy and roomy[0][0] <= ranks[0][0] + anew else ranks[0]
            begun = self._least * (not own[rank].filled)  # counted already
            free[rank] += _taken(self._give(-1, own[rank]) - begun, speeds[rank])
            heappush(ranks, (free[rank], rank))
            heappush(rooms, (-own[rank].room, rank))
        for rank, micro_batches in enumerate(own):
            self._run_alone(rank, micro_batches)

    def _give(self, place: int, own: "_OwnMicroBatches") -> int:
        """Move the document at ``place`` into ``own``; returns the ticks that it adds there."""
        document, adds, begins = self._short.pop(place), self._adds.pop(place), self._begins.pop(place)
        return own.put(document, self._lengths[document], adds, begins)

    def _run_alone(self, rank: int, own: "_OwnMicroBatches") -> None:
        """Let ``rank`` run the micro-batches of ``own``, the longest last, as its backward hides the reduction."""
        for documents, ticks in sorted(own.filled, key=lambda micro_batch: micro_batch[1]):
            takes = max(self._least, ticks)
            self.groups.append(PlannedMicroBatch(tuple(documents), takes / TICKS, (rank,)))
            self._free[rank] += _taken(takes, self._speeds[rank])


class _OwnMicroBatches:
    """Micro-batches of one rank, each of ``least`` ticks or more; ``filled`` has the documents, and their ticks."""

    def __init__(self, max_tokens: int, least: int) -> None:
        self.filled: list[tuple[list[int], int]] = []
        self._max_tokens, self._least = max_tokens, least
        self._rooms: list[tuple[int, int]] = []  # free tokens, ascending, and the micro-batch

    @property
    def spare(self) -> int:
        """Ticks of the least time that documents do not fill yet; 0 if there are several micro-batches."""
        return max(0, self._least - self.filled[0][1]) if len(self.filled) == 1 else 0

    @property
    def room(self) -> int:
        """Tokens of the longest document that fits a micro-batch that was begun, or the first."""
        return self._rooms[-1][0] if self._rooms else self._max_tokens

    def put(self, document: int, length: int, adds: int, begins: int) -> int:
        """Put ``document``, of ``adds`` ticks or ``begins`` in a new one, where it fits best; returns what it adds."""
        if self.filled and self.room >= length:
            room, index = self._rooms.pop(bisect_left(self._rooms, (length, 0)))
            taken = max(self._least, self.filled[index][1])
        else:
            room, index, adds, taken = self._max_tokens, len(self.filled), begins, 0
            self.filled.append(([], 0))
        documents, ticks = self.filled[index]
        documents.append(document)
        self.filled[index] = documents, ticks + adds
        insort(self._rooms, (room - length, index))
        return max(self._least, ticks + adds) - taken


@lru_cache
def _starts(size: int, *shapes: tuple[int, int]) -> Integers:
    """Where runs of ``size`` entries begin in tables of ``shapes``: inside a row or, if longer, at its start."""
    starts, before = [], 0
    for lines, width in shapes:
        places = np.arange(lines * width - size + 1)
        starts.append(before + places[places % width <= max(0, width - size)])
        before += lines * width
    return np.concatenate(starts)


def _sized(lengths: Integers, max_tokens: int, prices: StagePrices, ranks: StageRanks) -> tuple[Integers, Integers]:
    """The number of ranks of every document, and the ticks that it takes on them.

    As few ranks as can hold it, and more if it would take longer than the work of the mean rank.
    """
    most = _most(ranks)
    sizes = np.maximum(1, -(-lengths // max_tokens))
    fixed = float(prices.beginning(np.array([max_tokens]))[0]) / max_tokens  # a token's share of the fixed cost
    ticks = _group_ticks(
        lengths, sizes, in_ticks(prices.document_seconds(lengths) + fixed * lengths), sizes > 1, prices
    )
    for _ in range(_ROUNDS):
        even = _even(sizes, ticks, ranks)
        late = (ticks > even) & (sizes < most)
        if not late.any():
            break
        sizes[late] = np.minimum(most, np.ceil(sizes[late] * ticks[late] / even)).astype(np.int64)
        ticks = _group_ticks(lengths, sizes, ticks, late, prices)
    return sizes, ticks


def _most(ranks: StageRanks) -> int:
    """The most ranks that may share a document."""
    return min(ranks.count, MOST_RANKS // ranks.together)


def _dividing(sizes: Integers, unit: int, ranks: StageRanks) -> Integers:
    """``sizes`` of groups, raised to whole multiples of ``unit`` ranks or, below that, to a divisor of ``unit``."""
    raised = np.where(sizes > unit, -(-sizes // unit) * unit, unit // np.maximum(1, unit // sizes))
    return np.minimum(raised, np.maximum(sizes, _most(ranks)))


def _in_turn(sizes: Integers, ticks: Integers, ranks: StageRanks) -> Integers:
    """``sizes`` of groups, raised so that a whole number of them in turn take as long as the mean rank."""
    even = _even(sizes, ticks, ranks)
    turns = np.ceil(even / np.maximum(1, ticks))
    larger = np.ceil(sizes * ticks * turns / even).astype(np.int64)
    return np.where(sizes > 1, np.clip(larger, sizes, _most(ranks)), sizes)


def _group_ticks(
    lengths: Integers, sizes: Integers, ticks: Integers, changed: NDArray[np.bool_], prices: StagePrices
) -> Integers:
    """``ticks`` with new values for the ``changed`` documents, which run on groups of ``sizes`` ranks."""
    ticks = ticks.copy()
    for size in np.unique(sizes[changed]).tolist():
        of_size = changed & (sizes == size)
        ticks[of_size] = in_ticks(prices.shared(lengths[of_size], size))
    return ticks


def _even(sizes: Integers, ticks: Integers, ranks: StageRanks) -> float:
    """When all ranks would finish if the work were shared perfectly, in ticks."""
    return 100 * int((sizes * ticks).sum()) / int(_percent(ranks).sum())


def _percent(ranks: StageRanks) -> Integers:
    """The speeds of ranks, in whole per cent."""
    speeds = np.ones(ranks.count) if ranks.speeds is None else np.array(ranks.speeds)
    return np.maximum(1, np.rint(100 * speeds).astype(np.int64))


def _taken(ticks: Any, percent: Any) -> Any:
    """The ticks that ranks of speed ``percent`` need for work of ``ticks`` at full speed."""
    return ticks * 100 // percent
