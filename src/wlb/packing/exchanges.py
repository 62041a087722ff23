"""Balances parts by exchanging documents between the heaviest part and a light one.

Two parts exchange *subsets* of their documents: any single document and, in parts of few documents, sets of several.
If both parts have n subsets, the best of all n x n exchanges is found in O(n log n): sort the subsets of one part by
price, and for each subset of the other look up the two neighbours of the price that would make both parts equal. Every
exchange makes the heavier part lighter. The search stops when the heaviest part cannot become lighter; a part that is
heavy because of one expensive document is set aside, and the others are balanced further.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, combinations, pairwise
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Prices = NDArray[np.float64]

_MOST_SUBSETS = 301  # with several documents: 24 documents and their pairs, 12 and their triples, or all subsets of 8
_SHORTEST = 24  # documents of a part that are combined into larger subsets
_MOST_SINGLE = 512  # documents of a part that are tried alone; larger parts try this many, spread over their prices
_PARTNERS = 4  # lightest parts that the heaviest part may exchange with
_LEVEL = 0.03  # of the mean part, over (documents per part)^3: parts that differ by less count as equal
_EVEN = 1e-4  # of the mean part: once a part is set aside, the others are balanced this far
_NOTHING = np.zeros(1)


class Prefixes(NamedTuple):
    """What the documents of each group share, and a part computes once."""

    group_of: Indices  # of every document
    tokens: Indices  # of every group
    prices: Prices


class Task(NamedTuple):
    """Documents to divide into parts, and the limits of a part."""

    tokens: Indices  # of every document
    prices: Prices  # over 0
    max_tokens: int | None  # of a part
    equal_size: bool  # all parts hold equally many documents
    even: float  # share of the mean price of a part: parts that differ by less count as equal
    max_documents: int | None = None  # of a part
    padded: bool = False  # documents of a part are as long as the longest
    prefixes: Prefixes | None = None  # tokens and prices are then of the rest of each document

    def of(self, documents: Indices) -> "Task":
        """The task of these documents alone."""
        prefixes = self.prefixes and self.prefixes._replace(group_of=self.prefixes.group_of[documents])
        return self._replace(tokens=self.tokens[documents], prices=self.prices[documents], prefixes=prefixes)

    def costs(self, parts: list[Indices]) -> Prices:
        """The price of every part."""
        sizes, members = [*map(len, parts)], np.concatenate(parts)
        part_of, costs = np.repeat(np.arange(len(parts)), sizes), np.zeros(len(parts))
        if self.padded:
            np.maximum.at(costs, part_of, self.prices[members])
            return costs * sizes
        costs += np.bincount(part_of, self.prices[members], len(parts))
        if self.prefixes is not None:
            groups = len(self.prefixes.prices)
            once = np.unique(part_of * groups + self.prefixes.group_of[members])
            costs += np.bincount(once // groups, self.prefixes.prices[once % groups], len(parts))
        return costs


def sums_of(parts: Sequence[Indices], amounts: NDArray[Any]) -> NDArray[Any]:
    """The sum of ``amounts`` over the documents of each part; no part may be empty."""
    starts = list(accumulate(map(len, parts[:-1]), initial=0))
    return np.add.reduceat(amounts[np.concatenate(parts)], starts)


def members_of(documents: Indices, owners: Indices, parts: int) -> list[Indices]:
    """``documents`` by the part that owns each; -1 is none."""
    order = np.argsort(owners.astype(np.min_scalar_type(-parts)), kind="stable")  # of small integers, a radix sort
    bounds = np.searchsorted(owners[order], np.arange(parts + 1)).tolist()
    return [documents[order[first:stop]] for first, stop in pairwise(bounds)]


def owners_of(parts: list[Indices]) -> Indices:
    """The part that owns each document, if ``parts`` hold all of them."""
    owners = np.empty(sum(map(len, parts)), np.int64)
    owners[np.concatenate(parts)] = np.repeat(np.arange(len(parts)), [*map(len, parts)])
    return owners


def documents_of(parts: list[Indices], group_of: Indices) -> list[Indices]:
    """The documents of parts of groups."""
    return members_of(np.arange(len(group_of)), owners_of(parts)[group_of], len(parts))


class Exchanges:
    """Exchanges documents between ``parts`` (indices of documents) until their sums of prices are nearly equal.

    If the given ``parts`` keep to the limits of ``task``, the returned parts do too; none becomes empty, and the most
    expensive part never gets more expensive. Stops after ``tries`` attempts; with a ``goal``, also when no part costs
    more than that, or when one that does cannot become cheaper.
    """

    def __init__(self, parts: list[Indices], task: Task, tries: int, goal: float) -> None:
        self._parts, self._task, self._tries, self._goal = parts, task, tries, goal
        self._loads = sums_of(parts, task.prices)
        self._total, self._count = float(self._loads.sum()), len(parts)  # without the parts that are set aside
        whole = bool((task.prices == np.floor(task.prices)).all())
        documents = sum(map(len, parts))
        finest = max(_LEVEL * (len(parts) / documents) ** 3, task.even) * float(self._loads.mean())
        self._tolerance = max(1.0, finest) if whole else finest  # whole numbers that differ by 1 are even

    def run(self) -> list[Indices]:
        left = np.ones(len(self._parts), bool)
        while left.any() and self._tries > 0:
            heaviest = int(np.where(left, self._loads, -1.0).argmax())
            most = self._loads[heaviest]
            if most - self._loads.min() <= self._tolerance or most <= self._goal:
                break
            if not self._exchange_with_any(heaviest):
                if self._goal:
                    break
                left[heaviest] = False
                self._total, self._count = float(self._loads[left].sum()), max(1, int(left.sum()))
                if self._loads[heaviest] <= (1 + _EVEN) * self._loads.mean():
                    break
        return self._parts

    @cached_property
    def _rooms(self) -> NDArray[Any]:
        """Tokens that each part has room for, if ``task`` limits them."""
        return (self._task.max_tokens or 0) - sums_of(self._parts, self._task.tokens)

    def _exchange_with_any(self, heavy: int) -> bool:
        if len(self._parts[heavy]) == 1:
            return False
        partners = np.argsort(self._loads, kind="stable")[:_PARTNERS].tolist()
        return any(self._exchange(heavy, light) for light in partners if light != heavy)

    def _exchange(self, heavy: int, light: int) -> bool:
        """Make the best exchange between two parts; False if no exchange makes ``heavy`` lighter."""
        gap = float(self._loads[heavy] - self._loads[light])
        if gap <= self._tolerance or self._tries <= 0:
            return False
        self._tries -= 1
        if (found := self._best(heavy, light, gap)) is None:
            return False
        give, take, moved, freed = found
        ours, theirs = self._parts[heavy], self._parts[light]
        self._parts[heavy] = self._swapped(ours, give, theirs[take])
        self._parts[light] = self._swapped(theirs, take, ours[give])
        self._loads[heavy] -= moved
        self._loads[light] += moved
        if self._task.max_tokens is not None:
            self._rooms[heavy] += freed
            self._rooms[light] -= freed
        return True

    def _swapped(self, part: Indices, without: Indices, added: Indices) -> Indices:
        stays = np.ones(len(part), bool)
        stays[without] = False
        swapped = np.concatenate([part[stays], added])
        return swapped[np.argsort(self._task.prices[swapped], kind="stable")]

    def _best(self, heavy: int, light: int, gap: float) -> tuple[Indices, Indices, float, int] | None:
        """Places of both parts to exchange, so that a price in (0, ``gap``) moves; the price and tokens moved."""
        ours, theirs = self._parts[heavy], self._parts[light]
        gives, takes = (_subsets(len(part), self._task.equal_size) for part in (ours, theirs))
        given, taken = _sums(self._task.prices[ours], gives), _sums(self._task.prices[theirs], takes)
        order = taken.argsort(kind="stable")
        taken = taken[order]
        limited, most = self._task.max_tokens is not None, self._task.max_documents
        if limited:
            given_tokens = _sums(self._task.tokens[ours], gives)
            taken_tokens = _sums(self._task.tokens[theirs], takes)[order]
        mean = self._total / self._count
        # First aim to bring one part to the mean and the other no further than that; then to make both equal.
        for aim in (min(float(self._loads[heavy]) - mean, mean - float(self._loads[light])), gap / 2):
            wanted = given - aim
            above = taken.searchsorted(wanted)
            neighbours = np.array((np.minimum(above, len(order) - 1), np.maximum(above - 1, 0)))
            distance = np.abs(taken[neighbours] - wanted)
            if limited:
                more = given_tokens - taken_tokens[neighbours]
                distance[(more > self._rooms[light]) | (more < -self._rooms[heavy])] = np.inf
            if most is not None:
                documents = (gives >= 0).sum(axis=0) - (takes >= 0).sum(axis=0)[order][neighbours]
                distance[(documents > most - len(theirs)) | (documents < len(ours) - most)] = np.inf
            best = int(distance.argmin())
            if distance.flat[best] < min(aim, gap - aim) - self._tolerance / 2:  # otherwise nothing is gained
                give, take = best % len(given), int(neighbours.flat[best])
                freed = int(given_tokens[give] - taken_tokens[take]) if limited else 0
                ours, theirs = gives[:, give], takes[:, order[take]]
                return ours[ours >= 0], theirs[theirs >= 0], float(given[give] - taken[take]), freed
        return None


def _sums(values: NDArray[Any], subsets: Indices) -> Prices:
    """The sum of ``values`` over each subset."""
    sums: Prices = np.concatenate((values, _NOTHING)).take(subsets).sum(axis=0)  # -1 points to nothing
    return sums


@lru_cache(maxsize=1024)
def _subsets(documents: int, equal_size: bool) -> Indices:
    """Subsets of places as columns, shape (most places, subsets); -1 fills short columns.

    The empty subset, every single place, and as many larger subsets of the first places as are affordable; with
    ``equal_size`` only single places.
    """
    single = range(documents) if documents <= _MOST_SINGLE else np.linspace(0, documents - 1, _MOST_SINGLE).astype(int)
    if equal_size:
        return np.array([single])
    few = min(documents, _SHORTEST)
    largest, count = 1, 1 + few
    while largest < few and count + comb(few, largest + 1) <= _MOST_SUBSETS:
        largest += 1
        count += comb(few, largest)
    rows: list[tuple[int, ...]] = [(), *((int(place),) for place in single)]
    for size in range(2, largest + 1):
        rows += combinations(range(few), size)
    places = np.full((largest, len(rows)), -1)
    for column, row in enumerate(rows):
        places[: len(row), column] = row
    return places
