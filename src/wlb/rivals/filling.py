"""Putting documents into bins, as several policies do: in order, by fit, the lightest, and Karmarkar-Karp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from wlb.packing.bins import best_fit as bins_by_best_fit

Integers = NDArray[np.int64]


def longest_first(lengths: Integers) -> list[int]:
    """Documents by falling length; equal lengths keep their order."""
    order: list[int] = np.argsort(-lengths, kind="stable").tolist()
    return order


def in_order(documents: Iterable[int], lengths: Integers, capacity: int) -> list[list[int]]:
    """Bins filled one after another: a document that does not fit into the last one begins another."""
    bins: list[list[int]] = []
    room = -1
    for document in documents:
        length = int(lengths[document])
        if length > room:
            bins.append([])
            room = capacity
        bins[-1].append(document)
        room -= length
    return bins


def first_fit(documents: Iterable[int], lengths: Integers, capacity: int) -> list[list[int]]:
    """Each of ``documents``, in the order given, into the first bin with room, or into another bin."""
    bins: list[list[int]] = []
    rooms = np.zeros(0, np.int64)
    for document in documents:
        fits = np.flatnonzero(rooms >= lengths[document])
        if not len(fits):
            bins.append([])
            rooms = np.append(rooms, capacity)
        index = int(fits[0]) if len(fits) else len(bins) - 1
        bins[index].append(document)
        rooms[index] -= lengths[document]
    return bins


def best_fit(documents: Sequence[int], lengths: Integers, capacity: int) -> list[list[int]]:
    """Each of ``documents``, in the order given, into the fullest bin with room, or into another bin."""
    bins = bins_by_best_fit(lengths[list(documents)].tolist(), capacity)
    return [[documents[index] for index in members] for members in bins]


def lightest(
    documents: Iterable[int], cost: Sequence[float] | NDArray[np.float64], bins: int, lengths: Integers, capacity: float
) -> tuple[list[list[int]], list[int]]:
    """Each of ``documents``, in the order given, into the bin of least cost that has room; and those that fit none."""
    members: list[list[int]] = [[] for _ in range(bins)]
    loads, tokens = np.zeros(bins), np.zeros(bins)
    left_over = []
    for document in documents:
        open_loads = np.where(tokens + lengths[document] <= capacity, loads, np.inf)
        index = int(open_loads.argmin())
        if open_loads[index] == np.inf:
            left_over.append(document)
            continue
        members[index].append(document)
        loads[index] += cost[document]
        tokens[index] += lengths[document]
    return members, left_over


def even_bins(lengths: Integers, cost: NDArray[np.float64], capacity: int, *, multiple: int) -> list[list[int]]:
    """Bins even in ``cost``, longest document first into the cheapest: as few as hold all, a ``multiple``."""
    count = -(-int(lengths.sum()) // (capacity * multiple)) * multiple
    while True:
        members, left_over = lightest(longest_first(lengths), cost, count, lengths, capacity)
        if not left_over:
            return members
        count += multiple


def karmarkar_karp(
    cost: Sequence[float] | NDArray[np.float64], parts: int, *, equal_size: bool = False
) -> list[list[int]]:
    """Indices of ``cost`` in ``parts`` parts of nearly equal sums: the largest differencing method.

    With ``equal_size`` parts have equally many, but for one where ``parts`` does not divide their number: neighbours in
    rising cost start in parts of their own.

    The two partial partitions that differ most within are merged, the heaviest part of one with the lightest of the
    other, until one is left (Karmarkar and Karp, 1982; for several parts as in verl, ``utils/seqlen_balancing.py``).
    """
    # (negated spread, number, parts that are not empty by falling sum)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    rising: list[int] = np.argsort(cost, kind="stable").tolist() if equal_size else [*range(len(cost))]
    width = parts if equal_size else 1
    for first in range(len(rising) % width - width, len(rising), width):
        apart = [(float(cost[index]), [index]) for index in reversed(rising[max(first, 0) : first + width])]
        if apart:
            least = apart[-1][0] if len(apart) == parts else 0.0
            heap.append((least - apart[0][0], len(heap), apart))
    heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, ours = heappop(heap)
        _, _, theirs = heappop(heap)
        shared = max(0, len(ours) + len(theirs) - parts)  # the lightest of both meet; the others meet empty parts
        mine, yours = ours[len(ours) - shared :], theirs[len(theirs) - shared :]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(mine, reversed(yours), strict=True)]
        merged += ours[: len(ours) - shared] + theirs[: len(theirs) - shared]
        merged.sort(key=lambda part: -part[0])
        least = merged[-1][0] if len(merged) == parts else 0.0
        heappush(heap, (least - merged[0][0], number, merged))
        number += 1
    full = [members for _, members in heap[0][2]] if heap else []
    return full + [[] for _ in range(parts - len(full))]


def split_evenly(descending: Sequence[int], lengths: Integers, parts: int) -> list[list[int]]:
    """Consecutive runs of ``descending``, at most ``parts``, whose largest has as few tokens as can be."""
    low, high = int(lengths[list(descending)].max()), int(lengths[list(descending)].sum())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(in_order(descending, lengths, middle)) <= parts else (middle + 1, high)
    return in_order(descending, lengths, low)


def power_of_two(count: int) -> int:
    """The least power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()
