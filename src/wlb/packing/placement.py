"""Placement shared by all greedy packers: longest first, into the lightest micro-batch with room.

Algorithm 1 of WLB-LLM (section 4.2) tries the micro-batch of least workload, then the one of fewest tokens; a
document that fits neither fits nowhere and is left over. Two heaps answer both questions in O(log N), so
placing n documents costs O(n log n) whatever N is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter

from wlb.packing.bins import into_lightest
from wlb.packing.packer import Pending
from wlb.packing.plan import MicroBatch


class OpenMicroBatches:
    """N micro-batches being filled, none beyond ``capacity`` tokens, of which ``tokens`` are held."""

    def __init__(self, micro_batches: int, capacity: int) -> None:
        self.capacity = capacity
        self.members: list[list[Pending]] = [[] for _ in range(micro_batches)]
        self.seconds = [0.0] * micro_batches
        self.tokens = [0] * micro_batches

    def place(self, items: Iterable[Pending]) -> list[Pending]:
        """Place ``items`` in the order given; returns those that fit no micro-batch."""
        left_over: list[Pending] = []
        tokens, seconds, capacity = self.tokens, self.seconds, self.capacity
        append = [members.append for members in self.members]
        lightest = [(load, index) for index, load in enumerate(seconds)]
        heapify(lightest)
        shortest: list[tuple[int, int]] = []  # built when first needed, which is rare
        for item in items:
            load, index = lightest[0]
            while load != seconds[index]:  # outdated: that micro-batch has grown since
                heappop(lightest)
                load, index = lightest[0]
            length = tokens[index] + item[4]
            if length <= capacity:
                seconds[index] = load = load + item[1]
                heapreplace(lightest, (load, index))
            else:
                if not shortest:
                    shortest = [(held, index) for index, held in enumerate(tokens)]
                    heapify(shortest)
                while shortest[0][0] != tokens[shortest[0][1]]:
                    heappop(shortest)
                held, index = shortest[0]
                length = held + item[4]
                if length > capacity:
                    left_over.append(item)
                    continue
                seconds[index] += item[1]
                heappush(lightest, (seconds[index], index))
            tokens[index] = length
            append[index](item)
            if shortest:
                heappush(shortest, (length, index))
        return left_over

    def place_within(self, items: Sequence[Pending], limit: float) -> list[Pending]:
        """Place each of ``items`` into the lightest micro-batch with room for it, if it stays within ``limit`` seconds.

        Unlike ``place`` this looks past the lightest one where that is full. Returns those that were not placed.
        """
        rooms = [self.capacity - held for held in self.tokens]
        owners = into_lightest([item[4] for item in items], [item[1] for item in items], self.seconds, rooms, limit)
        self.tokens = [self.capacity - room for room in rooms]
        for item, owner in zip(items, owners, strict=True):
            if owner >= 0:
                self.members[owner].append(item)
        return [item for item, owner in zip(items, owners, strict=True) if owner < 0]

    def put(self, item: Pending, index: int) -> None:
        """Place ``item`` into micro-batch ``index``, which must have room."""
        self.members[index].append(item)
        self.seconds[index] += item.seconds
        self.tokens[index] += item.held

    def fill_empty(self) -> None:
        """Move single documents from the heaviest micro-batches that hold several into those that hold none."""
        for index in [index for index, members in enumerate(self.members) if not members]:
            several = [other for other, held in enumerate(self.members) if len(held) > 1]
            if not several:
                return
            heaviest = max(several, key=self.seconds.__getitem__)
            item = self.members[heaviest].pop()
            self.seconds[heaviest] -= item.seconds
            self.tokens[heaviest] -= item.held
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


def longest_first(items: Iterable[Pending]) -> list[Pending]:
    """Items by falling length; equal lengths keep their order."""
    return sorted(items, key=itemgetter(0), reverse=True)
