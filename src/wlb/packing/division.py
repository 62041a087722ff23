"""Divides documents into parts of similar price, each under a limit of tokens.

1. Put each document, most expensive first, into the cheapest part with room (with ``equal_size`` in rounds of one
   document for every part).
2. Exchange documents between parts until the heaviest part cannot become lighter (``wlb.packing.exchanges``).

If the documents do not fit this way, the first step is repeated with tokens instead of prices, then with best fit, and
finally with a search. Few documents are also divided from a second start (``wlb.packing.bins.differenced``), and the
better division is kept.
"""

from bisect import bisect_left
from functools import cache

import numpy as np

from wlb.errors import UserError
from wlb.lightest import into_lightest
from wlb.packing.bins import best_fit, differenced, fitting_bins, longest_first_bins
from wlb.packing.exchanges import Exchanges, Indices, Task, members_of, sums_of

FREE = float(np.finfo(np.float64).tiny)  # the price of a free document: exchanges need prices over 0
_FEW = 256  # documents: up to this many get a second start, as exchanges may get stuck early
_FEW_OF_PART = 6  # documents of a part: the same
_FEW_PARTS = 64  # parts: the most for which _FEW_OF_PART counts
# These limit exchanges to about the time that differencing would take:
_SWAPS = 12  # documents for each swap between parts of equal size
_EXCHANGES = 64  # documents times parts for each exchange between others


