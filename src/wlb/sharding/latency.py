"""Predicted seconds of every context-parallel rank under a shard plan.

A piece of queries ``start`` to ``stop`` attends the keys up to its diagonal, so it costs what the segment costs up to
``stop`` without what it costs up to ``start``. Attention kernels work on tiles of 128 queries, and a tile that is not
full costs as much as a full one: chunks of short documents waste most of it (WLB-LLM, section 5.2). To this come W_l
for the tokens that the rank holds and the time to gather the keys and values of cut segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.plan import ShardPlan, Table, owners, receivers
from wlb.workload.base import Workload

QUERY_TILE = 128  # queries a tile of FlashAttention-2 and -3 holds at head_dim 128


@dataclass(frozen=True)
class ShardLatency:
    """Seconds of each rank, forward and backward over all layers; arrays have shape (cp_size,)."""

    attention: NDArray[np.float64]
    linear: NDArray[np.float64]
    gather: float
    gathered_tokens: int  # whose keys and values another rank attends

    @property
    def ranks(self) -> NDArray[np.float64]:
        return self.attention + self.linear + self.gather

    @property
    def slowest(self) -> float:
        return float(self.ranks.max())

    @property
    def imbalance(self) -> float:
        """Slowest over mean rank."""
        return float(self.ranks.max() / self.ranks.mean())


def shard_latency(plan: ShardPlan, workload: Workload) -> ShardLatency:
    """Price ``plan`` with the ``workload`` of one GPU without context parallelism (``cp`` = 1)."""
    return price_pieces(plan.pieces, np.asarray(plan.segment_lengths), workload)


def slowest_seconds(pieces: tuple[Table, ...], lengths: NDArray[np.int64], workload: Workload) -> float:
    """Seconds of the slowest rank."""
    return price_pieces(pieces, lengths, workload).slowest


def price_pieces(pieces: tuple[Table, ...], lengths: NDArray[np.int64], workload: Workload) -> ShardLatency:
    """Price every rank's ``pieces`` of segments of ``lengths`` tokens."""
    table = np.concatenate(pieces)
    owner, lengths_of_pieces = owners(pieces), table[:, 2] - table[:, 1]
    attend = receivers(pieces)
    received = attend @ lengths_of_pieces
    sent = np.bincount(owner, attend.sum(axis=0) * lengths_of_pieces, len(pieces))
    return ShardLatency(
        attention=np.bincount(owner, piece_seconds(table, lengths, workload), len(pieces)).astype(np.float64),
        linear=workload.linear_seconds(np.bincount(owner, lengths_of_pieces, len(pieces))),
        gather=float(workload.kv_gather_seconds(max(received.max(), sent.max()), len(pieces))),
        gathered_tokens=int(lengths_of_pieces[attend.any(axis=0)].sum()),
    )


def piece_seconds(table: Table, segment_lengths: NDArray[np.int64], workload: Workload) -> NDArray[np.float64]:
    """Attention seconds of each piece (segment, start, stop), forward and backward."""
    _, start, stop = table.T
    until_stop, until_start, until_last = workload.attention_seconds(np.stack([stop, start, stop - 1]))
    idle_queries = -(stop - start) % QUERY_TILE
    whole = (start == 0) & (stop == segment_lengths[table[:, 0]])
    # What a whole segment costs is measured or fitted as it is, unfilled tile included.
    seconds: NDArray[np.float64] = (
        until_stop - until_start + np.where(whole, 0.0, idle_queries * (until_stop - until_last))
    )
    return seconds
