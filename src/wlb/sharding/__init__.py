"""Sharding strategies: which context-parallel rank holds which tokens of a micro-batch, as a ``ShardPlan``.

A strategy shards many micro-batches at once, so that those who simulate thousands of steps pay for a few NumPy
operations; ``make_shard_plan`` is a batch of one. A new strategy is one new file and one line in ``STRATEGIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError, choose_from
from wlb.settings import MOST_RANKS
from wlb.sharding.adaptive import adaptive
from wlb.sharding.elastic import elastic
from wlb.sharding.hybrid import hybrid
from wlb.sharding.latency import ShardLatency, shard_latency
from wlb.sharding.pieces import MicroBatches, Pieces, rank_tables
from wlb.sharding.plan import ShardPlan
from wlb.sharding.static import per_document, per_sequence
from wlb.workload import Workload, default_workload

__all__ = ["STRATEGIES", "MicroBatches", "ShardLatency", "ShardPlan", "make_shard_plan", "shard_latency", "shard_many"]

STRATEGIES: dict[str, Callable[[MicroBatches, int, Workload], Pieces]] = {
    "per_sequence": per_sequence,
    "per_document": per_document,
    "adaptive": adaptive,
    "hybrid": hybrid,
    "elastic": elastic,
}


def make_shard_plan(
    document_lengths: Sequence[int] | NDArray[np.int64],
    cp_size: int,
    strategy: str,
    *,
    workload: Workload | None = None,
) -> ShardPlan:
    """Share a micro-batch of segments of ``document_lengths`` tokens, in packed order, among ``cp_size`` ranks.

    ``workload`` prices the shards for all but the static strategies: that of one GPU without context parallelism
    (``cp`` = 1, any ``tp``); default ``make_workload("7b", "h100")``. The same arguments give the same plan. Raises
    ``UserError`` for an unknown strategy, a ``cp_size`` below 1, no documents, and lengths that are not whole numbers
    of at least 1.
    """
    lengths = _checked(document_lengths)
    micro_batch = MicroBatches(lengths, np.array([len(lengths)]))
    pieces = shard_many(micro_batch, cp_size, strategy, workload or default_workload())
    return ShardPlan(strategy, tuple(lengths.tolist()), rank_tables(pieces, cp_size))


def shard_many(micro_batches: MicroBatches, cp_size: int, strategy: str, workload: Workload) -> Pieces:
    """The pieces that ``make_shard_plan`` makes of each micro-batch; arguments and errors as there."""
    shard = STRATEGIES[checked_strategy(strategy)]
    if cp_size < 1:
        raise UserError(f"cp_size = {cp_size} is not a group size; it must be at least 1")
    return shard(micro_batches, cp_size, workload)


def checked_strategy(name: str) -> str:
    """``name``, if a sharding strategy has it. Raises ``UserError`` otherwise."""
    if name not in STRATEGIES:
        raise UserError(f"sharding strategy {name!r} is unknown; {choose_from(name, STRATEGIES)}")
    return name


def check_group_size(cp: int) -> None:
    """Raise ``UserError`` for a context-parallel group that is not simulated."""
    if not 1 <= cp <= MOST_RANKS:
        raise UserError(f"cp = {cp} is not a group size; it must be from 1 to {MOST_RANKS}")


def _checked(document_lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    lengths = np.asarray(document_lengths)
    if lengths.ndim != 1 or lengths.size == 0:
        raise UserError("a micro-batch to shard must be a list of at least one document length")
    if not np.issubdtype(lengths.dtype, np.integer):
        raise UserError(f"document lengths must be whole numbers of tokens, not {lengths.dtype}; convert them to int")
    if (shortest := int(lengths.min())) < 1:
        raise UserError(f"a document of {shortest} tokens cannot be sharded; lengths must be at least 1")
    return lengths.astype(np.int64)