def divided(task: Task, parts: int, start: list[Indices] | None = None) -> list[Indices]:
    """Divide the documents into ``parts``, from ``start`` if given. Raises ``UserError`` if no way to fit is found."""
    check_possible(task, parts)
    if parts in (1, len(task.tokens)):
        return np.array_split(np.arange(len(task.tokens)), parts)
    start = start or started(task, parts)
    if start is None:
        size = len(task.tokens) // parts if task.equal_size else task.max_documents
        start = fitting_bins(task.tokens.tolist(), parts, task.max_tokens or 0, size)
    if start is None:
        raise _too_many(task, parts)
    if task.prices.min() == task.prices.max() and max(map(len, start)) == -(-len(task.tokens) // parts):
        return start  # as even as it gets
    starts = [start]
    few = len(task.tokens) <= _FEW or (parts <= _FEW_PARTS and len(task.tokens) <= _FEW_OF_PART * parts)
    if few and not task.equal_size and (other := _differenced(task, parts)):
        starts.append(other)
    if not task.even:  # with ranks, each slot is evened by itself
        starts = [evened(start, task) for start in starts]
    return min(starts, key=lambda found: float(sums_of(found, task.prices).max()))


def fewest(task: Task, multiple: int) -> tuple[int, list[Indices] | None]:
    """The smallest number of parts found, a multiple of ``multiple``, in which documents fit, and how."""
    documents, most = len(task.tokens), task.max_tokens
    if most is None:
        raise UserError("parts = None means the fewest parts under max_tokens; give parts, max_tokens or ranks")
    least = max(1, -(-int(task.tokens.sum()) // most), int((task.tokens > most // 2).sum()))
    numbers = [*range(-(-least // multiple) * multiple, documents, multiple)]
    if task.equal_size:
        numbers = [number for number in numbers if documents % number == 0]
    start_of = cache(lambda number: started(task, number))
    if numbers and (start := start_of(numbers[0])):
        return numbers[0], start
    enough = documents if task.equal_size else number_of_bins(task)
    numbers = numbers[1 : bisect_left(numbers, enough) + 1]
    place = bisect_left(numbers, True, key=lambda number: start_of(number) is not None)
    if place < len(numbers):
        return numbers[place], start_of(numbers[place])
    return -(-max(documents, 1) // multiple) * multiple, None


def number_of_bins(task: Task) -> int:
    """The number of parts that best fit needs."""
    return len(best_fit(sorted(task.tokens.tolist(), reverse=True), task.max_tokens or 1, task.max_documents))


def started(task: Task, parts: int) -> list[Indices] | None:
    """A start that keeps to the limit; None where none is found without a search."""
    found = _placed(task, parts) or _fitted(task, parts)
    if found or task.equal_size or task.max_tokens is None:
        return found
    return longest_first_bins(task.tokens, parts, task.max_tokens, task.max_documents)


def _placed(task: Task, parts: int) -> list[Indices] | None:
    """A start that balances prices, each document in the cheapest part with room; None where it breaks the limit."""
    if task.equal_size:
        return _differenced(task, parts)
    order = np.argsort(-task.prices, kind="stable")
    rooms = [task.max_tokens or int(task.tokens.sum())] * parts
    tokens, prices = task.tokens[order].tolist(), task.prices[order].tolist()
    owners = into_lightest(tokens, prices, [0.0] * parts, rooms, most=task.max_documents)
    return None if -1 in owners else members_of(order, owners, parts)


def _fitted(task: Task, parts: int) -> list[Indices] | None:
    """A start that balances tokens, the best chance to keep to the limit; None if it does not."""
    lengths = _of_tokens(task)
    start = _placed(lengths, parts)
    start = start and evened(start, lengths, goal=float(task.max_tokens or 0))
    return start if start and _fits(start, task) else None


def _differenced(task: Task, parts: int) -> list[Indices] | None:
    """A start by largest differencing; None if it breaks the limit or leaves a part empty."""
    start = [np.array(part, np.int64) for part in differenced(task.prices, parts, equal_size=task.equal_size)]
    return start if all(map(len, start)) and _fits(start, task) else None


def evened(start: list[Indices], task: Task, goal: float = 0.0, most_tries: int = 2**31) -> list[Indices]:
    """Improve ``start`` by as many exchanges as are worth their time, until no part costs over ``goal``."""
    documents, parts = sum(map(len, start)), len(start)
    tries = documents // _SWAPS if task.equal_size else min(documents * parts // _EXCHANGES, most_tries)
    if np.array_equal(task.prices, task.tokens):  # then cheaper parts are also shorter
        task = task._replace(max_tokens=None)
    return Exchanges(start, task, tries, goal).run()


def _fits(parts: list[Indices], task: Task) -> bool:
    if task.max_documents is not None and max(map(len, parts)) > task.max_documents:
        return False
    return task.max_tokens is None or bool(sums_of(parts, task.tokens).max() <= task.max_tokens)


def _of_tokens(task: Task) -> Task:
    """The same documents priced by their tokens, without a limit."""
    prices = np.maximum(task.tokens.astype(np.float64), FREE)
    return task._replace(prices=prices, max_tokens=None, even=0.0)


def check_possible(task: Task, parts: int, things: str = "documents", places: str = "parts") -> None:
    """Raise ``UserError`` if counting alone shows that no division exists."""
    documents, most = len(task.tokens), task.max_tokens
    if documents < parts:
        uneven = " and equal_size = False" if task.equal_size and documents else ""
        raise UserError(
            f'{documents} {things} cannot fill {parts} {places}; give more, or set empty = "allowed"{uneven}'
        )
    if task.equal_size and documents % parts:
        raise UserError(
            f"{documents} {things} are not a multiple of {parts} {places}; add some, or set equal_size = False"
        )
    if task.max_documents is not None and documents > parts * task.max_documents:
        raise UserError(
            f"{documents} {things} do not fit in {parts} {places} of max_documents = {task.max_documents}; raise "
            f"{places} to {-(-documents // task.max_documents)} or max_documents to {-(-documents // parts)}"
        )
    if most is not None and int(task.tokens.sum()) > parts * most:
        raise _too_many(task, parts)


def _too_many(task: Task, parts: int) -> UserError:
    """The error for documents that do not fit, with a remedy if one is known."""
    tokens, most, ways = task.tokens.tolist(), task.max_tokens or 1, []
    even = _placed(_of_tokens(task), parts)
    if max(tokens) < most and even:  # lengths may have been capped at the limit
        ways.append(f"max_tokens ({sums_of(even, task.tokens).max()} would do)")
    if not task.equal_size:
        ways.append(f"parts ({number_of_bins(task)} would do)")
    raised = " or ".join(ways) or "max_tokens or parts"
    return UserError(
        f"found no way to divide {sum(tokens)} tokens into {parts} parts of max_tokens = {most}; raise {raised}"
    )
