"""The greedy rule of packing and sharding: put each document into the lightest bin that has room for it."""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray


def into_lightest(
    tokens: Sequence[int],
    prices: Sequence[float],
    loads: list[float],
    rooms: list[int],
    limit: float = math.inf,
    most: int | None = None,
) -> NDArray[np.int64]:
    """Put each document, in the given order, into the lightest bin that has room for its ``tokens``.

    Bins hold ``loads`` and have ``rooms`` tokens left; both lists are updated. Each gets at most ``most`` documents.
    Returns the bin of each document, -1 if no bin has room or its price would lift the lightest over ``limit``.
    """
    places = [most or math.inf] * len(loads)
    lightest = [(load, index) for index, load in enumerate(loads)]
    heapify(lightest)
    full: list[tuple[int, float, int]] = []  # minus room, load, bin: without room for the documents of late
    owners: list[int] = []
    for length, price in zip(tokens, prices, strict=True):
        while full and -full[0][0] >= length:
            heappush(lightest, heappop(full)[1:])
        while lightest and rooms[lightest[0][1]] < length:
            load, index = heappop(lightest)
            heappush(full, (-rooms[index], load, index))
        load, index = lightest[0] if lightest else (math.inf, -1)
        if lightest and load + price <= limit:
            places[index] -= 1
            loads[index], rooms[index] = load + price, rooms[index] - length if places[index] else -1
            heapreplace(lightest, (load + price, index))
            owners.append(index)
        else:
            owners.append(-1)
    return np.array(owners, np.int64)
