"""Placement shared by all greedy packers: longest first, into the lightest micro-batch with room.

Algorithm 1 of WLB-LLM (section 4.2) tries the micro-batch of least workload, then the one of fewest tokens; a
document that fits neither fits nowhere and is left over. Two heaps answer both questions in O(log N), so
placing n documents costs O(n log n) whatever N is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter

from wlb.packing.bins import into_lightest
from wlb.packing.packer import Pending


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
        members, seconds, tokens, capacity = self.members, self.seconds, self.tokens, self.capacity
        lightest, shortest = ([(held, index) for index, held in enumerate(values)] for values in (seconds, tokens))
        heapify(lightest)
        heapify(shortest)
        for item in items:
            while lightest[0][0] != seconds[lightest[0][1]]:  # outdated: that micro-batch has grown since
                heappop(lightest)
            index = lightest[0][1]
            if tokens[index] + item[4] > capacity:
                while shortest[0][0] != tokens[shortest[0][1]]:
                    heappop(shortest)
                index = shortest[0][1]
                if tokens[index] + item[4] > capacity:
                    left_over.append(item)
                    continue
            members[index].append(item)
            seconds[index] += item[1]
            tokens[index] += item[4]
            heappush(lightest, (seconds[index], index))
            heappush(shortest, (tokens[index], index))
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


def longest_first(items: Iterable[Pending]) -> list[Pending]:
    """Items by falling length; equal lengths keep their order."""
    return sorted(items, key=itemgetter(0), reverse=True)
