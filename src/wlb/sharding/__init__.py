"""Which context-parallel rank holds which tokens of a micro-batch, and what its group takes.

What comes in: the lengths of the segments of micro-batches, the size of a group, a strategy by name, and ``Costs`` of
one GPU. What goes out: a ``ShardPlan`` for the runtime (``make_shard_plan``), or ``Shards``, what every rank computes
and exchanges (``price_shards``), which ``Priced`` turns into seconds. Strategies shard many micro-batches at once, so a
step takes a few NumPy operations. Read in this order:

1. ``plan.py``: ``ShardPlan``, the pieces of every rank; a permutation of the tokens, so attention stays exact.
2. ``pieces.py``: the pieces of many plans in one table, and ``Shards``: what ranks attend, hold and exchange.
3. ``static.py``: head-tail sharding by micro-batch (plain-4D) or by document (the paper); ``adaptive.py``: the faster
   of the two; ``equal_shares.py``: ours, ``balanced``, which balances tokens and attention.
4. ``latency.py``: ``Priced``, the only price of a micro-batch.
5. This file: strategies by name, a micro-batch with a slice, and what is cached.

What you may touch: a new strategy is one file and a line in ``STRATEGIES``. It takes ``MicroBatches`` and returns
``Pieces`` that cover every token once; ``tests/sharding`` checks that. Attention reads nothing but the ``ShardPlan``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError, check_known
from wlb.settings import MOST_RANKS
from wlb.sharding.adaptive import adaptive
from wlb.sharding.equal_shares import balanced
from wlb.sharding.pieces import MicroBatches, Pieces, Shards, locality, rank_tables
from wlb.sharding.plan import ShardPlan
from wlb.sharding.static import per_document, per_sequence
from wlb.workload import Costs, make_workload

__all__ = [
    "LEVEL_SHARDING",
    "STRATEGIES",
    "MicroBatches",
    "ShardPlan",
    "make_shard_plan",
    "price_shards",
    "shard_many",
]

# For slices and documents shared in level steps: depends on lengths alone, so it is the same on every machine.
LEVEL_SHARDING = "per_document"

STRATEGIES: dict[str, Callable[[MicroBatches, int, Costs], Pieces]] = {
    "per_sequence": per_sequence,
    "per_document": per_document,
    "adaptive": adaptive,
    "balanced": balanced,
}
_STATIC = {"per_sequence", "per_document"}
_KEPT = 1024  # micro-batches whose pieces are cached
_Keys = tuple[tuple[int, tuple[int, ...]], ...]  # micro-batches: tokens before the slice, or -1, and lengths


def make_shard_plan(
    document_lengths: Sequence[int] | NDArray[np.int64],
    cp_size: int,
    strategy: str,
    *,
    workload: Costs | None = None,
    earlier: int | None = None,
) -> ShardPlan:
    """Share a micro-batch of segments of ``document_lengths`` tokens, in packed order, among ``cp_size`` ranks.

    ``workload`` prices the shards for all but the static strategies; it is the workload of one GPU without context
    parallelism (``cp`` = 1, any ``tp``), by default ``make_workload("7b", "h100")``. If ``earlier`` is given, the first
    segment is a slice with that many tokens before it: all ranks get an even part of it, and the other segments are
    shared as if it were not there. The same arguments give the same plan.

    Raises ``UserError`` for an unknown strategy, a ``cp_size`` below 1, no documents, lengths that are not whole
    numbers of at least 1, and ``earlier`` below 0.
    """
    lengths, first = _checked(document_lengths), int(earlier is not None)
    if earlier is not None and earlier < 0:
        raise UserError(f"earlier = {earlier} tokens cannot be before a slice; it must be at least 0")
    pieces = [
        shard_many(MicroBatches(part, np.array([len(part)])), cp_size, how, workload or make_workload())
        for part, how in ((lengths[:first], LEVEL_SHARDING), (lengths[first:], strategy))
        if len(part)
    ]
    together = Pieces(*(np.concatenate(column) for column in zip(*pieces, strict=True)))
    together.segment[len(pieces[0].lane) :] += 1  # segments after the slice
    return ShardPlan(strategy, tuple(lengths.tolist()), rank_tables(together, cp_size), earlier)


def shard_many(micro_batches: MicroBatches, cp_size: int, strategy: str, workload: Costs) -> Pieces:
    """The pieces that ``make_shard_plan`` makes of each micro-batch; arguments and errors as there."""
    shard = STRATEGIES[check_known("sharding strategy", strategy, STRATEGIES)]
    workload = workload if workload.cp == 1 else replace(workload, cp=1)
    if cp_size < 1:
        raise UserError(f"cp_size = {cp_size} is not a group size; it must be at least 1")
    if cp_size == 1:
        sizes, counts = micro_batches
        return Pieces(np.repeat(np.arange(len(counts)), counts), np.arange(len(sizes)), np.zeros_like(sizes), sizes)
    if strategy in _STATIC:
        return shard(micro_batches, cp_size, workload)
    known, each = _known(strategy, cp_size, workload), micro_batches.each
    keys = [lengths.tobytes() for lengths in each]
    found = {key: before for key in keys if (before := known.get(key)) is not None}
    if missing := {key: lengths for key, lengths in zip(keys, each, strict=True) if key not in found}:
        left = MicroBatches(np.concatenate([*missing.values()]), np.array([*map(len, missing.values())]))
        found |= zip(missing, _apart(shard(left, cp_size, workload), left, cp_size), strict=True)
    known.update(found)
    for oldest in list(known)[:-_KEPT]:  # a list, as another thread may be planning
        known.pop(oldest, None)
    pieces = [found[key] for key in keys]
    lane, segment, start, stop = (np.concatenate(column) for column in zip(*pieces, strict=True))
    number = np.array([len(of_one.lane) for of_one in pieces])
    lane = lane + cp_size * np.repeat(np.arange(len(pieces)), number)
    return Pieces(lane, segment + np.repeat(micro_batches.first, number), start, stop)


@lru_cache(maxsize=4)
def _known(strategy: str, cp_size: int, costs: Costs) -> dict[bytes, Pieces]:
    """The latest sharded micro-batches: each is sharded when planned, and again when simulated or run."""
    return {}


def _apart(pieces: Pieces, micro_batches: MicroBatches, cp_size: int) -> Iterator[Pieces]:
    """The pieces of each micro-batch, numbered as if there were no other."""
    lane, segment, start, stop = pieces
    bounds = np.searchsorted(segment, micro_batches.first).tolist()
    for index, (first, last) in enumerate(pairwise([*bounds, len(segment)])):
        mine = slice(first, last)
        own = segment[mine] - micro_batches.first[index]
        yield Pieces(lane[mine] - index * cp_size, own, start[mine], stop[mine])


def price_shards(
    lengths: Sequence[Sequence[int]],
    cp_size: int,
    strategy: str,
    costs: Costs,
    earlier: Sequence[int | None] = (),
) -> Shards:
    """What ranks compute and exchange in micro-batches with segments of ``lengths`` tokens; shape (micro_batches, cp).

    Micro-batches are sharded as by ``make_shard_plan``; one without segments costs nothing. If ``earlier`` has a number
    for a micro-batch, its first segment is a slice with that many tokens before it.
    """
    before = [-1 if tokens is None else tokens for tokens in earlier] or [-1] * len(lengths)
    keys = [*zip(before, map(tuple, lengths), strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    places = np.argsort(order)
    return _priced(tuple([keys[place] for place in order]), cp_size, strategy, costs).map(lambda column: column[places])


@lru_cache(maxsize=8)  # the micro-batches of a step are priced when planned, and again, dealt to ranks, when simulated
def _priced(micro_batches: _Keys, cp_size: int, strategy: str, costs: Costs) -> Shards:
    before = np.array([tokens for tokens, _ in micro_batches])
    whole = [of_one[tokens >= 0 :] for tokens, of_one in micro_batches]
    counts, sizes = np.array([*map(len, whole)]), np.fromiter(chain.from_iterable(whole), np.int64)
    filled, pieces = np.flatnonzero(counts), Pieces(*np.empty((4, 0), np.int64))
    if len(filled):
        pieces = shard_many(MicroBatches(sizes, counts[filled]), cp_size, strategy, costs)
        place, rank = np.divmod(pieces.lane, cp_size)
        pieces = pieces._replace(lane=cp_size * filled[place] + rank)
    shards = locality(pieces, len(sizes), len(whole), cp_size).attending(pieces, costs)
    sliced = np.flatnonzero(before >= 0)
    if len(sliced):
        slices = np.array([micro_batches[place][1][0] for place in sliced.tolist()])
        cut = per_document(MicroBatches(slices, np.ones_like(slices)), cp_size)
        together = shards.map(lambda column: column[sliced]).with_slices(cut, slices, before[sliced], costs)
        for everything, column in zip(shards, together, strict=True):
            everything[sliced] = column
    return shards


def check_group_size(ranks: int, name: str = "cp") -> None:
    """Raise ``UserError`` for a size of context-parallel groups that is not supported."""
    if not 1 <= ranks <= MOST_RANKS:
        raise UserError(f"{name} = {ranks} is not a group size; it must be from 1 to {MOST_RANKS}")


def _checked(document_lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    lengths = np.asarray(document_lengths)
    if lengths.ndim != 1 or lengths.size == 0:
        raise UserError("a micro-batch to shard must be a list of at least one document length")
    if not np.issubdtype(lengths.dtype, np.integer):
        raise UserError(f"document lengths must be whole numbers of tokens, not {lengths.dtype}; convert them to int")
    if (shortest := int(lengths.min())) < 1:
        raise UserError(f"a document of {shortest} tokens cannot be sharded; lengths must be at least 1")
    return lengths.astype(np.int64)
