"""Largest differencing (Karmarkar and Karp, 1982, for several parts): divides few documents almost evenly.

Every document is a division of its own, with the document in one part and the others empty. The two divisions whose
parts differ most are joined, the dearest part of one with the cheapest of the other, until one division is left. It
costs up to documents times parts; of many documents a plainer start becomes as even by exchanging them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from itertools import count
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

_Parts = list[tuple[float, list[int]]]  # price and documents, by falling price; parts without documents are left out
_price = itemgetter(0)


def differenced(
    prices: Sequence[float] | NDArray[np.float64], parts: int, *, equal_size: bool = False, joined_last: bool = False
) -> list[list[int]]:
    """Divide documents of ``prices``, over 0, into ``parts`` parts; returns the documents of each, none where empty.

    With ``equal_size`` parts hold equally many, but for one where ``parts`` does not divide the documents: neighbours
    in rising price start in parts of their own (as in verl, ``utils/seqlen_balancing.py``). Of divisions that differ
    equally the first documents come first, or with ``joined_last`` those that were joined last come last.
    """
    price = np.asarray(prices, np.float64).tolist()
    divisions = [[(value, [index])] for index, value in enumerate(price)]
    if equal_size:
        falling = [divisions[index][0] for index in np.argsort(price, kind="stable").tolist()[::-1]]
        divisions = [falling[at : at + parts] for at in range(0, len(falling), parts)][::-1]
    # Heap entries: minus how much parts differ, a number that tells entries apart, and the division.
    heap = [(_least(division, parts) - division[0][0], n, division) for n, division in enumerate(divisions)]
    heapify(heap)
    later = count(len(heap))
    while len(heap) > 1:
        _, number, first = heappop(heap)
        joined = _joined(first, heap[0][2], parts)
        number = next(later) if joined_last else number
        heapreplace(heap, (_least(joined, parts) - joined[0][0], number, joined))
    full = [members for _, members in heap[0][2]] if heap else []
    return full + [[] for _ in range(parts - len(full))]


def _joined(first: _Parts, second: _Parts, parts: int) -> _Parts:
    """Parts by falling price: the cheapest of both meet where not all have room alone."""
    alone, others = parts - len(second), parts - len(first)
    meeting = zip(first[alone:], reversed(second[others:]), strict=True)
    joined = first[:alone] + [(a + b, held + added) for (a, held), (b, added) in meeting] + second[:others][::-1]
    joined.sort(key=_price, reverse=True)
    return joined


def _least(division: _Parts, parts: int) -> float:
    return division[-1][0] if len(division) == parts else 0.0
