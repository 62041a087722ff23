"""Divides a given set of documents into parts of equal work, for trainers that choose the documents themselves.

Packers decide which step trains a document. If that is already decided, as for the rollouts of a reinforcement learning
step, only the division is left (``wlb.packing.division``).

If ``ranks`` wait for each other after every micro-batch, micro-batches of similar price run at the same time, in a
*slot*. A document that costs more than a mean micro-batch makes its slot as long as itself. The other ranks of that
slot are filled up to it, which shortens the later slots.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.lightest import into_lightest
from wlb.packing.division import FREE, check_possible, divided, evened, fewest
from wlb.packing.exchanges import Indices, Prefixes, Prices, Task, documents_of, members_of
from wlb.packing.padded import fewest_padded, padded_parts
from wlb.packing.prefixes import divided_once_shared, fewest_once_shared
from wlb.token_count import check_whole, whole_number

if TYPE_CHECKING:
    from wlb.workload.base import DocumentPrices
    from wlb.workload.phases import DocumentPhases

_LEVEL_STEP = 1e-3  # of a mean micro-batch: ranks of a slot may differ by this
_TRY_AGAIN = 0.05  # of a step: if ranks wait longer, division without filled slots is tried too
_SLOT_EXCHANGES = 64  # over all slots; the first ones gain most
_MOST_SEEN = 1_000_000  # documents looked at over all filled slots; each looks at all that are left
_APART = [("prefixes", other) for other in ("costs", "phases", "multiple_of", "max_documents", "padded")]
_APART += [("padded", "costs"), ("padded", "phases")]


def balance(
    lengths: Sequence[int] | NDArray[np.integer[Any]],
    parts: int | None = None,
    max_tokens: int | None = None,
    *,
    ranks: int | None = None,
    costs: Sequence[float] | NDArray[Any] | None = None,
    workload: "DocumentPrices | Literal['tokens'] | None" = None,
    phases: "DocumentPhases | None" = None,
    groups: Sequence[int | str] | NDArray[Any] | None = None,
    prefixes: Mapping[Any, int] | None = None,
    multiple_of: int | None = None,
    padded: bool = False,
    max_documents: int | None = None,
    equal_size: bool = False,
    parts_multiple_of: int = 1,
    oversize: Literal["error", "alone"] = "error",
    empty: Literal["error", "allowed"] = "error",
) -> list[list[Any]]:
    """Divide documents of ``lengths`` tokens into micro-batches of equal work, for all data-parallel ranks of a step.

    Stateless and deterministic. Without ``ranks`` it makes the most expensive of ``parts`` micro-batches as cheap as it
    can. With ``ranks`` every rank runs the same number of micro-batches, the m-th of all ranks at the same time (a
    slot), and it minimises the sum over slots of the most expensive micro-batch: the time of a step in which ranks
    synchronise at every micro-batch, as under FSDP. Inside a slot, micro-batches go to ranks so that the totals of the
    ranks agree, which matters under DDP. Light slots go first and last, to shorten pipeline bubbles.

    Args:
        lengths: Tokens of each document; a document of 0 tokens (an empty response) still belongs to a micro-batch.
        parts: Number of micro-batches over all ranks; None means the fewest under ``max_tokens``, or one per rank.
        max_tokens: The most tokens of a micro-batch; None means no limit.
        ranks: Number of data-parallel ranks.
        costs: The price of each document in any unit, instead of ``workload``; may be 0.
        workload: Prices of documents, by default ``make_workload("7b", "h100")``: predicted seconds, forward and
            backward with attention. Give ``make_workload`` of your model, or ``"tokens"`` to price by length.
        phases: What documents cost before the language model, added to prices.
        groups: An id for each document, such as its prompt; documents of a group go to the same rank. Needs ``ranks``
            or ``prefixes``.
        prefixes: For each id in ``groups``, the first tokens of its documents that are the same, such as the prompt.
            A micro-batch computes them once for all its documents of the group, as attention over prefix trees does:
            n documents of P + R tokens count P + n R tokens, and cost ``workload`` of P once and, for each, of P + R
            less that of P. Without ``ranks`` a group may spread over micro-batches, and each pays its prefix.
        multiple_of: Each document is padded to a multiple of this, and counts and costs as many tokens.
        padded: A micro-batch counts and costs its number of documents times its longest.
        max_documents: The most documents of a micro-batch.
        equal_size: All micro-batches hold the same number of documents.
        parts_multiple_of: Raises ``parts`` to a multiple of this; with ``ranks``, the micro-batches of each rank.
        oversize: With ``"alone"``, a document over ``max_tokens`` shares its micro-batch only with empty responses.
        empty: With ``"allowed"``, micro-batches stay empty if there are fewer documents than micro-batches.

    Returns:
        Without ``ranks`` a list of micro-batches; with ``ranks`` a list of micro-batches for every rank. A micro-batch
        is the ascending list of the indices of its documents.

    Raises:
        UserError: For an invalid argument; 2**63 tokens or more in total; arguments that exclude each other, such as
            ``costs`` and ``workload``; no number of parts and no limit; fewer documents than micro-batches, or with
            ``equal_size`` no multiple of them; a document over ``max_tokens``, or documents that do not fit.
    """
    for name, value, other in (("oversize", oversize, "alone"), ("empty", empty, "allowed")):
        if value not in ("error", other):
            raise UserError(f'{name} = {str(value)[:40]!r} is neither "error" nor "{other}"; give one of them')
    sizes = {"max_tokens": max_tokens, "multiple_of": multiple_of, "max_documents": max_documents}
    sizes |= {"parts_multiple_of": parts_multiple_of, "ranks": ranks, "parts": parts}
    given = {name: check_whole(name, size) for name, size in sizes.items() if size is not None}
    others = given | {"prefixes": prefixes, "costs": costs, "phases": phases, "padded": padded or None}
    for name, other in _APART:
        if others[name] is not None and others.get(other) is not None:
            raise UserError(f"{name} and {other} exclude each other; leave one of them out")
    tokens = whole = _checked(lengths, given.get("multiple_of", 1))
    prices = _prices(tokens, workload, costs)
    if phases is not None:
        phases.check(len(tokens))
        documents = np.column_stack([np.arange(len(tokens)), np.zeros_like(tokens), tokens])
        prices = prices + phases.of(documents)
    if max_tokens is not None and (longest := int(tokens.max(initial=0))) > max_tokens:
        if oversize != "alone":
            raise UserError(
                f"document {tokens.argmax()} has {longest} tokens, over max_tokens = {max_tokens}; raise max_tokens, "
                'cut the document first (wlb.documents.segments), or set oversize = "alone"'
            )
        tokens = np.minimum(tokens, max_tokens)  # leaves no room for others
    if max_documents is not None:
        given.setdefault("max_tokens", min(max(1, len(tokens) * int(tokens.max(initial=0))), 2**63 - 1))
    even = 0.0 if ranks is None else _LEVEL_STEP
    task = Task(tokens, prices, given.get("max_tokens"), equal_size, even, given.get("max_documents"), padded)
    number, multiple, sparse = given.get("parts"), given["parts_multiple_of"], empty == "allowed"
    if groups is not None or prefixes is not None:
        names, group_of = _groups(groups, len(tokens), ranks is None and prefixes is None)
        task = task if prefixes is None else _without_prefixes(task, whole, names, group_of, prefixes, workload)
    if groups is not None and ranks is not None:
        of_ranks = _groups_on_ranks(task, group_of, number, multiple, given["ranks"], sparse)
    else:
        of_ranks = _solved(task, number, multiple, given.get("ranks"), sparse)
    named = [[np.sort(part).tolist() for part in own] for own in of_ranks]
    return named[0] if ranks is None else named


def _solved(task: Task, parts: int | None, multiple: int, ranks: int | None, sparse: bool) -> list[list[Indices]]:
    """The micro-batches of every rank; without ``ranks``, of a single one."""
    start, documents, multiple = None, len(task.tokens), multiple * (ranks or 1)
    if parts is None and documents and (task.max_tokens is not None or ranks is None):
        find = fewest_padded if task.padded else fewest_once_shared if task.prefixes else fewest
        parts, start = find(task, multiple)
    parts = -(-(parts or 1) // multiple) * multiple
    if sparse and documents < parts and not (task.equal_size and documents):
        found = np.split(np.arange(documents), range(1, parts))
    elif task.prefixes is not None:
        found = divided_once_shared(task, parts, start)
    elif task.padded:
        found = padded_parts(task, parts, ranks or parts)
    else:
        found = divided(task, parts, start) if ranks is None else _slots(task, parts, ranks, start)
    return [found] if ranks is None else _dealt(found, task, ranks)


def _groups(groups: Any, documents: int, alone: bool) -> tuple[list[Any], Indices]:
    """The ids of groups, and the place of each document's among them."""
    try:
        ids = np.asarray(groups)
    except ValueError:  # ragged
        ids = np.array(None)
    if alone or ids.shape != (documents,) or (ids.size and ids.dtype.kind not in "biuSU"):
        raise UserError(f"groups needs ranks or prefixes, and one id, int or str, for each of {documents} documents")
    names, group_of = np.unique(ids, return_inverse=True)
    return names.tolist(), group_of


