"""Divides a given set of documents into parts of equal work, for trainers that choose the documents themselves.

Packers decide which step trains a document. Where that is decided already, as for the rollouts of a reinforcement
learning step or the global batch of another data loader, only the division is left, and nothing has to be remembered:

1. documents go dearest first into the cheapest part with room, or in rounds of one document for every part where all
   are to hold equally many;
2. parts exchange documents until the heaviest cannot become lighter (``wlb.packing.levelling``).

Where documents do not fit so, the first step is repeated for tokens instead of prices, and at last searched for. Few
documents are divided a second time from another start (``wlb.packing.differencing``), and the better division is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.packing.bins import fitting_bins, into_lightest
from wlb.packing.differencing import differenced
from wlb.packing.levelling import Indices, Limits, Prices, level
from wlb.packing.phases import level_phases, slowest_sum

if TYPE_CHECKING:
    from wlb.workload.base import DocumentPrices
    from wlb.workload.phases import DocumentPhases

_MOST_TOKENS = 2**63 - 1  # of all documents together, which are summed as 64-bit integers
_FEW = 6  # documents of a part: with so few, exchanges may end early, and a second start is tried
_FEW_PARTS = 64


def balance(
    lengths: Sequence[int] | NDArray[np.integer[Any]],
    parts: int | None,
    max_tokens: int | None = None,
    equal_size: bool = False,
    multiple_of: int = 1,
    *,
    workload: DocumentPrices | Literal["tokens"] | None = None,
    phases: DocumentPhases | None = None,
) -> list[list[int]]:
    """Divide documents of ``lengths`` tokens into ``parts`` micro-batches whose dearest is as cheap as can be found.

    Stateless, and the same for the same arguments. No part is empty.

    Args:
        lengths: Tokens of each document.
        parts: Number of parts; None is the fewest that ``max_tokens`` allows.
        max_tokens: The most tokens of a part; None is any number.
        equal_size: All parts hold the same number of documents.
        multiple_of: The number of parts is raised to a multiple of this, such as the number of data-parallel ranks, so
            that every rank runs equally many.
        workload: Prices of documents, by default those of a 7B model on H100: predicted seconds of forward and backward
            with attention, ``make_workload("7b", "h100")``. Give ``make_workload`` of your model, or ``"tokens"`` where
            the price is the length, as for a model without attention.
        phases: What documents cost before the language model. Where these are synchronised, the sum over phases of the
            dearest part is kept low, and is never more than without them; ``memory_tokens`` count against
            ``max_tokens``.

    Returns:
        For every part the indices of its documents, ascending.

    Raises:
        UserError: A length that is no whole number, or a length or size below 1; 2**63 tokens or more together; a
            ``workload`` of another kind, such as the name of a model; ``parts`` and ``max_tokens`` both None; fewer
            documents than parts; with ``equal_size``, a number of documents that is no multiple of the parts; a
            document over ``max_tokens``, or documents for which no ``parts`` parts of ``max_tokens`` tokens are found.
    """
    tokens = _checked(lengths)
    task = _Task(tokens, _prices(tokens, workload), _positive("max_tokens", max_tokens), equal_size)
    multiple = _positive("multiple_of", multiple_of) or 1
    number = None if parts is None else _rounded_up(_positive("parts", parts) or 1, multiple)
    members = _in_phases(task, number, multiple, phases) if phases else _parts(task, number, multiple)
    return [sorted(part.tolist()) for part in members]


def _parts(task: _Task, parts: int | None, multiple: int) -> list[Indices]:
    return _fewest(task, multiple) if parts is None else _divided(task, parts)


def _in_phases(task: _Task, parts: int | None, multiple: int, phases: DocumentPhases) -> list[Indices]:
    """Balanced over all phases together; where ranks wait between them, levelled from there or from without phases."""
    phases.check(len(task.tokens))
    documents = np.column_stack([np.arange(len(task.tokens)), np.zeros_like(task.tokens), task.tokens])
    costs = np.column_stack([task.prices, phases.of(documents)])
    together = task._replace(tokens=phases.held_tokens(documents), prices=costs.sum(axis=1))
    members = _parts(together, parts, multiple)
    if not phases.synchronised:
        return members
    starts = [members, _divided(together._replace(prices=task.prices), len(members))]
    levelled = (level_phases(s, costs, together.tokens, task.most_tokens, equal_size=task.equal_size) for s in starts)
    return min(levelled, key=partial(slowest_sum, costs=costs))


class _Task(NamedTuple):
    tokens: Indices
    prices: Prices
    most_tokens: int | None
    equal_size: bool


def _divided(task: _Task, parts: int) -> list[Indices]:
    _check_possible(task, parts)
    if parts in (1, len(task.tokens)):
        return np.array_split(np.arange(len(task.tokens)), parts)
    start = _placed(task, parts)
    if start is not None and task.prices.min() == task.prices.max():
        return start  # as even as it gets
    start = start or _fitted(task, parts)
    if start is None:
        size = len(task.tokens) // parts if task.equal_size else None
        start = fitting_bins(task.tokens.tolist(), parts, task.most_tokens or 0, size)
    if start is None:
        raise UserError(
            f"found no way to divide {len(task.tokens)} documents of {task.tokens.sum()} tokens into {parts} parts of "
            f"max_tokens = {task.most_tokens}; raise max_tokens or parts"
        )
    divided = _levelled(start, task)
    other = _differenced(task, parts)
    return divided if other is None else min(divided, _levelled(other, task), key=lambda m: _most(m, task.prices))


def _fewest(task: _Task, multiple: int) -> list[Indices]:
    """The smallest number of parts, a multiple of ``multiple``, in which the documents are found to fit."""
    if task.most_tokens is None:
        raise UserError("parts = None is the fewest parts that max_tokens allows; give parts or max_tokens")
    parts = _rounded_up(-(-int(task.tokens.sum()) // task.most_tokens), multiple)
    while parts < len(task.tokens):
        if not task.equal_size or len(task.tokens) % parts == 0:
            _check_possible(task, parts)
            start = _placed(task, parts) or _fitted(task, parts)
            if start is not None:
                return _levelled(start, task)
        parts += multiple
    return _divided(task, parts)


def _placed(task: _Task, parts: int) -> list[Indices] | None:
    """A start that balances prices; None where it would break the limit."""
    return _dealt(task, parts) if task.equal_size else _dearest_first(task, parts)


def _dearest_first(task: _Task, parts: int) -> list[Indices] | None:
    """Each document in the cheapest part that has room; None where one finds none."""
    order = np.argsort(-task.prices, kind="stable").tolist()
    tokens, prices = task.tokens.tolist(), task.prices.tolist()
    rooms = [task.most_tokens or sum(tokens)] * parts
    owners = into_lightest([tokens[i] for i in order], [prices[i] for i in order], [0.0] * parts, rooms)
    members: list[list[int]] = [[] for _ in range(parts)]
    for document, owner in zip(order, owners, strict=True):
        members[owner].append(document)
    return None if -1 in owners else [np.array(part, np.int64) for part in members]


def _fitted(task: _Task, parts: int) -> list[Indices] | None:
    """A start that balances tokens, so that it keeps to the limit if anything does; None where it does not."""
    lengths = task._replace(prices=task.tokens.astype(np.float64), most_tokens=None)
    start = _placed(lengths, parts)
    start = start and _levelled(start, lengths)
    return start if start and _most(start, task.tokens) <= (task.most_tokens or 0) else None


def _dealt(task: _Task, parts: int) -> list[Indices] | None:
    """In rounds of falling price, the dearest to the cheapest part; None where that breaks the limit."""
    order = np.argsort(-task.prices, kind="stable")
    loads = np.zeros(parts)
    members: list[list[int]] = [[] for _ in range(parts)]
    for first in range(0, len(order), parts):
        documents = order[first : first + parts]
        cheapest_first = np.argsort(loads, kind="stable")[: len(documents)]
        loads[cheapest_first] += task.prices[documents]
        for part, document in zip(cheapest_first.tolist(), documents.tolist(), strict=True):
            members[part].append(document)
    return _within(task, [np.array(part, np.int64) for part in members])


def _differenced(task: _Task, parts: int) -> list[Indices] | None:
    """Another start, where there are few documents; None where there are many, or it breaks a limit."""
    if task.equal_size or parts > _FEW_PARTS or len(task.tokens) > _FEW * parts:
        return None
    start = [np.array(part, np.int64) for part in differenced(task.prices, parts)]
    return _within(task, start) if all(len(part) for part in start) else None


def _within(task: _Task, start: list[Indices]) -> list[Indices] | None:
    return start if task.most_tokens is None or _most(start, task.tokens) <= task.most_tokens else None


def _levelled(start: list[Indices], task: _Task) -> list[Indices]:
    # Where prices are tokens, what makes the dearest part cheaper keeps it within the limit, too.
    most = None if np.array_equal(task.prices, task.tokens) else task.most_tokens
    return level(start, task.prices, task.tokens, Limits(most, task.equal_size))


def _most(parts: list[Indices], amounts: Indices | Prices) -> float:
    return max(float(amounts[part].sum()) for part in parts)


def _check_possible(task: _Task, parts: int) -> None:
    documents, tokens = len(task.tokens), int(task.tokens.sum())
    if documents < parts:
        raise UserError(
            f"{documents} documents cannot fill {parts} parts, of which none may be empty; give more or ask for fewer"
        )
    if task.equal_size and documents % parts:
        raise UserError(
            f"{documents} documents cannot be divided into {parts} parts of equally many; equal_size needs a multiple "
            f"of {parts}: add or leave out documents, or set equal_size = False"
        )
    if task.most_tokens is None:
        return
    longest = int(task.tokens.argmax())
    if task.tokens[longest] > task.most_tokens:
        raise UserError(
            f"document {longest} has {task.tokens[longest]} tokens, over max_tokens = {task.most_tokens}; raise "
            "max_tokens, or cut the document first (wlb.documents.overlong)"
        )
    if tokens > parts * task.most_tokens:
        raise UserError(
            f"{tokens} tokens do not fit into {parts} parts of max_tokens = {task.most_tokens}; raise max_tokens to at "
            f"least {-(-tokens // parts)}, or ask for at least {-(-tokens // task.most_tokens)} parts"
        )


def _checked(lengths: Sequence[int] | NDArray[np.integer[Any]]) -> Indices:
    try:
        array = np.asarray(lengths)
    except ValueError:
        raise UserError("lengths to balance are ragged; give one number of tokens for each document") from None
    if array.ndim != 1 or array.size == 0:
        raise UserError("lengths to balance must be a list of at least one number of tokens")
    # NumPy makes integers of booleans among integers, and floats or objects of integers over 64 bits.
    if array.dtype.kind not in "iu" or (isinstance(lengths, list | tuple) and bool in set(map(type, lengths))):
        _check_whole(lengths, array.dtype)
    tokens = [int(length) for length in (lengths if array.dtype.kind == "f" else array.tolist())]
    if (shortest := min(tokens)) < 1:
        raise UserError(f"document {tokens.index(shortest)} has {shortest} tokens; lengths must be at least 1")
    if (total := sum(tokens)) > _MOST_TOKENS:
        raise UserError(
            f"the documents have {total} tokens together, over {_MOST_TOKENS}; give lengths in tokens, and other costs "
            "as workload"
        )
    return np.array(tokens, np.int64)


def _check_whole(lengths: Iterable[Any], dtype: np.dtype[Any]) -> None:
    for document, length in enumerate(lengths):
        if isinstance(length, bool) or not isinstance(length, int | np.integer):
            kind = "bool" if isinstance(length, bool) else dtype
            raise UserError(
                f"document lengths must be whole numbers of tokens, not {kind} (document {document} is "
                f"{str(length)[:40]}); convert them to int"
            )


def _prices(tokens: Indices, workload: DocumentPrices | Literal["tokens"] | None) -> Prices:
    if isinstance(workload, str) and workload == "tokens":
        return tokens.astype(np.float64)
    if workload is None:
        from wlb.workload import default_workload  # loaded where it is needed

        workload = default_workload()
    if not hasattr(workload, "document_seconds"):
        raise UserError(
            f'workload = {repr(workload)[:40]} has no prices; give make_workload("7b") or that of another model, or '
            '"tokens"'
        )
    prices = np.asarray(workload.document_seconds(tokens), np.float64)
    if prices.shape != tokens.shape or not (prices > 0).all() or not np.isfinite(prices).all():
        raise UserError("workload.document_seconds must give every document a finite price over 0")
    return prices


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
        raise UserError(f"{name} = {value!r} is not a whole number of at least 1")
    return value if value is None else int(value)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
