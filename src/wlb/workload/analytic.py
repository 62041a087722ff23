"""W_a and W_l computed from the model's shape and the hardware's rates.

Both come out as polynomials with two coefficients each, so that pricing a document is two multiplications:

    W_a(d) = pair_seconds * d (d + 1) / 2 + padding_seconds * d         a document of d tokens
    W_l(T) = fixed_seconds + token_seconds * T                          a micro-batch of T tokens

Blocks with a sliding window add window_pair_seconds for each pair inside it, which beyond the window grows with d.
What a whole launch of the attention kernel costs beside its documents is no part of W_a (``drain_seconds``).
``analytic_workload`` derives the coefficients (docs/workload.md has the formulas); ``AnalyticWorkload`` holds
and evaluates them.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import lru_cache
from operator import add

import numpy as np
from numpy.typing import ArrayLike

from wlb.errors import UserError
from wlb.workload.base import EXCHANGES, Phase, Seconds
from wlb.workload.flops import (
    ATTENTION_BACKWARD_FACTOR,
    LINEAR_BACKWARD_FACTOR,
    elementwise_values_per_token,
    gemm_flops_per_token,
    pair_flops,
    windowed_pairs,
)
from wlb.workload.hardware import Hardware
from wlb.workload.links import group_link, shard_bytes
from wlb.workload.shapes import ModelShape
from wlb.workload.weights import latent_expansion

QUERY_TILE = 128  # queries in a tile of FlashAttention-2 and -3 at head_dim 128 (arXiv 2307.08691, 2407.08608)
# Values read and written in a rank's memory, by counting the operations of ``wlb.attention``, each a kernel of its own;
# one in float32 counts twice. For each value of K and V that a rank sends: picking and stacking it, 4; its
# gradient, when it returns, is added in float32, 13.
_SENT = {"forward": 4.0, "backward": 13.0, "both": 17.0}
# For each that it receives: lining it up, 2; backward again, and clearing the gradients and putting them in place, 3.
_RECEIVED = {"forward": 2.0, "backward": 5.0, "both": 7.0}
# For each value of a query that attends a part of what was received: picking it, 2, and merging two outputs in float32,
# 15; backward, picking query, output and its gradient, 6, and adding the query's, 7.
_MERGED = {"forward": 17.0, "backward": 13.0, "both": 30.0}
# Less where a segment is alone: its rows follow each other, so queries need not be picked, and all is added in place.
_SENT_ALONE = {"forward": 4.0, "backward": 5.0, "both": 9.0}
_MERGED_ALONE = {"forward": 11.0, "backward": 3.0, "both": 14.0}
_ENDS = 0.5  # embedding and output head together, in blocks' collectives


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """The coefficients of one phase, in seconds."""

    pair_seconds: float  # for each attended query-key pair
    padding_seconds: float  # for each token of a document, in attention
    fixed_seconds: float  # for each micro-batch
    token_seconds: float  # for each token outside attention
    window_pair_seconds: float = 0.0  # for each query-key pair inside the window, of blocks that have one
    drain_seconds: float = 0.0  # for each key of a launch's longest document
    window_drain_seconds: float = 0.0  # for each of these inside the window, of blocks that have one

    def __add__(self, other: PhaseCost) -> PhaseCost:
        return PhaseCost(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class AnalyticWorkload:
    """A ``Workload`` whose prices are polynomials of length and token count.

    Moving keys and values between context-parallel ranks is priced for one GPU of a tensor-parallel group of ``tp``. In
    every layer the forward brings a rank the K and V that it attends and other ranks hold, and the backward returns
    their gradients the same way. A document that lies whole on one rank moves nothing. Links carry them while a rank
    attends; but what travels is also brought together and taken apart in the rank's memory, and attention waits for it.
    """

    forward: PhaseCost
    backward: PhaseCost
    both: PhaseCost
    shape: ModelShape
    hardware: Hardware
    tp: int

    def attention_seconds(self, lengths: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_a of each document alone; shape of ``lengths`` (tokens)."""
        cost = self._cost(phase)
        return self._over_documents(lengths, cost, cost.pair_seconds / 2 + cost.padding_seconds)

    def piece_seconds(self, starts: ArrayLike, stops: ArrayLike, phase: Phase = "both") -> Seconds:
        """Attention of pieces of documents: queries ``starts`` to ``stops``, keys 0 to ``stops`` (tokens).

        What the document costs up to ``stops`` less what it costs up to ``starts``; and a last tile of queries that is
        not full costs as much as a full one. A document's first piece is priced as a document of its length.
        """
        start, stop = np.asarray(starts), np.asarray(stops)
        until_start, until_last, until_stop = self.attention_seconds(np.stack([start, stop - 1, stop]), phase)
        idle_queries = np.where(start > 0, -(stop - start) % QUERY_TILE, 0)
        seconds: Seconds = until_stop - until_start + idle_queries * (until_stop - until_last)
        return seconds

    def drain_seconds(self, stops: ArrayLike, phase: Phase = "both") -> Seconds:
        """What a micro-batch's attention takes beside its documents, as ``Workload`` says; shape of ``stops``."""
        cost, keys = self._cost(phase), np.asarray(stops, dtype=np.float64)
        seconds: Seconds = cost.drain_seconds * keys
        if self.shape.sliding_window is not None:
            seconds = seconds + cost.window_drain_seconds * np.minimum(keys, self.shape.sliding_window)
        return seconds

    def linear_seconds(self, tokens: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_l of micro-batches of ``tokens`` tokens; an empty one costs nothing; shape of ``tokens``."""
        cost = self._cost(phase)
        count = np.asarray(tokens, dtype=np.float64)
        return np.where(count > 0, cost.fixed_seconds + cost.token_seconds * count, 0.0)

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """W_a plus the part of W_l that grows with tokens, forward and backward; shape of ``lengths``."""
        cost = self.both
        return self._over_documents(lengths, cost, cost.pair_seconds / 2 + cost.padding_seconds + cost.token_seconds)

    def kv_gather_seconds(self, tokens: ArrayLike, cp_size: int, nodes: int | None = None) -> Seconds:
        """Receiving K and V of ``tokens`` tokens from other ranks, returning their gradients; shape of ``tokens``."""
        link = group_link(self.hardware, "all_to_all", cp_size, self.tp, nodes)
        seconds: Seconds = EXCHANGES * self.shape.layers * link.seconds(np.asarray(tokens) * self._token_bytes)
        return seconds

    def kv_copy_seconds(
        self,
        sent: ArrayLike,
        received: ArrayLike,
        merged: ArrayLike,
        phase: Phase = "both",
        alone: ArrayLike = False,
    ) -> Seconds:
        """What a rank spends in memory on its part of an exchange, as ``Workload`` says."""
        of_sent = np.where(alone, _SENT_ALONE[phase], _SENT[phase])
        of_merged = np.where(alone, _MERGED_ALONE[phase], _MERGED[phase])
        moved = of_sent * np.asarray(sent) + _RECEIVED[phase] * np.asarray(received)
        query_bytes = self.shape.heads * self.shape.head_dim / self.tp * self.hardware.bytes_per_value
        touched = self._token_bytes * moved + query_bytes * of_merged * np.asarray(merged)
        layers = self.shape.layers
        seconds: Seconds = layers / self.hardware.memory_bandwidth * touched
        if expansion := latent_expansion(self.shape):
            factor = {"forward": 1.0, "backward": LINEAR_BACKWARD_FACTOR, "both": 1.0 + LINEAR_BACKWARD_FACTOR}[phase]
            rate = self.hardware.peak_flops * self.hardware.gemm_efficiency * self.tp
            seconds = seconds + layers * factor * 2.0 * expansion / rate * np.asarray(received)
        return seconds

    @property
    def _token_bytes(self) -> float:
        """Of the K and V of a token in one layer."""
        return _exchanged_values(self.shape, self.tp) * self.hardware.bytes_per_value

    def _over_documents(self, lengths: ArrayLike, cost: PhaseCost, linear: float) -> Seconds:
        """Attention of full blocks, with ``linear`` seconds a token, and that of blocks with a window."""
        d = np.asarray(lengths, dtype=np.float64)
        seconds: Seconds = d * (cost.pair_seconds / 2 * d + linear)
        if self.shape.sliding_window is not None:
            seconds = seconds + cost.window_pair_seconds * windowed_pairs(d, self.shape.sliding_window)
        return seconds

    def _cost(self, phase: Phase) -> PhaseCost:
        return {"forward": self.forward, "backward": self.backward, "both": self.both}[phase]


def analytic_workload(shape: ModelShape, hardware: Hardware, tp: int = 1, cp: int = 1) -> AnalyticWorkload:
    """Price ``shape`` on one GPU of a group of ``tp`` x ``cp``, whose context-parallel shards are balanced.

    Raises ``UserError`` if ``tp`` or ``cp`` is below 1 or ``tp`` does not divide the heads.
    """
    for name, value in (("tp", tp), ("cp", cp)):
        if value < 1:
            raise UserError(f"{name} = {value} is not a group size; it must be at least 1")
    if shape.heads % tp or shape.kv_heads % tp:
        raise UserError(
            f"tp = {tp} does not divide {shape.heads} query heads and {shape.kv_heads} key/value heads; "
            "choose a tp that divides both"
        )
    return _analytic_workload(shape, hardware, tp, cp)


@lru_cache(maxsize=256)
def _analytic_workload(shape: ModelShape, hardware: Hardware, tp: int, cp: int) -> AnalyticWorkload:
    forward = _phase_cost(shape, hardware, tp, cp, backward=False)
    backward = _phase_cost(shape, hardware, tp, cp, backward=True)
    return AnalyticWorkload(forward, backward, forward + backward, shape, hardware, tp)


def _phase_cost(shape: ModelShape, hardware: Hardware, tp: int, cp: int, *, backward: bool) -> PhaseCost:
    share = 1.0 / (tp * cp)
    of_pair = pair_flops(shape)
    head_flops = 2.0 * shape.vocab_size * shape.hidden
    expert_flops = _routed_flops(shape)
    block_flops = gemm_flops_per_token(shape) - head_flops - expert_flops + expert_flops / hardware.grouped_rate
    token_flops = block_flops / hardware.block_rate + head_flops
    kernel = hardware.attention
    rate = kernel.backward_flops if backward else kernel.forward_flops
    half_length = kernel.backward_half_length if backward else kernel.forward_half_length
    if backward:
        of_pair *= ATTENTION_BACKWARD_FACTOR
        token_flops *= LINEAR_BACKWARD_FACTOR
    pair_seconds = share * (shape.layers_of("full") * of_pair) / rate
    window_pair_seconds = share * (shape.layers_of("sliding") * of_pair) / rate
    drain_tiles = 0.0 if backward else kernel.drain_tiles
    of_drain = drain_tiles * QUERY_TILE * of_pair / shape.heads / rate
    gemm_rate = hardware.peak_flops * hardware.gemm_efficiency
    element_values = elementwise_values_per_token(shape)[backward] * hardware.elementwise_passes
    element_bytes = element_values * hardware.bytes_per_value
    collective_seconds, fixed_seconds = _collectives(shape, hardware, tp, cp)
    return PhaseCost(
        pair_seconds=pair_seconds,
        padding_seconds=(pair_seconds + window_pair_seconds) * half_length / 2,
        fixed_seconds=fixed_seconds,
        token_seconds=share * (token_flops / gemm_rate + element_bytes / hardware.memory_bandwidth)
        + collective_seconds,
        window_pair_seconds=window_pair_seconds,
        drain_seconds=shape.layers_of("full") * of_drain,
        window_drain_seconds=shape.layers_of("sliding") * of_drain,
    )


def _routed_flops(shape: ModelShape) -> float:
    """Forward operations for one token of the experts that the router chooses, all layers."""
    if shape.experts is None:
        return 0.0
    layers = sum(count for kind, count in shape.blocks.items() if kind.routed)
    return 2.0 * layers * 3 * shape.hidden * shape.experts.active * shape.experts.ffn_hidden


def _collectives(shape: ModelShape, hardware: Hardware, tp: int, cp: int) -> tuple[float, float]:
    """Seconds for each token, and for each micro-batch, of the collectives of one forward (or backward).

    Every block gathers and reduce-scatters the residual stream twice over tp (sequence parallelism, arXiv
    2205.05198), as embedding and output head do once, and exchanges K and V once over cp, every rank receiving all
    others'. A backward's collectives are the forward's, mirrored.
    """
    tp_link = group_link(hardware, "all_gather", tp, stride=1)
    cp_link = group_link(hardware, "all_to_all", cp, stride=tp)
    tp_values, cp_values = 4.0 * shape.hidden / cp, _exchanged_values(shape, tp)
    per_token = fixed = 0.0
    if tp > 1:
        per_token += shard_bytes((shape.layers + _ENDS) * tp_values * hardware.bytes_per_value, tp) / tp_link.bandwidth
        fixed += (shape.layers + _ENDS) * 4 * tp_link.latency
    if cp > 1:
        per_token += shard_bytes(shape.layers * cp_values * hardware.bytes_per_value, cp) / cp_link.bandwidth
        fixed += shape.layers * cp_link.latency
    return per_token, fixed


def _exchanged_values(shape: ModelShape, tp: int) -> float:
    """What a tensor-parallel rank receives of a token of another context-parallel rank, in one layer."""
    if shape.latent is not None:
        return float(shape.latent.kv_rank + shape.latent.rope_dim)
    return 2.0 * shape.kv_heads * shape.head_dim / tp
