"""Bin packing that several policies share: in order, by fit, or into the lightest bin."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.lightest import into_lightest
from wlb.packing.bins import best_fit as bins_by_best_fit

Integers = NDArray[np.int64]


def longest_first(lengths: Integers) -> list[int]:
    """Documents by decreasing length; equal lengths keep their order."""
    order: list[int] = np.argsort(-lengths, kind="stable").tolist()
    return order


def in_order(documents: Iterable[int], lengths: Integers, capacity: int) -> list[list[int]]:
    """Bins filled one after another: a document that does not fit into the last bin starts a new one."""
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
    """Put each of ``documents``, in order, into the first bin with room, or into a new bin."""
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
    """Put each of ``documents``, in order, into the fullest bin with room, or into a new bin."""
    bins = bins_by_best_fit(lengths[list(documents)].tolist(), capacity)
    return [[documents[index] for index in members] for members in bins]


def lightest(
    documents: Iterable[int], cost: Sequence[float] | NDArray[np.float64], bins: int, lengths: Integers, capacity: int
) -> tuple[list[list[int]], list[int]]:
    """Put each of ``documents``, in order, into the cheapest bin with room; also return documents that fit none."""
    order = list(documents)
    members: list[list[int]] = [[] for _ in range(bins)]
    left_over: list[int] = []
    prices = np.asarray(cost, np.float64)[order].tolist()
    places = into_lightest(lengths[order].tolist(), prices, [0.0] * bins, [capacity] * bins)
    for document, place in zip(order, places.tolist(), strict=True):
        (left_over if place < 0 else members[place]).append(document)
    return members, left_over


def even_bins(
    lengths: Integers, cost: NDArray[np.float64], capacity: int, *, multiple: int, fewest: int = 1
) -> list[list[int]]:
    """Bins even in ``cost``, filled longest document first into the cheapest bin.

    Uses as few bins as hold all, but a ``multiple`` and at least ``fewest``.
    """
    count = -(-max(fewest, -(-int(lengths.sum()) // capacity)) // multiple) * multiple
    while True:
        members, left_over = lightest(longest_first(lengths), cost, count, lengths, capacity)
        if not left_over:
            return members
        count += multiple


def split_evenly(descending: Sequence[int], lengths: Integers, parts: int) -> list[list[int]]:
    """At most ``parts`` consecutive runs of ``descending`` that minimise the tokens of the largest run."""
    low, high = int(lengths[list(descending)].max()), int(lengths[list(descending)].sum())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(in_order(descending, lengths, middle)) <= parts else (middle + 1, high)
    return in_order(descending, lengths, low)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()