def _without_prefixes(
    task: Task, lengths: Indices, names: list[Any], group_of: Indices, prefixes: Any, workload: Any
) -> Task:
    """``task`` with the rest of each document, apart from the prefix of its group."""
    if not isinstance(prefixes, Mapping):
        raise UserError(f"prefixes must map ids of groups to tokens, but is a {type(prefixes).__name__}; give a dict")
    if missing := [name for name in names if name not in prefixes]:
        raise UserError(f"prefixes lacks group {missing[0]!r}; give it 0 tokens if its documents share none")
    given = (check_whole(f"prefixes[{name!r}]", prefixes[name], least=0) for name in names)
    shared = np.fromiter((min(tokens, 2**63 - 1) for tokens in given), np.int64)
    if len(short := np.flatnonzero(shared[group_of] > lengths)):
        raise UserError(
            f"document {short[0]} has {lengths[short[0]]} tokens, under the {shared[group_of[short[0]]]} of its "
            "prefix; lengths include the prefix, so raise this length or lower prefixes"
        )
    costs = np.where(shared > 0, _prices(shared, workload, None), 0.0)
    if task.max_tokens is not None:
        shared = np.minimum(shared, task.max_tokens - 1)  # leaves no room for others either
    rest = np.maximum(task.prices - costs[group_of], FREE)
    return task._replace(tokens=task.tokens - shared[group_of], prices=rest, prefixes=Prefixes(group_of, shared, costs))


