"""Karmarkar-Karp differencing as a trainer would write it from the paper: what is compared with where verl is missing.

Every division keeps its parts as lists with sums; two are joined by adding the dearest part of one to the cheapest of
the other. ``wlb.packing.differencing`` is the same method, made faster; this one, like verl's, is not.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import total_ordering


@total_ordering
class Part:
    """Documents and their sum."""

    def __init__(self) -> None:
        self.total = 0
        self.documents: list[tuple[int, int]] = []

    def add(self, document: int, value: int) -> None:
        self.documents.append((document, value))
        self.total += value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and (self.total, self.documents) == (other.total, other.documents)

    def __lt__(self, other: Part) -> bool:
        return (self.total, self.documents) < (other.total, other.documents)

    __hash__ = None  # type: ignore[assignment]  # it changes


class Division:
    """Parts by falling sum; the division that differs most comes first in a heap."""

    def __init__(self, documents: Sequence[tuple[int, int]], parts: int) -> None:
        self.parts = [Part() for _ in range(parts)]
        for part, (value, document) in zip(self.parts, documents, strict=False):
            part.add(document, value)
        self.parts.sort(reverse=True)

    def join(self, other: Division) -> None:
        for mine, theirs in zip(self.parts, reversed(other.parts), strict=True):
            for document, value in theirs.documents:
                mine.add(document, value)
        self.parts.sort(reverse=True)

    def __lt__(self, other: Division) -> bool:
        mine, theirs = (division.parts[0].total - division.parts[-1].total for division in (self, other))
        return mine > theirs if mine != theirs else self.parts[0] > other.parts[0]


def karmarkar_karp(values: Sequence[int], parts: int, equal_size: bool) -> list[list[int]]:
    """The indices of ``values`` in each of ``parts`` parts, equally many where ``equal_size``."""
    rising = sorted((value, document) for document, value in enumerate(values))
    together = parts if equal_size else 1
    divisions = [Division(rising[first : first + together], parts) for first in range(0, len(rising), together)]
    heapq.heapify(divisions)
    while len(divisions) > 1:
        first, second = heapq.heappop(divisions), heapq.heappop(divisions)
        first.join(second)
        heapq.heappush(divisions, first)
    return [[document for document, _ in part.documents] for part in divisions[0].parts]
