"""Predicted seconds of a shard plan: of every context-parallel rank, and of the group, which synchronises every layer.

A rank pays attention over its pieces, W_l for the tokens that it holds, and copies in its own memory for what it
exchanges. Where ranks wait follows from how ``wlb.attention.packed_attention`` runs a layer. Forward, keys and values
arrive in parts while the rank attends its own tokens, and then each part while the next is on its way. Backward, the
received parts come first, and returning the gradients of each overlaps with what follows. A rank waits for those that
it shares segments with: a message is there when the busiest of them has moved all of its own. Ranks that did not keep
what they received have it sent again while they compute what lies between the attention of two layers.

Every layer takes its share of the seconds, so those of all layers wait as those of one do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.pieces import Locality, Pieces, last_keys, locality, pieces_of_rows
from wlb.sharding.plan import ShardPlan, owners
from wlb.workload.base import EXCHANGES, Phase, Workload

_PHASES: tuple[Phase, Phase] = ("forward", "backward")

Seconds = NDArray[np.float64]


class RankSeconds(NamedTuple):
    """What ranks compute in a forward, or in a backward; ranks are the last axis of every array."""

    own: Seconds  # attention among the rank's own tokens
    received: Seconds  # attention over keys of other ranks
    rest: Seconds  # everything else


def slowest_rank(seconds: Seconds) -> Seconds:
    """The most over the last axis."""
    most: Seconds = seconds.max(axis=-1)
    return most


def forward_seconds(
    ranks: RankSeconds,
    exchange: Seconds,
    parts: NDArray[np.int64],
    together: Callable[[Seconds], Seconds] = slowest_rank,
) -> Seconds:
    """Seconds of groups: ``exchange`` are those in which each rank's keys arrive, in so many ``parts`` for each group.

    ``together`` makes a group's seconds of those of its ranks.
    """
    return together(attending_seconds(ranks, exchange, parts) + ranks.rest)


def backward_seconds(
    ranks: RankSeconds,
    exchange: Seconds,
    parts: NDArray[np.int64],
    kept: NDArray[np.bool_],
    together: Callable[[Seconds], Seconds] = slowest_rank,
    *,
    ahead: bool = True,
) -> Seconds:
    """As ``forward_seconds``; ``kept`` says of each group whether it keeps what it receives in the forward.

    What was not kept is sent again ``ahead``, while the layer above is computed, or only when attention asks for it.
    """
    late = np.where(kept[..., None], 0.0, np.maximum(0.0, exchange - ranks.rest) if ahead else exchange)
    return together(late + attending_seconds(ranks, exchange, parts) + ranks.rest)


def attending_seconds(ranks: RankSeconds, exchange: Seconds, parts: NDArray[np.int64]) -> Seconds:
    """Attention of ranks, and what they wait for the first or the last part, whichever holds them up longer."""
    count = np.maximum(parts, 1)[..., None]  # a micro-batch without documents has none
    first = exchange / count + ranks.received
    last = exchange + ranks.received / count
    return np.where(exchange > 0, np.maximum(first, last), 0.0).clip(min=ranks.own + ranks.received)


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
    pieces = pieces_of_rows([owners(plan.pieces)], plan.pieces)
    where = locality(pieces, segments, 1, cp_size)
    forward, backward = (_attention(pieces, where, workload, phase)[0] for phase in _PHASES)
    return ShardLatency(
        attention=forward + backward,
        linear=workload.linear_seconds(where.tokens[0]),
        gather=float(workload.kv_gather_seconds(where.waits_for[0].max(), cp_size)),
        gathered_tokens=int(where.gathered_tokens[0]),
        slowest=float(group_seconds(pieces, where, workload)[0]),
    )


def group_seconds(pieces: Pieces, where: Locality, workload: Workload) -> NDArray[np.float64]:
    """What the group of each plan takes, forward and backward over all layers; shape (plans,)."""
    exchange = workload.kv_gather_seconds(where.waits_for, where.tokens.shape[1]) / EXCHANGES
    forward, backward = (_rank_seconds(pieces, where, workload, phase) for phase in _PHASES)
    return forward_seconds(forward, exchange, where.parts) + backward_seconds(
        backward, exchange, where.parts, where.kept
    )


def _rank_seconds(pieces: Pieces, where: Locality, workload: Workload, phase: Phase) -> RankSeconds:
    attention = _attention(pieces, where, workload, phase)
    own = where.own_share * attention
    copies = workload.kv_copy_seconds(where.sent, where.received, where.parts[:, None] * where.merged_tokens, phase)
    return RankSeconds(own, attention - own, workload.linear_seconds(where.tokens, phase) + copies)


def _attention(pieces: Pieces, where: Locality, workload: Workload, phase: Phase) -> NDArray[np.float64]:
    """Of every rank of every plan, shape (plans, cp_size)."""
    seconds = workload.piece_seconds(pieces.start, pieces.stop, phase)
    of_lanes = np.bincount(pieces.lane, seconds, where.tokens.size).astype(np.float64)
    return (of_lanes + workload.drain_seconds(last_keys(pieces, where.tokens.size), phase)).reshape(where.tokens.shape)