def _groups_on_ranks(
    task: Task, group_of: Indices, parts: int | None, multiple: int, ranks: int, sparse: bool
) -> list[list[Indices]]:
    """The micro-batches of every rank: divide groups among ranks, then the documents of each rank by themselves."""
    sizes, prices = np.bincount(group_of), np.bincount(group_of, task.prices).astype(np.float64)
    if task.equal_size and len({*sizes.tolist()}) > 1:
        raise UserError(f"equal_size with groups needs groups of one size, not of {sizes.min()} to {sizes.max()}")
    if task.prefixes is not None:
        prices += task.prefixes.prices
    of_groups = Task(sizes, prices, None, task.equal_size, 0.0)
    if not sparse or (task.equal_size and len(sizes)):
        check_possible(of_groups, ranks, "groups", "ranks")
    documents = documents_of(_solved(of_groups, ranks, 1, None, sparse)[0], group_of)
    tasks = [task.of(own)._replace(even=0.0) for own in documents]
    number = None if parts is None and task.max_tokens is not None else -(-(parts or 1) // ranks)

    def of_rank(rank: int, number: int | None) -> list[Indices]:
        try:
            return _solved(tasks[rank], number, multiple, None, sparse)[0]
        except UserError as error:
            raise UserError(f"rank {rank} of {ranks} (parts count per rank): {error}") from None

    found = [of_rank(rank, number) for rank in range(ranks)]
    most = max(map(len, found))
    of_ranks: list[list[Indices]] = []
    for rank, own in enumerate(documents):
        micro_batches = found[rank] if len(found[rank]) == most else of_rank(rank, most)
        of_ranks.append([own[part] for part in _costliest_first(micro_batches, tasks[rank])])
    return [of_rank[::2][::-1] + of_rank[1::2] for of_rank in of_ranks]


def _checked(lengths: Sequence[int] | NDArray[np.integer[Any]], multiple: int) -> Indices:
    # NumPy turns booleans among integers into integers, and integers over 64 bits into floats or objects.
    given = [*lengths] if isinstance(lengths, list | tuple) else np.atleast_1d(np.asarray(lengths)).tolist()
    tokens: list[Any] = given if {*map(type, given)} <= {int} else [*map(whole_number, given)]
    if tokens is not given and None in tokens:
        wrong = given[document := tokens.index(None)]
        raise UserError(
            f"lengths must be whole numbers of tokens, not {type(wrong).__name__} (document {document} is "
            f"{str(wrong)[:40]}); convert them to int"
        )
    if (shortest := min(tokens, default=0)) < 0:
        raise UserError(f"document {tokens.index(shortest)} has {shortest} tokens; lengths must be at least 0")
    if multiple > 1:
        tokens = [-(-length // multiple) * multiple for length in tokens]
    if (total := sum(tokens)) >= 2**63:  # which are summed as 64-bit integers
        raise UserError(f"the documents have {total} tokens together, over {2**63 - 1}; give other costs as costs")
    return np.array(tokens, np.int64)


def _prices(tokens: Indices, workload: Any, costs: Sequence[float] | NDArray[Any] | None) -> Prices:
    if costs is not None and workload is not None:
        raise UserError("costs and workload are both prices of the documents; give one of them")
    if costs is None and workload is None:
        from wlb.workload import make_workload  # loaded where it is needed

        workload = make_workload()
    if costs is None:
        of_tokens = isinstance(workload, str) and workload == "tokens"
        if not of_tokens and not hasattr(workload, "document_seconds"):
            raise UserError(f'workload = {repr(workload)[:40]} has no prices; give make_workload("7b"), or "tokens"')
        costs = tokens if of_tokens else workload.document_seconds(tokens)
    try:
        prices: Prices = np.asarray(costs, np.float64).reshape(tokens.shape)
    except (TypeError, ValueError):
        raise UserError(f"costs must be one number for each of {len(tokens)} documents") from None
    if len(wrong := np.flatnonzero(~(np.isfinite(prices) & (prices >= 0)))):
        raise UserError(f"document {wrong[0]} costs {prices[wrong[0]]}; costs must be finite and at least 0")
    if not math.isfinite(sum(prices.tolist())):
        raise UserError("costs add up to more than a float holds; give them in a larger unit")
    return np.where(prices == 0, FREE, prices)


def _slots(task: Task, parts: int, ranks: int, start: list[Indices] | None) -> list[Indices]:
    """The micro-batches of every rank in one list: each run of ``ranks`` is a slot."""
    fair = float(task.prices.sum()) / ranks

    def seconds(slots: list[Indices]) -> float:
        return float(task.costs(slots).reshape(-1, ranks).max(axis=1).sum())

    slots = _filled_slots(task, parts, ranks)
    if slots is None or seconds(slots) > (1 + _TRY_AGAIN) * fair:
        plain = _costliest_first(divided(task, parts, start), task)
        slots = min(slots or plain, plain, key=seconds)
    loads = task.costs(slots).reshape(-1, ranks)
    if loads.max(axis=1).sum() > (1 + task.even) * fair:
        tries = max(2, _SLOT_EXCHANGES // len(loads))
        for slot, mean in enumerate(loads.mean(axis=1)):
            own = slice(slot * ranks, (slot + 1) * ranks)
            slots[own] = evened(slots[own], task, goal=mean, most_tries=tries)  # only the largest counts
    return slots


def _dealt(slots: list[Indices], task: Task, ranks: int) -> list[list[Indices]]:
    """The micro-batches of every rank, so that the totals of the ranks agree."""
    # Each slot was evened by itself, so micro-batches of other slots may now be closer in price.
    slots = _costliest_first(slots, task)
    totals = np.zeros(ranks)
    of_ranks: list[list[Indices]] = [[] for _ in range(ranks)]
    for first, of_slot in zip(range(0, len(slots), ranks), task.costs(slots).reshape(-1, ranks), strict=True):
        for rank, part, load in zip(np.argsort(totals, kind="stable"), slots[first:], of_slot, strict=False):
            of_ranks[rank].append(part)
            totals[rank] += load
    return [of_rank[::2][::-1] + of_rank[1::2] for of_rank in of_ranks]


def _costliest_first(parts: list[Indices], task: Task) -> list[Indices]:
    """Micro-batches by falling price: slots of neighbours in price take the least time."""
    return [parts[place] for place in np.argsort(-task.costs(parts), kind="stable")]


def _filled_slots(task: Task, parts: int, ranks: int) -> list[Indices] | None:
    """Slots as long as the most expensive remaining document, while that costs more than a mean micro-batch."""
    left = np.argsort(-task.prices, kind="stable")
    if task.equal_size or len(left) < parts or ranks == 1:
        return None
    slots: list[Indices] = []
    seen = 0
    while parts > ranks and seen < _MOST_SEEN and task.prices[left[0]] > task.prices[left].sum() / parts:
        parts -= ranks
        seen += len(left)
        some = left[: len(left) - parts]  # every later micro-batch needs a document
        rooms = [task.max_tokens or int(task.tokens.sum())] * ranks
        costliest = float(task.prices[left[0]])
        held, costs, loads = task.tokens[some].tolist(), task.prices[some].tolist(), [0.0] * ranks
        owners = into_lightest(held, costs, loads, rooms, costliest, task.max_documents)
        slots += members_of(some, owners, ranks)
        left = np.concatenate([some[owners < 0], left[len(some) :]])
        if not all(map(len, slots)) or len(left) < parts:
            return None
    if not slots:
        return None
    try:
        members = [left[part] for part in divided(task.of(left), parts)]
    except UserError:  # what is left does not fit
        return None
    return slots + _costliest_first(members, task)
