"""The price of a micro-batch: the seconds of a context-parallel group, forward and backward.

``Priced`` turns ``Shards``, what every rank computes and exchanges, into seconds. It is the only price of a
micro-batch: sharding chooses by it, plans are arranged and listed by it, and the simulator and the report add it up.
Packers alone, who need prices that add up over documents, use W_a + W_l.

A rank pays for attention over its pieces, W_l of its tokens, and copies in memory of what it exchanges. How
``wlb.attention.packed_attention`` runs a layer decides where ranks wait. In the forward, keys and values arrive in
parts: the rank attends its own tokens first, and then each part while the next is on its way. In the backward, the
received parts come first, and returning the gradients of each part overlaps with the following work. A rank waits for
the ranks that it shares segments with: a message has arrived when the busiest of them has moved all of its data. Ranks
that did not keep what they received get it again, in parts, while they compute the work between two attention layers.

Every layer takes an equal share of the seconds, so all layers together wait as a single one does.
"""

from collections.abc import Callable, Container, Iterable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.sharding.pieces import Shards
from wlb.sharding.plan import MOST_PARTS, PART_CUTS
from wlb.workload import Costs
from wlb.workload.base import Phase, Seconds

# ``PART_CUTS`` by row, padded with empty parts; row 0 is for a micro-batch without documents.
_CUTS = np.array([[*cuts, *[1.0] * (1 + MOST_PARTS - len(cuts))] for cuts in [PART_CUTS[1], *PART_CUTS.values()]])
GROUP_CAUSES = frozenset({"recomputation", "tp collectives", "expert exchange", "cp exchange"})  # beside computing


class Phases(NamedTuple):
    """Seconds of forwards and of backwards."""

    forward: Seconds
    backward: Seconds

    @classmethod
    def of(cls, price: Callable[[ArrayLike, Phase], Seconds], tokens: ArrayLike) -> Self:
        """``price`` of ``tokens`` in both directions."""
        return cls(price(tokens, "forward"), price(tokens, "backward"))

    @property
    def both(self) -> Seconds:
        return self.forward + self.backward


def attending_seconds(own: Seconds, received: Seconds, exchange: Seconds, parts: NDArray[np.int64]) -> Seconds:
    """Attention of ranks, first over their ``own`` keys, then over each part of the ``received`` keys when it arrives.

    Ranks are the last axis. The keys of each rank arrive within ``exchange`` seconds, in ``parts`` parts per group. A
    backward that kept the received keys takes as long: it begins with them, and their gradients leave part by part,
    which is the forward in reverse, as ``PART_CUTS`` are symmetric.
    """
    done = own
    for begin, end in _cuts(parts):
        done = np.maximum(done, exchange * end) + received * (end - begin)
    return done


def attending_again(
    own: Seconds, received: Seconds, exchange: Seconds, parts: NDArray[np.int64], ahead: Seconds | float
) -> Seconds:
    """Attention of a backward that gets parts again, sent ``ahead`` seconds early; gradients leave after them."""
    attended, home = np.zeros_like(exchange), np.maximum(0.0, exchange - ahead)
    for begin, end in _cuts(parts):
        attended = np.maximum(attended, exchange * end - ahead) + received * (end - begin)
        home = np.maximum(home, attended) + exchange * (end - begin)
    return np.maximum(attended + own, np.where(exchange > 0, home, 0.0))


def _cuts(parts: NDArray[np.int64]) -> Iterable[tuple[Seconds, Seconds]]:
    """Where each part of many groups begins and ends, with an axis for ranks; the last parts may be empty."""
    return pairwise(np.moveaxis(_CUTS[parts], -1, 0)[..., None])


def _group_phases(
    shards: Shards, blocks: Phases, costs: Costs, modelled: Container[str], together: Callable[[Seconds], Seconds]
) -> Phases:
    exchange, forward, backward = _beside_attention(shards, blocks, costs, modelled)
    launching, launching_backward = (costs.host_seconds(shards.tokens, phase) for phase in ("forward", "backward"))
    own, parts, kept, ahead = shards.own_share * shards.attention_forward, shards.parts, shards.kept, 1.0
    attending = attending_seconds(own, shards.attention_forward - own, exchange, parts)
    if "recomputation" in modelled and costs.recomputed != "none":
        backward, launching_backward = backward + forward, launching_backward + launching
        if costs.recomputed == "full":
            backward = backward + attending
            kept = np.ones_like(kept)  # kept from the second forward
        else:
            ahead = 0.0  # keys and values exist only after recomputation
    own = shards.own_share * shards.attention_backward
    received = shards.attention_backward - own
    again = attending_again(own, received, exchange, parts, backward * ahead)
    attending_backward = np.where(kept[..., None], attending_seconds(own, received, exchange, parts), again)
    forward, backward = attending + forward, attending_backward + backward
    return Phases(together(np.maximum(forward, launching)), together(np.maximum(backward, launching_backward)))


