"""Seconds and tokens of every context-parallel rank, for many micro-batches at once.

``wlb.sharding.shard_many`` shards them as the trainer would; the prices are the job's (``wlb.simulate.costs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.sharding import MicroBatches, shard_many
from wlb.sharding.pieces import Pieces, last_keys, locality
from wlb.simulate.costs import Direction, JobCosts
from wlb.simulate.job import SimulatedJob


class Shards(NamedTuple):
    """What each rank of each micro-batch computes and exchanges; arrays have shape (micro_batches, cp)."""

    tokens: NDArray[np.int64]
    attention_forward: NDArray[np.float64]  # seconds
    attention_backward: NDArray[np.float64]
    own_share: NDArray[np.float64]  # of the rank's attention, which needs no keys of other ranks
    received: NDArray[np.int64]  # tokens whose keys the rank receives
    sent: NDArray[np.int64]  # tokens whose keys it sends, counted once for each receiver
    waits_for: NDArray[np.int64]  # the most tokens that it, or a rank that it shares a segment with, moves
    merged_tokens: NDArray[np.int64]  # of the rank, that attend received keys
    kept: NDArray[np.bool_]  # whether ranks keep what they receive until the backward, shape (micro_batches,)
    parts: NDArray[np.int64]  # in which keys and values arrive, shape (micro_batches,)
    alone: NDArray[np.bool_]  # whether it has one segment only, shape (micro_batches,)

    def spread(self, micro_batches: int, present: NDArray[np.int64]) -> Shards:
        """Those of ``present`` micro-batches, among ``micro_batches``; the others hold nothing."""

        def spread(column: NDArray[Any]) -> NDArray[Any]:
            everything = np.zeros((micro_batches, *column.shape[1:]), column.dtype)
            everything[present] = column
            return everything

        return Shards(*map(spread, self))

    def repeated(self, times: int) -> Shards:
        """The same with each micro-batch so many times."""

        def repeat(column: NDArray[Any]) -> NDArray[Any]:
            return np.repeat(column, times, axis=0)

        return Shards(*map(repeat, self))

    def reshaped(self, *shape: int) -> Shards:
        """The same with micro-batches arranged in ``shape``."""

        def arrange(column: NDArray[Any]) -> NDArray[Any]:
            return column.reshape(*shape, *column.shape[1:])

        return Shards(*map(arrange, self))

    def scattered(
        self, rows: NDArray[np.int64], ranks: NDArray[np.int64], shape: tuple[int, int], into: Shards | None = None
    ) -> Shards:
        """Those of a group of ranks as micro-batches ``rows``, on ``ranks`` (micro_batches, cp), of ``shape``."""

        def empty(column: NDArray[Any]) -> NDArray[Any]:
            return np.zeros(shape[: column.ndim], column.dtype)

        into = into or Shards(*map(empty, self))
        for column, table in zip(self, into, strict=True):
            table[(rows[:, None], ranks) if column.ndim == 2 else rows] = column
        return into


def price_shards(lengths: Sequence[Sequence[int]], costs: JobCosts) -> Shards:
    """Shard micro-batches with segments of ``lengths`` tokens as the job does, and price them.

    A micro-batch may be without segments; it costs nothing.
    """
    cp = costs.layout.cp
    counts = np.array([len(of_one) for of_one in lengths], np.int64)
    sizes = np.fromiter((length for of_one in lengths for length in of_one), np.int64, int(counts.sum()))
    full = np.flatnonzero(counts)
    micro_batches = MicroBatches(sizes, counts[full])
    pieces = _pieces(micro_batches, costs.job)
    where = locality(pieces, len(sizes), len(full), cp)

    longest = last_keys(pieces, where.tokens.size)

    def attention(direction: Direction) -> NDArray[np.float64]:
        seconds = costs.attention(pieces.start, pieces.stop, direction)
        of_ranks = np.bincount(pieces.lane, seconds, where.tokens.size) + costs.attention_drain(longest, direction)
        return of_ranks.astype(np.float64).reshape(where.tokens.shape)

    shards = Shards(
        where.tokens,
        attention("forward"),
        attention("backward"),
        where.own_share,
        where.received,
        where.sent,
        where.waits_for,
        where.merged_tokens,
        where.kept,
        where.parts,
        where.alone,
    )
    return shards.spread(len(lengths), full)


def _pieces(micro_batches: MicroBatches, job: SimulatedJob) -> Pieces:
    sizes, counts = micro_batches
    if job.layout.cp > 1:
        return shard_many(micro_batches, job.layout.cp, job.sharding.strategy, job.sharding_workload)
    micro_batch = np.repeat(np.arange(len(counts)), counts)
    return Pieces(micro_batch, np.arange(len(sizes)), np.zeros_like(sizes), sizes)
