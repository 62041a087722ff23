"""Placement shared by all greedy packers: longest first, into the lightest micro-batch with room.

Algorithm 1 of WLB-LLM (section 4.2) tries the micro-batch of least workload, then the one of fewest tokens; a
document that fits neither fits nowhere and is left over. Two heaps answer both questions in O(log N), so
placing n documents costs O(n log n) whatever N is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter

from wlb.packing.packer import Pending
from wlb.packing.plan import MicroBatch


class OpenMicroBatches:
    """N micro-batches being filled, none beyond ``capacity`` tokens."""

    def __init__(self, micro_batches: int, capacity: int) -> None:
        self.capacity = capacity
        self.members: list[list[Pending]] = [[] for _ in range(micro_batches)]
        self.seconds = [0.0] * micro_batches
        self.tokens = [0] * micro_batches
        self._lightest = [(0.0, index) for index in range(micro_batches)]
        self._shortest: list[tuple[int, int]] | None = None  # built when first needed, which is rare

    def place(self, items: Iterable[Pending]) -> list[Pending]:
        """Place ``items`` in the order given; returns those that fit no micro-batch."""
        left_over: list[Pending] = []
        lightest, tokens, seconds, capacity = self._lightest, self.tokens, self.seconds, self.capacity
        append = [members.append for members in self.members]
        for item in items:
            load, index = lightest[0]
            while load != seconds[index]:  # outdated: that micro-batch has grown since
                heappop(lightest)
                load, index = lightest[0]
            length = tokens[index] + item[0]
            if length <= capacity:
                seconds[index] = load = load + item[1]
                heapreplace(lightest, (load, index))
            else:
                index = self._index_of_shortest()
                length = tokens[index] + item[0]
                if length > capacity:
                    left_over.append(item)
                    continue
                seconds[index] += item[1]
                heappush(lightest, (seconds[index], index))
            tokens[index] = length
            append[index](item)
            if self._shortest is not None:
                heappush(self._shortest, (length, index))
        return left_over

    def place_under(self, item: Pending, limit: float) -> float | None:
        """Place ``item`` into the lightest micro-batch if that stays within ``limit`` seconds and has room.

        Returns the micro-batch's new seconds, or None where the item was not placed.
        """
        lightest, seconds = self._lightest, self.seconds
        while lightest[0][0] != seconds[lightest[0][1]]:
            heappop(lightest)
        load, index = lightest[0]
        if load + item.seconds > limit or self.tokens[index] + item.length > self.capacity:
            return None
        self.put(item, index)
        return seconds[index]

    def place_within(self, items: Sequence[Pending], limit: float) -> list[Pending]:
        """Place each of ``items`` into the lightest micro-batch with room for it, if it stays within ``limit`` seconds.

        Unlike ``place`` this looks past the lightest one where that is full. Returns those that were not placed.
        """
        left_over: list[Pending] = []
        shortest = min([item[0] for item in items], default=0)
        closed: list[tuple[float, int]] = []  # with room for none of the items
        lightest, tokens, seconds, capacity = self._lightest, self.tokens, self.seconds, self.capacity
        for item in items:
            full: list[tuple[float, int]] = []
            while lightest:
                load, index = lightest[0]
                if load != seconds[index]:
                    heappop(lightest)  # outdated: that micro-batch has grown since
                elif tokens[index] + shortest > capacity:
                    closed.append(heappop(lightest))
                elif tokens[index] + item[0] > capacity:
                    full.append(heappop(lightest))
                else:
                    break
            if lightest and lightest[0][0] + item[1] <= limit:
                self.put(item, lightest[0][1])
            else:
                left_over.append(item)
            for entry in full:
                heappush(lightest, entry)
        for entry in closed:
            heappush(lightest, entry)
        return left_over

    def put(self, item: Pending, index: int) -> None:
        """Place ``item`` into micro-batch ``index``, which must have room."""
        self.members[index].append(item)
        self.seconds[index] += item.seconds
        self.tokens[index] += item.length
        heappush(self._lightest, (self.seconds[index], index))
        if self._shortest is not None:
            heappush(self._shortest, (self.tokens[index], index))

    def fill_empty(self) -> None:
        """Move single documents from the heaviest micro-batches that hold several into those that hold none."""
        for index in [index for index, members in enumerate(self.members) if not members]:
            several = [other for other, held in enumerate(self.members) if len(held) > 1]
            if not several:
                return
            heaviest = max(several, key=self.seconds.__getitem__)
            item = self.members[heaviest].pop()
            self.seconds[heaviest] -= item.seconds
            self.tokens[heaviest] -= item.length
            self.put(item, index)

    def steps(self, micro_batches: int) -> Iterator[tuple[list[MicroBatch], list[Pending]]]:
        """The filled micro-batches in groups of ``micro_batches``, each with all its members in one list."""
        for first in range(0, len(self.members), micro_batches):
            members = self.members[first : first + micro_batches]
            seconds = self.seconds[first : first + micro_batches]
            yield (
                [MicroBatch(tuple([item[3] for item in m]), s) for m, s in zip(members, seconds, strict=True)],
                [item for m in members for item in m],
            )

    def _index_of_shortest(self) -> int:
        if self._shortest is None:
            self._shortest = [(tokens, index) for index, tokens in enumerate(self.tokens)]
            heapify(self._shortest)
        while self._shortest[0][0] != self.tokens[self._shortest[0][1]]:
            heappop(self._shortest)
        return self._shortest[0][1]


def longest_first(items: Iterable[Pending]) -> list[Pending]:
    """Items by falling length; equal lengths keep their order."""
    return sorted(items, key=itemgetter(0), reverse=True)
