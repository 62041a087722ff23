"""W_a and W_l computed from the model's shape and the hardware's rates.

Both come out as polynomials with two coefficients each, so that pricing a document is two multiplications:

    W_a(d) = pair_seconds * d (d + 1) / 2 + padding_seconds * d         a document of d tokens
    W_l(T) = fixed_seconds + token_seconds * T                          a micro-batch of T tokens

``analytic_workload`` derives the coefficients (docs/workload.md has the formulas); ``AnalyticWorkload`` holds
and evaluates them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from wlb.errors import UserError
from wlb.workload.base import EXCHANGES, Phase, Seconds
from wlb.workload.flops import (
    ATTENTION_BACKWARD_FACTOR,
    LINEAR_BACKWARD_FACTOR,
    elementwise_values_per_token,
    gemm_flops_per_token,
)
from wlb.workload.hardware import Hardware
from wlb.workload.links import group_link, shard_bytes
from wlb.workload.shapes import ModelShape

QUERY_TILE = 128  # queries in a tile of FlashAttention-2 and -3 at head_dim 128 (arXiv 2307.08691, 2407.08608)
# Values read and written in a rank's memory, by counting the operations of ``wlb.attention``, each a kernel of its own.
# For each value of K and V that it sends: picking and stacking it, 4; its gradient, when it returns, is added in
# float32, which counts twice where values are half as wide, 13.
_SENT = {"forward": 4.0, "backward": 13.0, "both": 17.0}
# For each that it receives: lining it up, 2; backward again, and clearing the gradients and putting them in place, 3.
_RECEIVED = {"forward": 2.0, "backward": 5.0, "both": 7.0}
# For each value of a query that attends a part of what was received: picking it, 2, and merging two outputs in float32,
# 19; backward, picking query, output and its gradient, 6, and adding the query's, 7.
_MERGED = {"forward": 21.0, "backward": 13.0, "both": 34.0}


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """The coefficients of one phase, in seconds."""

    pair_seconds: float  # for each attended query-key pair
    padding_seconds: float  # for each token of a document, in attention
    fixed_seconds: float  # for each micro-batch
    token_seconds: float  # for each token outside attention

    def __add__(self, other: PhaseCost) -> PhaseCost:
        return PhaseCost(
            self.pair_seconds + other.pair_seconds,
            self.padding_seconds + other.padding_seconds,
            self.fixed_seconds + other.fixed_seconds,
            self.token_seconds + other.token_seconds,
        )


@dataclass(frozen=True, slots=True)
class KvGather:
    """What moving keys and values between context-parallel ranks costs one GPU of a tensor-parallel group of ``tp``.

    In every layer the forward brings a rank the K and V that it attends and other ranks hold, and the backward returns
    their gradients the same way. A document that lies whole on one rank moves nothing. Links carry them while a rank
    attends; but what travels is also brought together and taken apart in the rank's memory, and attention waits for it.
    """

    shape: ModelShape
    hardware: Hardware
    tp: int

    @property
    def _token_bytes(self) -> float:
        """Of the K and V of a token in one layer."""
        return 2 * self.shape.kv_heads * self.shape.head_dim / self.tp * self.hardware.bytes_per_value

    def seconds(self, tokens: ArrayLike, cp_size: int) -> Seconds:
        """Forward and backward, all layers, of receiving (or sending) ``tokens`` tokens in a group of ``cp_size``."""
        link = group_link(self.hardware, "all_to_all", cp_size, stride=self.tp)
        return EXCHANGES * self.shape.layers * link.seconds(np.asarray(tokens) * self._token_bytes)

    def copy_seconds(self, sent: ArrayLike, received: ArrayLike, merged: ArrayLike, phase: Phase = "both") -> Seconds:
        """All layers, of ranks that send and receive so many tokens, and ``merged`` of which attend part by part."""
        moved = _SENT[phase] * np.asarray(sent) + _RECEIVED[phase] * np.asarray(received)
        query_bytes = self.shape.heads * self.shape.head_dim / self.tp * self.hardware.bytes_per_value
        touched = self._token_bytes * moved + query_bytes * _MERGED[phase] * np.asarray(merged)
        seconds: Seconds = self.shape.layers / self.hardware.memory_bandwidth * touched
        return seconds


@dataclass(frozen=True, slots=True)
class AnalyticWorkload:
    """A ``Workload`` whose prices are polynomials of length and token count."""

    forward: PhaseCost
    backward: PhaseCost
    both: PhaseCost
    kv_gather: KvGather

    def attention_seconds(self, lengths: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_a of each document alone; shape of ``lengths`` (tokens)."""
        cost = self._cost(phase)
        return _quadratic(lengths, cost.pair_seconds / 2, cost.pair_seconds / 2 + cost.padding_seconds)

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

    def linear_seconds(self, tokens: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_l of micro-batches of ``tokens`` tokens; an empty one costs nothing; shape of ``tokens``."""
        cost = self._cost(phase)
        count = np.asarray(tokens, dtype=np.float64)
        return np.where(count > 0, cost.fixed_seconds + cost.token_seconds * count, 0.0)

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """W_a plus the part of W_l that grows with tokens, forward and backward; shape of ``lengths``."""
        cost = self.both
        linear = cost.pair_seconds / 2 + cost.padding_seconds + cost.token_seconds
        return _quadratic(lengths, cost.pair_seconds / 2, linear)

    def kv_gather_seconds(self, tokens: ArrayLike, cp_size: int) -> Seconds:
        """Receiving K and V of ``tokens`` tokens from other ranks, returning their gradients; shape of ``tokens``."""
        return self.kv_gather.seconds(tokens, cp_size)

    def kv_copy_seconds(
        self, sent: ArrayLike, received: ArrayLike, merged: ArrayLike, phase: Phase = "both"
    ) -> Seconds:
        """What a rank spends in memory on its part of an exchange, as ``Workload`` says."""
        return self.kv_gather.copy_seconds(sent, received, merged, phase)

    def _cost(self, phase: Phase) -> PhaseCost:
        return {"forward": self.forward, "backward": self.backward, "both": self.both}[phase]


def analytic_workload(shape: ModelShape, hardware: Hardware, tp: int = 1, cp: int = 1) -> AnalyticWorkload:
    """Price ``shape`` on one GPU of a group of ``tp`` x ``cp``, whose context-parallel shards are balanced.

    Raises ``UserError`` if ``tp`` or ``cp`` is below 1 or ``tp`` does not divide the heads.
    """
    _check(shape, tp, cp)
    forward = _phase_cost(shape, hardware, tp, cp, backward=False)
    backward = _phase_cost(shape, hardware, tp, cp, backward=True)
    return AnalyticWorkload(forward, backward, forward + backward, KvGather(shape, hardware, tp))


def _phase_cost(shape: ModelShape, hardware: Hardware, tp: int, cp: int, *, backward: bool) -> PhaseCost:
    share = 1.0 / (tp * cp)
    pair_flops = shape.layers * 4.0 * shape.heads * shape.head_dim
    token_flops = gemm_flops_per_token(shape)
    rate = hardware.attention_backward_flops if backward else hardware.attention_forward_flops
    if backward:
        pair_flops *= ATTENTION_BACKWARD_FACTOR
        token_flops *= LINEAR_BACKWARD_FACTOR
    pair_seconds = share * pair_flops / rate
    gemm_rate = hardware.peak_flops * hardware.gemm_efficiency
    element_bytes = elementwise_values_per_token(shape)[backward] * hardware.bytes_per_value
    collective_seconds, fixed_seconds = _collectives(shape, hardware, tp, cp)
    return PhaseCost(
        pair_seconds=pair_seconds,
        padding_seconds=pair_seconds * hardware.attention_half_length / 2,
        fixed_seconds=fixed_seconds,
        token_seconds=share * (token_flops / gemm_rate + element_bytes / hardware.memory_bandwidth)
        + collective_seconds,
    )


def _collectives(shape: ModelShape, hardware: Hardware, tp: int, cp: int) -> tuple[float, float]:
    """Seconds for each token, and for each micro-batch, of the collectives of one forward (or backward).

    Every block gathers and reduce-scatters the residual stream twice over tp (sequence parallelism, arXiv
    2205.05198) and exchanges K and V once over cp, every rank receiving all others'. A backward's collectives are the
    forward's, mirrored.
    """
    tp_link = group_link(hardware, "all_gather", tp, stride=1)
    cp_link = group_link(hardware, "all_to_all", cp, stride=tp)
    tp_values = 4.0 * shape.hidden / cp
    cp_values = 2.0 * shape.kv_heads * shape.head_dim / tp
    per_token = fixed = 0.0
    for values, calls, size, link in ((tp_values, 4, tp, tp_link), (cp_values, 1, cp, cp_link)):
        if size == 1:
            continue
        per_token += shard_bytes(shape.layers * values * hardware.bytes_per_value, size) / link.bandwidth
        fixed += shape.layers * calls * link.latency
    return per_token, fixed


def _quadratic(lengths: ArrayLike, square: float, linear: float) -> Seconds:
    d = np.asarray(lengths, dtype=np.float64)
    seconds: Seconds = d * (square * d + linear)
    return seconds


def _check(shape: ModelShape, tp: int, cp: int) -> None:
    for name, value in (("tp", tp), ("cp", cp)):
        if value < 1:
            raise UserError(f"{name} = {value} is not a group size; it must be at least 1")
    if shape.heads % tp or shape.kv_heads % tp:
        raise UserError(
            f"tp = {tp} does not divide {shape.heads} query heads and {shape.kv_heads} key/value heads; "
            "choose a tp that divides both"
        )
