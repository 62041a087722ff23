"""Fits documents into bins: the lightest with room, by best fit, and by a search where both fail.

Bin packing is NP-hard, so the search gives up after a number of placements; that many do not depend on the machine, so
all machines find the same.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from wlb.packing.levelling import Indices

_MOST_PLACEMENTS = 50_000  # of a document, about a tenth of a second


def into_lightest(
    tokens: Sequence[int], prices: Sequence[float], loads: list[float], rooms: list[int], limit: float = math.inf
) -> list[int]:
    """The bin of each document, in the order given: the lightest that has room for its ``tokens``.

    -1 is the bin of a document for which none has room, or whose price would lift it over ``limit``. Bins hold
    ``loads`` and have ``rooms`` tokens left; both lists are brought up to date.
    """
    shortest = min(tokens, default=0)
    lightest = [(load, index) for index, load in enumerate(loads) if rooms[index] >= shortest]
    heapify(lightest)
    full: list[tuple[int, float, int]] = []  # minus room, load, bin: without room for the documents of late
    owners = []
    for length, price in zip(tokens, prices, strict=True):
        while full and -full[0][0] >= length:
            heappush(lightest, heappop(full)[1:])
        while lightest and rooms[lightest[0][1]] < length:
            load, index = heappop(lightest)
            if rooms[index] >= shortest:
                heappush(full, (-rooms[index], load, index))
        if lightest and (load := lightest[0][0] + price) <= limit:
            index = lightest[0][1]
            loads[index], rooms[index] = load, rooms[index] - length
            heapreplace(lightest, (load, index))
            owners.append(index)
        else:
            owners.append(-1)
    return owners


def best_fit(tokens: Sequence[int], capacity: int) -> list[list[int]]:
    """Each document, in the order given, into the fullest bin with room for its ``tokens``, or into another bin.

    Returns the documents of every bin. A document must not be over ``capacity``.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []  # of every bin, ascending: times as many as documents, and its number
    for document, length in enumerate(tokens):
        place = bisect_left(rooms, length * len(tokens))
        if place == len(rooms):
            room, index = capacity, len(bins)
            bins.append([])
        else:
            room, index = divmod(rooms.pop(place), len(tokens))
        bins[index].append(document)
        insort(rooms, (room - length) * len(tokens) + index)
    return bins


def fitting_bins(
    tokens: Sequence[int], bins: int, capacity: int, size: int | None, placements: int = _MOST_PLACEMENTS
) -> list[Indices] | None:
    """``bins`` bins of at most ``capacity`` tokens, none empty, and ``size`` documents each unless None.

    Returns the documents of every bin, or None where the search found no way or gave up.
    """
    search = _Search(tokens, bins, capacity, size or len(tokens), placements)
    return [np.array(bin_, np.int64) for bin_ in search.bins] if search.fits() else None


class _Search:
    """Longest first, each into the fullest bin that it fits, and elsewhere where that leads nowhere."""

    def __init__(self, tokens: Sequence[int], bins: int, capacity: int, size: int, placements: int) -> None:
        self._tokens, self._size, self._placements = tokens, size, placements
        self._order = sorted(range(len(tokens)), key=lambda document: -tokens[document])
        self.bins: list[list[int]] = [[] for _ in range(bins)]
        self._room = [capacity] * bins

    def fits(self) -> bool:
        """Depth first, without recursion: ``untried[d]`` are the bins left to try for the d-th document."""
        untried = [self._candidates(0)]
        while untried:
            depth = len(untried) - 1
            document = self._order[depth]
            if untried[depth]:
                self._placements -= 1
                if self._placements < 0:
                    return False
                bin_ = untried[depth].pop()
                self.bins[bin_].append(document)
                self._room[bin_] -= self._tokens[document]
                if depth + 1 == len(self._order):
                    return True
                untried.append(self._candidates(depth + 1))
            else:
                untried.pop()
                if untried:
                    self._take_back(self._order[depth - 1])
        return False

    def _take_back(self, document: int) -> None:
        bin_ = next(index for index, held in enumerate(self.bins) if held and held[-1] == document)
        self.bins[bin_].pop()
        self._room[bin_] += self._tokens[document]

    def _candidates(self, depth: int) -> list[int]:
        """Bins for the next document, the fullest last; of bins that are alike only one."""
        length = self._tokens[self._order[depth]]
        empty = [index for index, held in enumerate(self.bins) if not held]
        if len(empty) >= len(self._order) - depth:  # every document left has to open a bin
            return empty[:1] if self._room[empty[0]] >= length else []
        alike = {
            (room, len(held)): index
            for index, (room, held) in enumerate(zip(self._room, self.bins, strict=True))
            if room >= length and len(held) < self._size
        }
        return [alike[key] for key in sorted(alike, reverse=True)]
