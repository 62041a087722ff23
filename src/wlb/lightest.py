"""The greedy rule of packing and sharding: put each document into the lightest bin that has room for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

_ROOMY = 0.75  # share of all rooms: if documents fill no more, probably none is kept out of a bin


def into_lightest(
    tokens: Sequence[int], prices: Sequence[float], loads: list[float], rooms: list[int], limit: float = math.inf
) -> tuple[list[int], float]:
    """Put each document, in the given order, into the lightest bin that has room for its ``tokens``.

    Bins hold ``loads`` and have ``rooms`` tokens left; both lists are updated. Returns the bin of each document, -1 if
    no bin has room or its price would lift the lightest over ``limit``, and the lowest limit that would change the
    result.
    """
    shortest = min(tokens, default=0)
    lightest = [(load, index) for index, load in enumerate(loads) if rooms[index] >= shortest]
    heapify(lightest)
    full: list[tuple[int, float, int]] = []  # minus room, load, bin: without room for the documents of late
    owners: list[int] = []
    next_limit = math.inf
    if limit == math.inf and lightest and sum(tokens) <= _ROOMY * sum(rooms):
        heap, left = lightest.copy(), rooms.copy()
        for price in prices:
            load, index = heap[0]
            owners.append(index)
            heapreplace(heap, (load + price, index))
        for length, index in zip(tokens, owners, strict=True):
            left[index] -= length
        if all(left[index] >= 0 for _, index in heap):
            for load, index in heap:
                loads[index] = load
            rooms[:] = left
            return owners, next_limit
        owners = []
    for length, price in zip(tokens, prices, strict=True):
        while full and -full[0][0] >= length:
            heappush(lightest, heappop(full)[1:])
        while lightest and rooms[lightest[0][1]] < length:
            load, index = heappop(lightest)
            if rooms[index] >= shortest:
                heappush(full, (-rooms[index], load, index))
        load, index = lightest[0] if lightest else (math.inf, -1)
        load += price
        if lightest and load <= limit:
            loads[index], rooms[index] = load, rooms[index] - length
            heapreplace(lightest, (load, index))
        else:
            index, next_limit = -1, min(next_limit, load)
        owners.append(index)
    return owners, next_limit
