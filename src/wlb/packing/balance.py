"""Divides a given set of documents into parts of equal work, for trainers that choose the documents themselves.

Packers decide which step trains a document. Where that is decided already, as for the rollouts of a reinforcement
learning step or the global batch of another data loader, only the division is left, and nothing has to be remembered:

1. documents go dearest first into the cheapest part with room, or in rounds of one document for every part where all
   are to hold equally many;
2. parts exchange documents until the heaviest cannot become lighter (``wlb.packing.levelling``).

Where documents do not fit so, the first step is repeated for tokens instead of prices, and at last searched for. Few
documents are divided a second time from another start (``wlb.packing.bins.differenced``), and the better division is
taken, which is then never less even than that start.

For ``ranks`` that wait for one another after every micro-batch, those of like price run at the same time. A document
dearer than a mean micro-batch makes a *slot* (the micro-batches of all ranks that run at the same time) as long as
itself, so the other ranks of the slot are filled up to it, and the later slots are the shorter for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.lightest import into_lightest
from wlb.packing.bins import differenced, fitting_bins
from wlb.packing.levelling import Indices, Prices, Task, level, sums_of
from wlb.token_count import positive_integer, whole_number

if TYPE_CHECKING:
    from wlb.workload.base import DocumentPrices
    from wlb.workload.phases import DocumentPhases

_MOST_TOKENS = 2**63 - 1  # of all documents together, which are summed as 64-bit integers
_FEW = 256  # documents: with so few, exchanges may end early, and a second start is tried
_FEW_OF_PART = 6  # the same of a part
_FEW_PARTS = 64  # of more documents than _FEW
_LEVEL_STEP = 1e-3  # of a mean micro-batch: what ranks that wait for one another may differ by
_TRY_AGAIN = 0.05  # of a step: what ranks wait before its micro-batches are also divided without filled slots
# Exchanges end when differencing, which takes so much longer the more documents there are, would have ended as well:
_SWAPS = 12  # documents for each swap between parts of equal size
_SLOT_EXCHANGES = 64  # in all slots together, of which the first gain most
_EXCHANGES = 64  # documents times parts for each exchange between others


def balance(
    lengths: Sequence[int] | NDArray[np.integer[Any]],
    parts: int | None = None,
    max_tokens: int | None = None,
    equal_size: bool = False,
    multiple_of: int = 1,
    *,
    workload: DocumentPrices | Literal["tokens"] | None = None,
    costs: Sequence[float] | NDArray[Any] | None = None,
    ranks: int | None = None,
    phases: DocumentPhases | None = None,
) -> list[list[Any]]:
    """Divide documents of ``lengths`` tokens into micro-batches of equal work, for all data-parallel ranks of a step.

    Stateless, and the same for the same arguments. No micro-batch is empty.

    Without ``ranks`` the dearest of ``parts`` micro-batches becomes as cheap as can be found. With ``ranks`` all ranks
    run equally many, the m-th of each at the same time (a slot), and the sum over slots of the dearest micro-batch is
    made small: what a step takes where ranks wait for one another at every micro-batch, as under FSDP. Among
    micro-batches of a slot the ranks are chosen so that their totals agree, which is what counts under DDP without
    such waiting. The cheapest slots are at both ends, where a pipeline fills and drains.

    Args:
        lengths: Tokens of each document.
        parts: Number of micro-batches, of all ranks together; None is the fewest that ``max_tokens`` allows, or one for
            each rank.
        max_tokens: The most tokens of a micro-batch; None is any number.
        equal_size: All micro-batches hold the same number of documents.
        multiple_of: ``parts`` is raised to a multiple of this; with ``ranks``, the micro-batches of each rank are, as
            interleaved pipeline stages want.
        workload: Prices of documents, by default those of a 7B model on H100: predicted seconds of forward and backward
            with attention, ``make_workload("7b", "h100")``. Give ``make_workload`` of your model, or ``"tokens"`` where
            the price is the length, as for a model without attention.
        costs: The price of each document, in any unit, in place of ``workload``.
        ranks: Number of data-parallel ranks.
        phases: What documents cost before the language model, in the unit of their prices, to which it is added;
            ``memory_tokens`` count against ``max_tokens``.

    Returns:
        For every micro-batch the indices of its documents, ascending: ``list[list[int]]``; with ``ranks`` a list of
        these for every rank.

    Raises:
        UserError: A length that is no whole number, or a length or size below 1; 2**63 tokens or more together; a
            ``workload`` of another kind, such as the name of a model; ``costs`` of another number, below 0 or not
            finite, or beside ``workload``; ``parts``, ``max_tokens`` and ``ranks`` all None; fewer documents than
            micro-batches; with ``equal_size``, a number of documents that is no multiple of them; a document over
            ``max_tokens``, or documents for which no ``parts`` micro-batches of ``max_tokens`` tokens are found.
    """
    tokens = _checked(lengths)
    even = 0.0 if ranks is None else _LEVEL_STEP
    prices = _prices(tokens, workload) if costs is None else _given_costs(len(tokens), workload, costs)
    if phases is not None:
        phases.check(len(tokens))
        documents = np.column_stack([np.arange(len(tokens)), np.zeros_like(tokens), tokens])
        tokens, prices = phases.held_tokens(documents), prices + phases.of(documents)
    sizes = {"max_tokens": max_tokens, "multiple_of": multiple_of, "ranks": ranks, "parts": parts}
    given = {name: positive_integer(name, size) for name, size in sizes.items() if size is not None}
    task = Task(tokens, prices, given.get("max_tokens"), equal_size, even)
    multiple = given.get("multiple_of", 1) * given.get("ranks", 1)
    number, start = given.get("parts"), None
    if number is None and (task.most_tokens is not None or ranks is None):
        number, start = _fewest(task, multiple)
    number = -(-(number or 1) // multiple) * multiple
    of_ranks = [_divided(task, number, start)] if ranks is None else _in_lock_step(task, number, ranks, start)
    named = [[sorted(part.tolist()) for part in parts] for parts in of_ranks]
    return named[0] if ranks is None else named


def _divided(task: Task, parts: int, start: list[Indices] | None = None) -> list[Indices]:
    _check_possible(task, parts)
    if parts in (1, len(task.tokens)):
        return np.array_split(np.arange(len(task.tokens)), parts)
    start = start or _placed(task, parts)
    if start is not None and task.prices.min() == task.prices.max():
        return start  # as even as it gets
    size = len(task.tokens) // parts if task.equal_size else None
    start = start or _fitted(task, parts) or fitting_bins(task.tokens.tolist(), parts, task.most_tokens or 0, size)
    if start is None:
        raise UserError(
            f"found no way to divide {len(task.tokens)} documents of {task.tokens.sum()} tokens into {parts} parts of "
            f"max_tokens = {task.most_tokens}; raise max_tokens or parts"
        )
    starts = [start]
    few = len(task.tokens) <= _FEW or (parts <= _FEW_PARTS and len(task.tokens) <= _FEW_OF_PART * parts)
    if few and not task.equal_size and (other := _differenced(task, parts)):
        starts.append(other)
    if not task.even:  # for ranks each slot is levelled by itself
        starts = [_levelled(start, task) for start in starts]
    return min(starts, key=lambda found: _most(found, task.prices))


def _fewest(task: Task, multiple: int) -> tuple[int, list[Indices] | None]:
    """The smallest number of parts, a multiple of ``multiple``, in which documents are found to fit, and how."""
    if task.most_tokens is None:
        raise UserError("parts = None is the fewest parts that max_tokens allows; give parts, max_tokens or ranks")
    parts = -(-int(task.tokens.sum()) // (task.most_tokens * multiple)) * multiple
    while parts < len(task.tokens):
        if not task.equal_size or len(task.tokens) % parts == 0:
            _check_possible(task, parts)
            start = _placed(task, parts) or _fitted(task, parts)
            if start is not None:
                return parts, start
        parts += multiple
    return parts, None


def _placed(task: Task, parts: int) -> list[Indices] | None:
    """A start that balances prices, each document in the cheapest part with room; None where it breaks the limit."""
    if task.equal_size:
        return _differenced(task, parts)
    order = np.argsort(-task.prices, kind="stable").tolist()
    tokens, prices = task.tokens.tolist(), task.prices.tolist()
    rooms = [task.most_tokens or sum(tokens)] * parts
    owners, _ = into_lightest([tokens[i] for i in order], [prices[i] for i in order], [0.0] * parts, rooms)
    return None if -1 in owners else _members(np.array(order), np.array(owners), parts)


def _members(documents: Indices, owners: Indices, parts: int) -> list[Indices]:
    """``documents`` by the part that owns each; -1 is none."""
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(parts + 1)).tolist()
    return [documents[order[first:stop]] for first, stop in pairwise(bounds)]


def _fitted(task: Task, parts: int) -> list[Indices] | None:
    """A start that balances tokens, so that it keeps to the limit if anything does; None where it does not."""
    lengths = task._replace(prices=task.tokens.astype(np.float64), most_tokens=None, even=0.0)
    start = _placed(lengths, parts)
    start = start and _levelled(start, lengths, goal=float(task.most_tokens or 0))
    return start if start and _most(start, task.tokens) <= (task.most_tokens or 0) else None


def _differenced(task: Task, parts: int) -> list[Indices] | None:
    """A start by largest differencing; None where it breaks the limit, or leaves a part empty."""
    start = [np.array(part, np.int64) for part in differenced(task.prices, parts, equal_size=task.equal_size)]
    fits = all(map(len, start)) and (task.most_tokens is None or _most(start, task.tokens) <= task.most_tokens)
    return start if fits else None


def _levelled(start: list[Indices], task: Task, goal: float = 0.0, most_tries: int = 2**31) -> list[Indices]:
    documents, parts = sum(map(len, start)), len(start)
    tries = documents // _SWAPS if task.equal_size else min(documents * parts // _EXCHANGES, most_tries)
    if np.array_equal(task.prices, task.tokens):  # what makes the dearest part cheaper keeps it within the limit, too
        task = task._replace(most_tokens=None)
    return level(start, task, tries, goal)


def _most(parts: list[Indices], amounts: Indices | Prices) -> float:
    return float(sums_of(parts, amounts).max())


def _check_possible(task: Task, parts: int) -> None:
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
            "max_tokens, or cut the document first (wlb.documents.segments)"
        )
    if tokens > parts * task.most_tokens:
        raise UserError(
            f"{tokens} tokens do not fit into {parts} parts of max_tokens = {task.most_tokens}; raise max_tokens to at "
            f"least {-(-tokens // parts)}, or ask for at least {-(-tokens // task.most_tokens)} parts"
        )


def _checked(lengths: Sequence[int] | NDArray[np.integer[Any]]) -> Indices:
    # NumPy makes integers of booleans among integers, and floats or objects of integers over 64 bits.
    tokens = [*lengths] if isinstance(lengths, list | tuple) else np.atleast_1d(np.asarray(lengths)).tolist()
    if not tokens:
        raise UserError("lengths to balance must be a list of at least one number of tokens")
    if set(map(type, tokens)) != {int}:
        given, tokens = tokens, [*map(whole_number, tokens)]
        if None in tokens:
            wrong = given[document := tokens.index(None)]
            raise UserError(
                f"document lengths must be whole numbers of tokens, not {type(wrong).__name__} (document {document} is "
                f"{str(wrong)[:40]}); convert them to int"
            )
    if (shortest := min(tokens)) < 1:
        raise UserError(f"document {tokens.index(shortest)} has {shortest} tokens; lengths must be at least 1")
    if (total := sum(tokens)) > _MOST_TOKENS:
        raise UserError(
            f"the documents have {total} tokens together, over {_MOST_TOKENS}; give lengths in tokens, and other costs "
            "as workload"
        )
    return np.array(tokens, np.int64)


def _prices(tokens: Indices, workload: DocumentPrices | Literal["tokens"] | None) -> Prices:
    if isinstance(workload, str) and workload == "tokens":
        return tokens.astype(np.float64)
    if workload is None:
        from wlb.workload import make_workload  # loaded where it is needed

        workload = make_workload()
    if not hasattr(workload, "document_seconds"):
        raise UserError(
            f'workload = {repr(workload)[:40]} has no prices; give make_workload("7b") or that of another model, or '
            '"tokens"'
        )
    prices = np.asarray(workload.document_seconds(tokens), np.float64)
    if prices.shape != tokens.shape or not (prices > 0).all() or not np.isfinite(prices).all():
        raise UserError("workload.document_seconds must give every document a finite price over 0")
    return prices


def _given_costs(documents: int, workload: object, costs: Sequence[float] | NDArray[Any]) -> Prices:
    if workload is not None:
        raise UserError("costs and workload are both prices of the documents; give one of them")
    try:
        prices = np.asarray(costs, np.float64)
    except (TypeError, ValueError):
        raise UserError("costs must be one number for each document") from None
    if prices.shape != (documents,):
        raise UserError(f"costs of shape {prices.shape} for {documents} documents; give one number for each")
    wrong = np.flatnonzero(~(np.isfinite(prices) & (prices >= 0)))
    if len(wrong):
        raise UserError(f"document {wrong[0]} costs {prices[wrong[0]]}; costs must be finite and at least 0")
    if not math.isfinite(sum(prices.tolist())):
        raise UserError("costs add up to more than a float holds; give them in a larger unit")
    # Whatever a document costs, it is a document: exchanges want prices over 0.
    return np.where(prices == 0, np.finfo(np.float64).tiny, prices)


def _in_lock_step(task: Task, parts: int, ranks: int, start: list[Indices] | None) -> list[list[Indices]]:
    """The micro-batches of every rank. Until the end they are in one list, of which ``ranks`` in a row make a slot."""
    fair = float(task.prices.sum()) / ranks
    slots = _filled_slots(task, parts, ranks)
    if slots is None or _loads(slots, task, ranks).max(axis=1).sum() > (1 + _TRY_AGAIN) * fair:
        plain = _dearest_first(_divided(task, parts, start), task)
        slots = min(slots or plain, plain, key=lambda found: float(_loads(found, task, ranks).max(axis=1).sum()))
    loads = _loads(slots, task, ranks)
    if loads.max(axis=1).sum() > (1 + task.even) * fair:
        tries = max(2, _SLOT_EXCHANGES // len(loads))
        for slot, mean in enumerate(loads.mean(axis=1)):
            own = slice(slot * ranks, (slot + 1) * ranks)
            slots[own] = _levelled(slots[own], task, goal=mean, most_tries=tries)  # of a slot the dearest counts
    # Each was levelled by itself, so micro-batches of another may be nearer in price now.
    slots = _dearest_first(slots, task)
    totals = np.zeros(ranks)
    of_ranks: list[list[Indices]] = [[] for _ in range(ranks)]
    for first, of_slot in zip(range(0, parts, ranks), _loads(slots, task, ranks), strict=True):
        for rank, part, load in zip(np.argsort(totals, kind="stable"), slots[first:], of_slot, strict=False):
            of_ranks[rank].append(part)
            totals[rank] += load
    return [of_rank[::2][::-1] + of_rank[1::2] for of_rank in of_ranks]


def _dearest_first(parts: list[Indices], task: Task) -> list[Indices]:
    """Neighbours in price run at the same time: of given micro-batches no other slots take less time."""
    return [parts[place] for place in np.argsort(-sums_of(parts, task.prices), kind="stable")]


def _filled_slots(task: Task, parts: int, ranks: int) -> list[Indices] | None:
    """Slots as long as the dearest document of those left, while it is dearer than a mean micro-batch of the rest."""
    left = np.argsort(-task.prices, kind="stable")
    if task.equal_size or len(left) < parts or ranks == 1:
        return None
    slots: list[Indices] = []
    while parts > ranks and task.prices[left[0]] > task.prices[left].sum() / parts:
        parts -= ranks
        some = left[: len(left) - parts]  # every later micro-batch needs a document
        rooms = [task.most_tokens or int(task.tokens.sum())] * ranks
        dearest = float(task.prices[left[0]])
        found, _ = into_lightest(task.tokens[some].tolist(), task.prices[some].tolist(), [0.0] * ranks, rooms, dearest)
        owners = np.array(found)
        slots += _members(some, owners, ranks)
        left = np.concatenate([some[owners < 0], left[len(some) :]])
        if not all(map(len, slots)) or len(left) < parts:
            return None
    if not slots:
        return None
    rest = task._replace(tokens=task.tokens[left], prices=task.prices[left])
    try:
        members = [left[part] for part in _divided(rest, parts)]
    except UserError:  # what is left does not fit
        return None
    return slots + _dearest_first(members, task)


def _loads(slots: list[Indices], task: Task, ranks: int) -> Prices:
    """The price of every micro-batch, a row for each slot."""
    return sums_of(slots, task.prices).reshape(-1, ranks)