def _beside_attention(
    shards: Shards, blocks: Phases, costs: Costs, modelled: Container[str]
) -> tuple[Seconds, Seconds, Seconds]:
    """Seconds of the exchange of each rank, and of its work beside attention, forward and backward."""
    rest = [*blocks]
    if "tp collectives" in modelled:
        exchanged = costs.tp_seconds(shards.tokens)
        rest = [seconds + exchanged for seconds in rest]
    if "expert exchange" in modelled and costs.ep > 1:
        exchanged = costs.expert_seconds(_of_experts(shards.tokens, costs, np.max))
        rest = [seconds + exchanged for seconds in rest]
    exchange, cp = np.zeros(shards.waits_for.shape), shards.tokens.shape[-1]
    if "cp exchange" not in modelled or cp == 1:
        return exchange, rest[0], rest[1]
    if costs.gathers_context:
        others = shards.tokens.sum(axis=-1, keepdims=True) - shards.tokens
        gathered, none = costs.exchange_seconds(others, cp), np.zeros_like(others)
        rest, copied = [seconds + gathered for seconds in rest], (none, others, none)
    else:
        exchange = costs.exchange_seconds(shards.waits_for, cp)
        copied = shards.sent, shards.received, shards.parts[..., None] * shards.merged_tokens
    forward, backward = rest
    alone = shards.alone[..., None]
    forward = forward + costs.copy_seconds(*copied, "forward", alone)
    return exchange, forward, backward + costs.copy_seconds(*copied, "backward", alone)


class Priced(NamedTuple):
    """Seconds of groups for micro-batches, in all ``blocks`` and in the output ``head``; shape (..., micro_batches)."""

    blocks: Phases
    head: Phases

    @classmethod
    def of(
        cls,
        shards: Shards,
        costs: Costs,
        computing: tuple[Phases, Phases] | None = None,
        modelled: Container[str] = GROUP_CAUSES,
        together: Callable[[Seconds], Seconds] = partial(np.max, axis=-1),
    ) -> Self:
        """The only price of micro-batches; ``computing`` is ``computing_seconds``, if it is known already.

        Only the ``modelled`` of ``GROUP_CAUSES`` take time beside computing, and ``together`` reduces the seconds of
        ranks to those of their group, by default to those of the slowest.
        """
        blocks, head = computing or computing_seconds(shards, costs)
        return cls(_group_phases(shards, blocks, costs, modelled, together), Phases(*map(together, head)))

    @property
    def whole(self) -> Phases:
        """Seconds of all layers, head and loss."""
        return Phases(self.blocks.forward + self.head.forward, self.blocks.backward + self.head.backward)


def computing_seconds(shards: Shards, costs: Costs) -> tuple[Phases, Phases]:
    """Seconds of ranks outside attention, in all blocks and in the output head; shape (..., micro_batches, cp)."""
    tokens = shards.tokens
    routed = _of_experts(tokens, costs, np.mean) if costs.ep > 1 else None
    blocks = Phases.of(lambda tokens, phase: costs.blocks_seconds(tokens, phase, routed), tokens)
    return blocks, Phases.of(costs.head_seconds, tokens)


def _of_experts(tokens: NDArray[np.int64], costs: Costs, reduced: Callable[..., Any]) -> NDArray[Any]:
    """The ``reduced`` tokens of the ranks that share experts, for each of them; shape of ``tokens``.

    Those are ``costs.ep_ranks`` ranks in a row of the pool. If the pool has fewer, it shares them with the next pools:
    those of the second axis, if shards have one (steps, pools, micro-batches, ranks); else all pools are alike.
    """
    lanes = np.moveaxis(tokens, 1, 2) if tokens.ndim == 4 else tokens
    flat = lanes.reshape(*lanes.shape[:-2], -1) if tokens.ndim == 4 else lanes
    size = min(costs.ep_ranks, flat.shape[-1])
    of_groups = reduced(flat.reshape(*flat.shape[:-1], -1, size), axis=-1)
    each = np.repeat(of_groups, size, axis=-1).reshape(lanes.shape)
    return np.moveaxis(each, 1, 2) if tokens.ndim == 4 else each


def over_stages(blocks: Seconds, head: Seconds, shares: Seconds, head_shares: Seconds, inner: int = 0) -> Seconds:
    """Seconds of stages, from those of all blocks and of the head, by the share of each stage.

    The axis of stages comes before that of micro-batches, which ``inner`` axes follow. Shares have shape (stages,), or
    that of the result without ``inner`` axes.
    """
    of_stage = (share[..., None] if share.ndim == 1 else share for share in (shares, head_shares))
    shares, head_shares = (share.reshape(*share.shape, *[1] * inner) for share in of_stage)
    blocks, head = (np.expand_dims(seconds, seconds.ndim - 1 - inner) for seconds in (blocks, head))
    return np.asarray(shares * blocks + head_shares * head)
