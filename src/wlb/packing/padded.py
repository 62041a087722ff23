"""Divides documents for models that pad: a micro-batch has its number of documents times the longest of them.

Some best division takes the documents by length: if parts of any division, in the order of their longest documents, are
filled anew with the sorted documents, the longest document of each stays as long or gets shorter. So only the sizes
of these runs are searched, by bisection for the lowest price of a run at which there are few enough.
"""

import math

import numpy as np

from wlb.errors import UserError
from wlb.packing.division import check_possible
from wlb.packing.exchanges import Indices, Task

_HALVINGS = 12  # of an interval as long as its lower end: prices are found within 0.03%


def padded_parts(task: Task, parts: int, ranks: int) -> list[Indices]:
    """Divide the documents into ``parts``, longest first, so that the dearest is as cheap as it can be.

    With ``ranks`` under ``parts``, a slot with an outlier is only as dear as this outlier, and the others are cheaper.
    """
    check_possible(task._replace(max_tokens=None), parts)
    if task.equal_size:
        task = task._replace(max_documents=len(task.tokens) // parts)
    order, most = _sorted(task)
    prices, ends = task.prices[order].tolist(), [0]
    if _runs(prices, most, 0, parts, math.inf) is None:
        enough = "equal_size = False" if task.equal_size else f"parts ({fewest_padded(task, 1)[0]} would do)"
        raise UserError(f"padded documents do not fit in {parts} parts of max_tokens = {task.max_tokens}; set {enough}")
    while (left := parts + 1 - len(ends)) > 0:
        longest = prices[ends[-1]]
        low = high = max(longest, sum(prices[ends[-1] :]) / left)
        while _runs(prices, most, ends[-1], left, high) is None:
            low, high = high, 2 * high
        for _ in range(_HALVINGS if high > low else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if _runs(prices, most, ends[-1], left, middle) else (middle, high)
        found = _runs(prices, most, ends[-1], left, high) or []
        ends += found[:ranks] if high == longest else found
    return np.split(order, ends[1:-1])


def fewest_padded(task: Task, multiple: int) -> tuple[int, None]:
    """The smallest number of parts, a multiple of ``multiple``, in which padded documents fit."""
    documents, (_, most), first, parts = len(task.tokens), _sorted(task), 0, 0
    if task.equal_size:
        fits = (n for n in range(multiple, documents, multiple) if documents % n == 0 and documents // n <= most[0])
        return next(fits, -(-max(documents, 1) // multiple) * multiple), None
    while first < documents:
        first, parts = first + most[first], parts + 1
    return -(-max(parts, 1) // multiple) * multiple, None


def _sorted(task: Task) -> tuple[Indices, list[int]]:
    """Documents, longest first, and the most documents of a part that begins with each."""
    order = np.argsort(-task.tokens, kind="stable")
    most = np.full(len(order), task.max_documents or len(order))
    if task.max_tokens is not None:
        most = np.minimum(most, task.max_tokens // np.maximum(1, task.tokens[order]))
    return order, most.tolist()


def _runs(prices: list[float], most: list[int], first: int, parts: int, price: float) -> list[int] | None:
    """The ends of ``parts`` non-empty runs from ``first`` on, none over ``price``; None if they leave documents."""
    ends = []
    for later in range(parts - 1, -1, -1):
        first += max(1, int(min(price / prices[first], most[first], len(prices) - first - later)))
        ends.append(first)
    return ends if first == len(prices) else None
