"""Predicted seconds of a shard plan: of every context-parallel rank, and of the group, which synchronises every layer.

A rank pays attention over its pieces, W_l for the tokens that it holds, and copies in its own memory for what it
exchanges. Where ranks wait follows from how ``wlb.attention.packed_attention`` runs a layer. Forward, keys and values
arrive in parts while the rank attends its own tokens, and then each part while the next is on its way. Backward, the
received parts come first, and returning the gradients of each overlaps with what follows. A rank waits for those that
it shares segments with: a message is there when the busiest of them has moved all of its own. Ranks that did not keep
what they received have it sent again, in parts, from when they compute what lies between the attention of two layers.

Every layer takes its share of the seconds, so those of all layers wait as those of one do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.pieces import Locality, Pieces, last_keys, locality, pieces_of_rows
from wlb.sharding.plan import MOST_PARTS, PART_CUTS, ShardPlan, owners
from wlb.workload.base import EXCHANGES, Phase, Workload

# ``PART_CUTS`` by row, filled up with empty parts; a micro-batch without documents has none.
_CUTS = np.array([[*cuts, *[1.0] * (1 + MOST_PARTS - len(cuts))] for cuts in [PART_CUTS[1], *PART_CUTS.values()]])
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

    What was not kept sets out ``ahead``, while the layer above is computed, or only when attention asks for it.
    """
    again = _attending_again(ranks, exchange, parts, ranks.rest * ahead)
    attending = np.where(kept[..., None], attending_seconds(ranks, exchange, parts), again)
    return together(attending + ranks.rest)


def attending_seconds(ranks: RankSeconds, exchange: Seconds, parts: NDArray[np.int64]) -> Seconds:
    """Attention of ranks, first over their own keys, then over every part of the others when it is there.

    A backward that keeps the others takes as long: it begins with them, and their gradients leave part by part, which
    is the same in reverse, as ``PART_CUTS`` are.
    """
    done = ranks.own
    for begin, end in _cuts(parts):
        done = np.maximum(done, exchange * end) + ranks.received * (end - begin)
    return done


def _attending_again(ranks: RankSeconds, exchange: Seconds, parts: NDArray[np.int64], ahead: Seconds) -> Seconds:
    """Attention of a backward for which parts set out ``ahead`` once more; their gradients leave when all are sent."""
    attended, home = np.zeros_like(exchange), np.maximum(0.0, exchange - ahead)
    for begin, end in _cuts(parts):
        attended = np.maximum(attended, exchange * end - ahead) + ranks.received * (end - begin)
        home = np.maximum(home, attended) + exchange * (end - begin)
    return np.maximum(attended + ranks.own, np.where(exchange > 0, home, 0.0))


def _cuts(parts: NDArray[np.int64]) -> Iterable[tuple[Seconds, Seconds]]:
    """Where each part begins and ends, of many groups, with an axis for their ranks; the last ones may be empty."""
    cuts = _CUTS[parts]
    return pairwise(np.moveaxis(cuts, -1, 0)[..., None])


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
    copies = workload.kv_copy_seconds(
        where.sent, where.received, where.parts[:, None] * where.merged_tokens, phase, alone=where.alone[:, None]
    )
    return RankSeconds(own, attention - own, workload.linear_seconds(where.tokens, phase) + copies)


def _attention(pieces: Pieces, where: Locality, workload: Workload, phase: Phase) -> NDArray[np.float64]:
    """Of every rank of every plan, shape (plans, cp_size)."""
    seconds = workload.piece_seconds(pieces.start, pieces.stop, phase)
    of_lanes = np.bincount(pieces.lane, seconds, where.tokens.size).astype(np.float64)
    return (of_lanes + workload.drain_seconds(last_keys(pieces, where.tokens.size), phase)).reshape(where.tokens.shape)
