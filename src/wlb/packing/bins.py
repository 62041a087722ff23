"""Fits documents into bins: by best fit, by largest differencing, and by a search.

Bin packing is NP-hard, so the search gives up after a fixed number of placements, not after a time: every machine finds
the same bins.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from itertools import count
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from wlb.packing.exchanges import Indices

_MOST_PLACEMENTS = 50_000  # about a tenth of a second
_MOST_BINS_SEEN = 4_000_000  # over all placements, each of which looks at every bin

_Parts = list[tuple[float, list[int]]]  # (price, documents) by falling price, without empty parts
_price = itemgetter(0)


def best_fit(tokens: Sequence[int], max_tokens: int, most: int | None = None) -> list[list[int]]:
    """Put each document, in the order given, into the fullest bin with room for its ``tokens``, or into a new bin.

    Returns the documents of every bin, at most ``most``. No document may be over ``max_tokens``.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []  # of every bin, ascending, as room * documents + bin number
    for document, length in enumerate(tokens):
        place = bisect_left(rooms, length * len(tokens))
        if place == len(rooms):
            room, index = max_tokens, len(bins)
            bins.append([])
        else:
            room, index = divmod(rooms.pop(place), len(tokens))
        bins[index].append(document)
        if len(bins[index]) != most:
            insort(rooms, (room - length) * len(tokens) + index)
    return bins


def longest_first_bins(tokens: Indices, bins: int, max_tokens: int, most: int | None) -> list[Indices] | None:
    """Best fit, longest first, into exactly ``bins`` non-empty bins; returns their documents, or None if too few."""
    order = np.argsort(-tokens, kind="stable")
    found = best_fit(tokens[order].tolist(), max_tokens, most)
    for documents in [*found]:  # the shortest documents get the remaining bins
        spared = max(0, min(len(documents) - 1, bins - len(found)))
        found += [[documents.pop()] for _ in range(spared)]
    return [order[documents] for documents in found] if len(found) == bins else None


def fitting_bins(
    tokens: Sequence[int], bins: int, max_tokens: int, size: int | None, placements: int = _MOST_PLACEMENTS
) -> list[Indices] | None:
    """Search for ``bins`` non-empty bins of at most ``max_tokens`` tokens, and at most ``size`` documents unless None.

    Depth first: the longest document goes into the fullest bin with room, and into another if that leads nowhere.

    Returns the documents of every bin, or None if the search found no way or gave up.
    """
    placements = min(placements, _MOST_BINS_SEEN // bins)
    if placements < len(tokens):
        return None
    order = sorted(range(len(tokens)), key=lambda document: -tokens[document])
    held: list[list[int]] = [[] for _ in range(bins)]
    rooms = [max_tokens] * bins

    def candidates(depth: int) -> list[int]:
        """Bins for the next document, the fullest last; one of each kind of equal bins."""
        length = tokens[order[depth]]
        empty = [index for index, documents in enumerate(held) if not documents]
        if len(empty) >= len(order) - depth:  # every remaining document must open a bin
            return empty[:1] if rooms[empty[0]] >= length else []
        alike = {
            (room, len(documents)): index
            for index, (room, documents) in enumerate(zip(rooms, held, strict=True))
            if room >= length and len(documents) < (size or len(tokens))
        }
        return [alike[key] for key in sorted(alike, reverse=True)]

    chosen: list[int] = []  # the bin of each document placed, in order
    untried = [candidates(0)]  # bins left to try for each of these and for the next
    while untried and placements:
        if untried[-1]:
            placements -= 1
            bin_, document = untried[-1].pop(), order[len(chosen)]
            chosen.append(bin_)
            held[bin_].append(document)
            rooms[bin_] -= tokens[document]
            if len(chosen) == len(order):
                return [np.array(documents, np.int64) for documents in held]
            untried.append(candidates(len(chosen)))
        else:
            untried.pop()
            if chosen:
                bin_ = chosen.pop()
                rooms[bin_] += tokens[held[bin_].pop()]
    return None


def differenced(
    prices: Sequence[float] | NDArray[np.float64], parts: int, *, equal_size: bool = False, joined_last: bool = False
) -> list[list[int]]:
    """Divide documents of ``prices`` over 0 into ``parts`` parts; returns the documents of each, [] for an empty part.

    Largest differencing (Karmarkar and Karp, 1982, for several parts): every document starts as a division of its own,
    with the document in one part and all others empty. The two divisions whose parts differ most are joined, the most
    expensive part of one with the cheapest of the other, until one division is left. Time: documents times parts.

    With ``equal_size`` all parts hold the same number of documents, except one if ``parts`` does not divide them:
    documents of neighbouring prices start in different parts (as in verl, ``utils/seqlen_balancing.py``). Ties are
    broken by the first document, or with ``joined_last`` so that the latest joined division comes last.
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
    """Parts by falling price; the cheapest parts of both are merged where there are too many."""
    alone, others = parts - len(second), parts - len(first)
    meeting = zip(first[alone:], reversed(second[others:]), strict=True)
    joined = first[:alone] + [(a + b, held + added) for (a, held), (b, added) in meeting] + second[:others][::-1]
    joined.sort(key=_price, reverse=True)
    return joined


def _least(division: _Parts, parts: int) -> float:
    return division[-1][0] if len(division) == parts else 0.0
