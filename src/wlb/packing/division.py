"""Divides documents into parts of like price, each under a limit of tokens.

1. documents go dearest first into the cheapest part with room (in rounds of one for every part with ``equal_size``);
2. parts exchange documents until the heaviest cannot become lighter (``wlb.packing.levelling``).

Where documents do not fit so, the first step is repeated for tokens instead of prices, then by best fit, and at last
searched for. Few documents are also divided from another start (``wlb.packing.bins.differenced``), and the better
division is taken.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from itertools import pairwise

import numpy as np

from wlb.errors import UserError
from wlb.lightest import into_lightest
from wlb.packing.bins import best_fit, differenced, fitting_bins, longest_first_bins
from wlb.packing.levelling import Indices, Task, level, sums_of

FREE = float(np.finfo(np.float64).tiny)  # what costs nothing: exchanges want prices over 0
_FEW = 256  # documents: with so few, exchanges may end early, and a second start is tried
_FEW_OF_PART = 6  # the same of a part
_FEW_PARTS = 64  # of more documents than _FEW
# Exchanges end when differencing, which takes so much longer the more documents there are, would have ended as well:
_SWAPS = 12  # documents for each swap between parts of equal size
_EXCHANGES = 64  # documents times parts for each exchange between others


def divided(task: Task, parts: int, start: list[Indices] | None = None) -> list[Indices]:
    """``parts`` parts, from ``start`` where given. Raises ``UserError`` where the documents are not found to fit."""
    check_possible(task, parts)
    if parts in (1, len(task.tokens)):
        return np.array_split(np.arange(len(task.tokens)), parts)
    start = start or _start(task, parts)
    if start is None:
        size = len(task.tokens) // parts if task.equal_size else None
        start = fitting_bins(task.tokens.tolist(), parts, task.most_tokens or 0, size)
    if start is None:
        raise _too_many(task, parts)
    if task.prices.min() == task.prices.max() and max(map(len, start)) == -(-len(task.tokens) // parts):
        return start  # as even as it gets
    starts = [start]
    few = len(task.tokens) <= _FEW or (parts <= _FEW_PARTS and len(task.tokens) <= _FEW_OF_PART * parts)
    if few and not task.equal_size and (other := _differenced(task, parts)):
        starts.append(other)
    if not task.even:  # for ranks each slot is levelled by itself
        starts = [levelled(start, task) for start in starts]
    return min(starts, key=lambda found: float(sums_of(found, task.prices).max()))


def fewest(task: Task, multiple: int) -> tuple[int, list[Indices] | None]:
    """The smallest number of parts found, a multiple of ``multiple``, in which documents fit, and how."""
    documents, most = len(task.tokens), task.most_tokens
    if most is None:
        raise UserError("parts = None is the fewest parts under max_tokens; give parts, max_tokens or ranks")
    least = max(1, -(-int(task.tokens.sum()) // most), int((task.tokens > most // 2).sum()))
    numbers = [*range(-(-least // multiple) * multiple, documents, multiple)]
    if task.equal_size:
        numbers = [number for number in numbers if documents % number == 0]
    start_of = cache(lambda number: _start(task, number))
    if numbers and (start := start_of(numbers[0])):
        return numbers[0], start
    enough = documents if task.equal_size else len(best_fit(sorted(task.tokens.tolist(), reverse=True), most))
    numbers = numbers[1 : bisect_left(numbers, enough) + 1]
    place = bisect_left(numbers, True, key=lambda number: start_of(number) is not None)
    if place < len(numbers):
        return numbers[place], start_of(numbers[place])
    return -(-max(documents, 1) // multiple) * multiple, None


def _start(task: Task, parts: int) -> list[Indices] | None:
    """A start that keeps to the limit; None where none is found without a search."""
    found = _placed(task, parts) or _fitted(task, parts)
    if found or task.equal_size or task.most_tokens is None:
        return found
    return longest_first_bins(task.tokens, parts, task.most_tokens)


def _placed(task: Task, parts: int) -> list[Indices] | None:
    """A start that balances prices, each document in the cheapest part with room; None where it breaks the limit."""
    if task.equal_size:
        return _differenced(task, parts)
    order = np.argsort(-task.prices, kind="stable")
    rooms = [task.most_tokens or int(task.tokens.sum())] * parts
    owners, _ = into_lightest(task.tokens[order].tolist(), task.prices[order].tolist(), [0.0] * parts, rooms)
    return None if -1 in owners else members_of(order, np.array(owners), parts)


def members_of(documents: Indices, owners: Indices, parts: int) -> list[Indices]:
    """``documents`` by the part that owns each; -1 is none."""
    order = np.argsort(owners.astype(np.min_scalar_type(-parts)), kind="stable")  # of small integers, a radix sort
    bounds = np.searchsorted(owners[order], np.arange(parts + 1)).tolist()
    return [documents[order[first:stop]] for first, stop in pairwise(bounds)]


def _fitted(task: Task, parts: int) -> list[Indices] | None:
    """A start that balances tokens, so that it keeps to the limit if anything does; None where it does not."""
    lengths = _of_tokens(task)
    start = _placed(lengths, parts)
    start = start and levelled(start, lengths, goal=float(task.most_tokens or 0))
    return start if start and _fits(start, task) else None


def _differenced(task: Task, parts: int) -> list[Indices] | None:
    """A start by largest differencing; None where it breaks the limit, or leaves a part empty."""
    start = [np.array(part, np.int64) for part in differenced(task.prices, parts, equal_size=task.equal_size)]
    return start if all(map(len, start)) and _fits(start, task) else None


def levelled(start: list[Indices], task: Task, goal: float = 0.0, most_tries: int = 2**31) -> list[Indices]:
    """``start`` with exchanges, as many as are worth their time, until the dearest part is at most ``goal``."""
    documents, parts = sum(map(len, start)), len(start)
    tries = documents // _SWAPS if task.equal_size else min(documents * parts // _EXCHANGES, most_tries)
    if np.array_equal(task.prices, task.tokens):  # what makes the dearest part cheaper keeps it within the limit, too
        task = task._replace(most_tokens=None)
    return level(start, task, tries, goal)


def _fits(parts: list[Indices], task: Task) -> bool:
    return task.most_tokens is None or bool(sums_of(parts, task.tokens).max() <= task.most_tokens)


def _of_tokens(task: Task) -> Task:
    """The same documents, whose prices are their tokens, without a limit."""
    prices = np.maximum(task.tokens.astype(np.float64), FREE)
    return task._replace(prices=prices, most_tokens=None, even=0.0)


def check_possible(task: Task, parts: int, things: str = "documents", places: str = "parts") -> None:
    """Raises ``UserError`` where counting alone tells that no division exists."""
    documents, most = len(task.tokens), task.most_tokens
    if documents < parts:
        uneven = " and equal_size = False" if task.equal_size and documents else ""
        raise UserError(
            f'{documents} {things} cannot fill {parts} {places}; give more, or set empty = "allowed"{uneven}'
        )
    if task.equal_size and documents % parts:
        raise UserError(
            f"{documents} {things} are no multiple of {parts} {places}; add some, or set equal_size = False"
        )
    if most is not None and int(task.tokens.sum()) > parts * most:
        raise _too_many(task, parts)


def _too_many(task: Task, parts: int) -> UserError:
    """The refusal of documents that do not fit, with what would do where that is known."""
    tokens, most, ways = task.tokens.tolist(), task.most_tokens or 1, []
    even = _placed(_of_tokens(task), parts)
    if max(tokens) < most and even:  # others may have been cut to it
        ways.append(f"max_tokens ({sums_of(even, task.tokens).max()} would do)")
    if not task.equal_size:
        ways.append(f"parts ({len(best_fit(sorted(tokens, reverse=True), most))} would do)")
    raised = " or ".join(ways) or "max_tokens or parts"
    return UserError(
        f"found no way to divide {sum(tokens)} tokens into {parts} parts of max_tokens = {most}; raise {raised}"
    )
