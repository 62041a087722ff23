"""Predicted seconds of every context-parallel rank under a shard plan, and of the group that they make up.

A rank pays attention over its pieces, W_l for the tokens that it holds, and the exchange of keys and values, which ends
for all ranks when it ends for the one that sends or receives most. What the group takes follows from where ranks wait
for each other (``wlb.sharding.group``), and by that strategies choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.group import RankSeconds, backward_seconds, forward_seconds
from wlb.sharding.pieces import Locality, Pieces, locality, pieces_of
from wlb.sharding.plan import ShardPlan
from wlb.workload.base import EXCHANGES, Phase, Workload

_PHASES: tuple[Phase, Phase] = ("forward", "backward")


@dataclass(frozen=True)
class ShardLatency:
    """Seconds, forward and backward over all layers; arrays are of ranks, shape (cp_size,)."""

    attention: NDArray[np.float64]
    linear: NDArray[np.float64]
    gather: float
    gathered_tokens: int  # whose keys and values another rank attends
    slowest: float  # of the group, whose ranks wait for each other in every layer

    @property
    def ranks(self) -> NDArray[np.float64]:
        """Everything a rank pays for, as if nothing hid the exchange."""
        return self.attention + self.linear + self.gather

    @property
    def imbalance(self) -> float:
        """Slowest over mean rank."""
        return float(self.ranks.max() / self.ranks.mean())


def shard_latency(plan: ShardPlan, workload: Workload) -> ShardLatency:
    """Price ``plan`` with the ``workload`` of one GPU without context parallelism (``cp`` = 1)."""
    segments, cp_size = len(plan.segment_lengths), plan.cp_size
    pieces = pieces_of(plan)
    where = locality(pieces, segments, 1, cp_size)
    forward, backward = (_attention(pieces, where, workload, phase)[0] for phase in _PHASES)
    return ShardLatency(
        attention=forward + backward,
        linear=workload.linear_seconds(where.tokens[0]),
        gather=float(workload.kv_gather_seconds(where.exchanged_tokens[0], cp_size)),
        gathered_tokens=int(where.gathered_tokens[0]),
        slowest=float(group_seconds(pieces, where, workload)[0]),
    )


def group_seconds(pieces: Pieces, where: Locality, workload: Workload) -> NDArray[np.float64]:
    """What the group of each plan takes, forward and backward over all layers; shape (plans,)."""
    exchange = workload.kv_gather_seconds(where.exchanged_tokens, where.tokens.shape[1]) / EXCHANGES
    forward, backward = (_rank_seconds(pieces, where, workload, phase) for phase in _PHASES)
    waiting = forward_seconds(forward, exchange) + backward_seconds(backward, exchange, where.kept)
    return waiting + workload.kv_copy_seconds(where.exchanged_tokens)


def _rank_seconds(pieces: Pieces, where: Locality, workload: Workload, phase: Phase) -> RankSeconds:
    attention = _attention(pieces, where, workload, phase)
    own = where.own_share * attention
    return RankSeconds(own, attention - own, workload.linear_seconds(where.tokens, phase))


def _attention(pieces: Pieces, where: Locality, workload: Workload, phase: Phase) -> NDArray[np.float64]:
    """Of every rank of every plan, shape (plans, cp_size)."""
    seconds = workload.piece_seconds(pieces.start, pieces.stop, phase)
    return np.bincount(pieces.lane, seconds, where.tokens.size).astype(np.float64).reshape(where.tokens.shape)
