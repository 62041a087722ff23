"""Predicted seconds of every context-parallel rank under a shard plan.

A rank pays attention over its pieces, W_l for the tokens that it holds, and the exchange of keys and values, which ends
for all ranks when it ends for the one that sends or receives most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.plan import ShardPlan, Table, owners, receivers
from wlb.workload.base import Workload


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
    return price_pieces(plan.pieces, workload)


def price_pieces(pieces: tuple[Table, ...], workload: Workload) -> ShardLatency:
    """Price every rank's ``pieces`` (segment, start, stop)."""
    table = np.concatenate(pieces)
    owner, piece_tokens = owners(pieces), table[:, 2] - table[:, 1]
    attend = receivers(pieces)
    received = attend @ piece_tokens
    sent = np.bincount(owner, attend.sum(axis=0) * piece_tokens, len(pieces))
    return ShardLatency(
        attention=np.bincount(owner, workload.piece_seconds(table[:, 1], table[:, 2]), len(pieces)).astype(np.float64),
        linear=workload.linear_seconds(np.bincount(owner, piece_tokens, len(pieces))),
        gather=float(workload.kv_gather_seconds(max(received.max(), sent.max()), len(pieces))),
        gathered_tokens=int(piece_tokens[attend.any(axis=0)].sum()),
    )
