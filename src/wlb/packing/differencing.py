"""Largest differencing (Karmarkar and Karp, 1982, for several parts): the initial solution for few documents a part.

Every document is a division of its own, with the document in one part and the others empty. The two divisions whose
parts differ most are joined, the dearest part of one with the cheapest of the other, until one division is left. It
costs documents times parts; of many documents a plainer start becomes as even by exchanging them.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

import numpy as np

from wlb.packing.levelling import Indices, Prices


def differenced(prices: Prices, parts: int) -> list[Indices]:
    """Divide documents of ``prices`` into ``parts`` parts; returns the documents of each, none where it is empty."""
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (parts - 1)
    # Heap entries: minus how much parts differ, a number that tells entries apart, and the parts by falling price.
    divisions = [(-price, index, [(price, [index]), *empty]) for index, price in enumerate(prices.tolist())]
    heapify(divisions)
    while len(divisions) > 1:
        _, number, first = heappop(divisions)
        _, _, second = divisions[0]
        joined = [(a + b, held + added) for (a, held), (b, added) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapreplace(divisions, (joined[-1][0] - joined[0][0], number, joined))
    return [np.array(members, np.int64) for _, members in divisions[0][2]]
