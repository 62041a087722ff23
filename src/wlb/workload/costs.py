"""The seconds of one GPU for a micro-batch, term by term: the only prices of packing, sharding and simulation.

Every term, a method of ``Costs``, is a number of seconds over all layers, for the tokens of one context-parallel rank.
Terms are counted from the shape of the model and the rates of the device (docs/workload.md has the formulas). A
measured profile replaces attention, and blocks and head together. ``wlb.sharding.latency`` sums the terms to seconds of
a context-parallel group. ``attention_seconds`` (W_a), ``linear_seconds`` (W_l) and ``document_seconds`` are for a
group of ``cp`` ranks that shares everything evenly (WLB-LLM, section 4.1).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from wlb.errors import UserError
from wlb.workload.base import Checkpointing, Direction, Phase, Seconds
from wlb.workload.flops import (
    LINEAR_FACTORS,
    attended_pairs,
    elementwise_values_per_token,
    gemm_flops_per_token,
    layers_pair_flops,
    linear_columns,
    pair_flops,
    state_flops_per_token,
)
from wlb.workload.hardware import Hardware
from wlb.workload.links import group_link, shard_bytes
from wlb.workload.shapes import ModelShape
from wlb.workload.weights import expert_weights, latent_expansion, mean_block_weights, routed_layers

if TYPE_CHECKING:  # planning without a profile needs NumPy alone
    from wlb.workload.profile import WorkloadProfile

PRODUCT_ROWS = 8192  # most tokens in a product of several micro-batches, which then hides accumulating its result
QUERY_TILE = 128  # queries in a tile of FlashAttention-2 and -3 at head_dim 128 (arXiv 2307.08691, 2407.08608)
MASTER_BYTES = 4  # weights, gradients and moments are float32
_LARGE = 2**30  # tokens, enough to make the fixed cost of a micro-batch negligible
# Values read and written in memory, counted over the operations of ``wlb.attention``, each its own kernel; a float32
# value counts twice. For each value of K and V that a rank sends: picking and stacking it, 4; accumulating its returned
# gradient in float32, 13.
_SENT = {"forward": 4.0, "backward": 13.0}
# For each that it receives: placing it, 2; in the backward again, and clearing and placing gradients, 3.
_RECEIVED = {"forward": 2.0, "backward": 5.0}
# For each value of a query that attends a received part: picking it, 2, and merging two outputs in float32, 15; in the
# backward picking query, output and its gradient, 6, and accumulating the gradient of the query, 7.
_MERGED = {"forward": 17.0, "backward": 13.0}
# Less if a segment is alone: its rows are contiguous, so queries are not picked, and everything is added in place.
_SENT_ALONE = {"forward": 4.0, "backward": 5.0}
_MERGED_ALONE = {"forward": 11.0, "backward": 3.0}
# For launching the kernels of a block, forward and backward, in one micro-batch: some 80 fused kernels at 10 to 15
# microseconds (derived by counting); with tensor parallelism PyTorch also dispatches DTensors (measured on a CPU core:
# ``python -m benchmarks.host_time``). Hugging Face's Trainer took 4.3 ms (quoted: 0.12 s for 28 blocks of Qwen3 1.7B).
_HOST_SECONDS, _HOST_SECONDS_TP = 1e-3, 3e-3
_ENDS = 0.5  # collectives of embedding and output head together, in blocks
# The next three are fitted by studies' fit_prices.py.
# A grouped product also sorts, pads and casts the tokens of its experts, in bf16 whatever the type: it costs as much as
# this many more columns per expert, so wide experts run at the rate of a dense layer and narrow ones are slower.
_EXPERT_COLUMNS = 550.0
# Each expert of a rank costs as if this many more tokens passed per micro-batch: its last tiles are not full, and its
# weights are read and cast.
_EXPERT_TOKENS = 1500.0
# Cost of adding biases outside the grouped product (gpt-oss), over that of the product.
_EXPERT_BIASES = 1.65
# Bytes read and written for each score by the loss in float32: log-softmax reads scores twice, as a row is too long to
# keep, and writes once; the backward clears a gradient, reads it and the log-probabilities twice, and writes the
# gradient of the score. Scores of another type are converted first, and their gradients converted back. Derived by
# counting.
_LOSS_BYTES_PER_SCORE = {"forward": 3 * 4, "backward": 4 + 2 * (4 + 4) + 4}
# Matrix products of few tokens take as long as reading their weights. A backward also reads and writes the accumulated
# float32 gradient. Derived by counting.
_GRADIENT_PASSES = {"forward": 0, "backward": 2}


@dataclass(frozen=True)
class Costs:
    """Prices of a model of ``shape`` on one GPU of a ``tp`` x ``cp`` group; arrays in, arrays of the same shape out.

    Context-parallel ranks exchange keys and values on ``nodes`` nodes, by default as few as possible. With
    ``recomputed`` activations a backward includes recomputation. A ``profile`` was measured on one GPU, or on one of a
    tensor-parallel group of its own size; it is scaled to ``tp``.

    Under expert parallelism ``ep`` GPUs in a row, of one or several tensor-parallel groups, divide the experts of every
    block (Megatron's folding, arXiv 2504.14960, with expert tensor parallelism 1). Every token goes to the GPUs of its
    experts and back, in two all-to-alls a pass; ``exposed_exchange`` is the share that computing does not hide. The
    busiest GPU has ``expert_imbalance`` times the tokens of the mean one. ``exposed_tp`` is the share of
    tensor-parallel collectives that computing does not hide, including what computing beside them loses.

    Raises ``UserError`` if ``tp``, ``cp`` or ``ep`` is below 1, if ``tp`` does not divide the heads or ``ep`` the
    experts, and for a profile of another model.
    """

    shape: ModelShape
    hardware: Hardware
    tp: int = 1
    cp: int = 1
    nodes: int | None = None
    recomputed: Checkpointing = "none"
    profile: WorkloadProfile | None = field(default=None, hash=False)  # it has a dict
    ep: int = 1
    exposed_exchange: float = 1.0
    expert_imbalance: float = 1.0
    exposed_tp: float = 1.0

    def __post_init__(self) -> None:
        shape, tp, ep = self.shape, self.tp, self.ep
        for name, value in (("tp", tp), ("cp", self.cp), ("ep", ep)):
            if value < 1:
                raise UserError(f"{name} = {value} is not a group size; it must be at least 1")
        if shape.heads % tp or shape.kv_heads % tp:
            raise UserError(
                f"tp = {tp} does not divide {shape.heads} query heads and {shape.kv_heads} key/value heads; choose a "
                "tp that divides both"
            )
        if (linear := shape.linear) is not None and linear.heads % tp:
            raise UserError(f"tp = {tp} does not divide the {linear.heads} heads of linear layers; choose a divisor")
        if ep > 1 and shape.experts is None:
            raise UserError(f"ep = {ep} shares experts, and the model has none; name another, or leave ep out")
        if shape.experts is not None and (count := shape.experts.count) % ep:
            raise UserError(f"ep = {ep} does not divide the model's {count} experts; choose a divisor, or 1")
        if ep > 1 and ep % tp:
            raise UserError(f"ep = {ep} is no multiple of tp = {tp}, whose GPUs hold whole experts; change one")
        if ep > 1 and self.profile is not None:
            raise UserError(f"ep = {ep}: a profile measures all experts on one GPU; leave ep or the profile out")
        if self.profile is not None:
            self.profile.check(shape)

    def piece_seconds(self, starts: ArrayLike, stops: ArrayLike, phase: Phase = "both") -> Seconds:
        """Attention of pieces of documents: queries ``starts`` to ``stops``, keys 0 to ``stops`` (tokens).

        The cost of the document up to ``stops`` minus its cost up to ``starts``; a partial last tile of queries costs
        as much as a full one. The first piece of a document is priced like a document of its length.
        """
        start, stop = np.asarray(starts), np.asarray(stops)
        if self.profile is not None:
            return self._share * self.profile.piece_seconds(start, stop, phase)
        until_start, until_last, until_stop = self._whole(np.stack([start, stop - 1, stop]), phase)
        idle_queries = np.where(start > 0, -(stop - start) % QUERY_TILE, 0)
        seconds: Seconds = until_stop - until_start + idle_queries * (until_stop - until_last)
        return seconds

    def drain_seconds(self, stops: ArrayLike, phase: Phase = "both") -> Seconds:
        """The kernel tail of a micro-batch whose longest piece attends keys up to ``stops`` (tokens).

        While the last tiles of a forward finish, most of the GPU is idle. The tail does not shrink with tp or cp. It is
        part of measured documents, so 0 with a profile.
        """
        keys, rates = np.asarray(stops, dtype=np.float64), self._rates[phase]
        if self.profile is not None:
            return np.zeros(keys.shape)
        seconds: Seconds = rates.drain * keys
        if self.shape.window is not None:
            seconds = seconds + rates.window_drain * np.minimum(keys, self.shape.window)
        return seconds

    def blocks_seconds(self, tokens: ArrayLike, phase: Phase = "both", routed: ArrayLike | None = None) -> Seconds:
        """Seconds of blocks without attention and collectives.

        ``routed`` are the tokens of the mean rank that shares the experts; by default all have as many.
        """
        if phase == "both":
            return self.blocks_seconds(tokens, "forward", routed) + self.blocks_seconds(tokens, "backward", routed)
        if self.profile is not None:
            return self._share * self.profile.linear_seconds(tokens, phase) * (1 - self._head_share(phase))
        seconds = self._at_least_moving(self.own_weights, tokens, self._rates[phase].block_token, phase)
        busiest = np.asarray(tokens)
        if self.ep > 1:
            busiest = self.expert_imbalance * np.asarray(tokens if routed is None else routed)
            seconds = seconds + self._rates[phase].expert_token * (busiest - np.asarray(tokens))
        return np.where(busiest > 0, seconds + self._rates[phase].experts, 0.0)

    def head_seconds(self, tokens: ArrayLike, phase: Phase = "both") -> Seconds:
        """Seconds of output head and loss."""
        if phase == "both":
            return self.head_seconds(tokens, "forward") + self.head_seconds(tokens, "backward")
        if self.profile is not None:
            return self._share * self.profile.linear_seconds(tokens, phase) * self._head_share(phase)
        weights = self.shape.vocab_size * self.shape.hidden
        return self._at_least_moving(weights, tokens, self._rates[phase].head_token, phase)

    def host_seconds(self, tokens: ArrayLike, phase: Direction) -> Seconds:
        """The least seconds of all blocks, attention included, because a host launches their kernels; 0 on CPUs.

        Part of what a profile measured.
        """
        launches = self.hardware.device_type == "cuda" and self.profile is None
        block = launches * (_HOST_SECONDS if self.tp == 1 else _HOST_SECONDS_TP) / LINEAR_FACTORS["both"]
        return np.where(np.asarray(tokens) > 0, self.shape.layers * LINEAR_FACTORS[phase] * block, 0.0)

    def weight_seconds(self, tokens: ArrayLike, part: Literal["blocks", "head"]) -> Seconds:
        """The part of a backward of blocks or head that computes gradients of weights, which no other stage needs.

        Half of the matrix products of the backward outside experts, and accumulating the gradients.
        """
        rates, (backward, adding) = self._rates["backward"], self._backward_and_adding(tokens, part)
        token, products = rates.block_token, rates.block_products - rates.expert_token
        if part == "head":
            token, products = rates.head_token, rates.head_products
        share: float = products / LINEAR_FACTORS["backward"] / token
        return share * (backward - adding) + adding

    def joined_seconds(self, tokens: ArrayLike, part: Literal["blocks", "head"]) -> Seconds:
        """What ``weight_seconds`` loses if the micro-batch joins the product of the one before it.

        ``PRODUCT_ROWS`` tokens then accumulate gradients once. Copying inputs and gradients of outputs reads and writes
        them; derived by counting.
        """
        shape, count, adding = self.shape, np.asarray(tokens), self._backward_and_adding(tokens, part)[1]
        columns = linear_columns(shape, self.tp) if part == "blocks" else shape.hidden + shape.vocab_size / self.tp
        copying = 2 * self.hardware.bytes_per_value / self.hardware.memory_bandwidth * columns
        return np.maximum(0.0, adding * (1 - count / PRODUCT_ROWS) - copying * count)

    def _backward_and_adding(self, tokens: ArrayLike, part: Literal["blocks", "head"]) -> tuple[Seconds, Seconds]:
        """Seconds of a backward, and its part that accumulates the gradients of linear layers."""
        if part == "blocks":
            weights, backward = self.own_weights, self.blocks_seconds(tokens, "backward")
            weights -= expert_weights(self.shape) / self.ep_ranks
        else:
            weights, backward = self.shape.vocab_size * self.shape.hidden, self.head_seconds(tokens, "backward")
        return backward, np.minimum(backward, self._adding_seconds(weights, "backward"))

    def _adding_seconds(self, weights: float, phase: Direction) -> float:
        return weights * _GRADIENT_PASSES[phase] * MASTER_BYTES / (self.hardware.memory_bandwidth * self.tp)

    def tp_seconds(self, tokens: ArrayLike) -> Seconds:
        """Gathering and reducing the residual stream over the tensor-parallel group, in a forward or a backward.

        Every block gathers and reduce-scatters it twice (sequence parallelism, arXiv 2205.05198), once if it has no
        feed-forward layer; embedding and output head together once. The collectives of a backward mirror those of the
        forward.
        """
        count = np.asarray(tokens, dtype=np.float64)
        if self.tp == 1:
            return np.zeros(count.shape)
        link = group_link(self.hardware, "all_gather", self.tp, stride=1)
        routed = routed_layers(self.shape) if self.ep > 1 else 0  # experts take and return shares of the sequence
        bare = sum(count for kind, count in self.shape.blocks.items() if not kind.feeds_forward)
        layers = self.shape.layers - (routed + bare) / 2 + _ENDS
        values = 4.0 * self.shape.hidden * self.hardware.bytes_per_value
        token_seconds = shard_bytes(layers * values, self.tp) / link.bandwidth
        return self.exposed_tp * np.where(count > 0, layers * 4 * link.latency + token_seconds * count, 0.0)

    def expert_seconds(self, tokens: ArrayLike) -> Seconds:
        """Sending ``tokens`` tokens of a rank to the GPUs of their experts and back, in a forward or a backward."""
        experts, hardware, ep = self.shape.experts, self.hardware, self.ep
        if experts is None or ep == 1:
            return np.zeros(np.shape(tokens))
        nodes = -(-ep // hardware.node_size)
        link = group_link(hardware, "all_to_all", min(ep, hardware.node_size), stride=1)
        copy = np.asarray(tokens) * self.shape.expert_input * hardware.bytes_per_value / self.tp
        seconds = link.seconds(shard_bytes(experts.active, ep) * copy)
        if nodes > 1:
            # A token goes once to each other node that has one of its experts.
            reached = (nodes - 1) * (1 - (1 - 1 / nodes) ** experts.active)
            between = group_link(hardware, "point_to_point", ep, stride=1)
            seconds = np.maximum(seconds, between.seconds(reached * copy))
        return self.exposed_exchange * 2 * routed_layers(self.shape) * seconds

    def exchange_seconds(self, tokens: ArrayLike, ranks: int) -> Seconds:
        """Receiving K and V of ``tokens`` tokens from other ranks of a context-parallel group of ``ranks`` ranks.

        In the forward; in the backward their gradients return in the same time. States of linear layers, some megabytes
        of a document, are not counted.
        """
        link = group_link(self.hardware, "all_to_all", ranks, self.tp, self.nodes)
        return self.shape.attention_layers * link.seconds(np.asarray(tokens) * self._kv_bytes)

    def copy_seconds(
        self, sent: ArrayLike, received: ArrayLike, merged: ArrayLike, phase: Direction, alone: ArrayLike = False
    ) -> Seconds:
        """Memory copies of a rank around the exchange.

        It sends and receives the keys of ``sent`` and ``received`` tokens; ``merged`` queries attend received keys,
        counted once per part in which these arrive. A segment that is ``alone`` in its micro-batch needs fewer copies.
        """
        hardware, layers = self.hardware, self.shape.attention_layers
        query_bytes = self.shape.heads * self.shape.head_dim / self.tp * hardware.bytes_per_value
        of_sent = np.where(alone, _SENT_ALONE[phase], _SENT[phase])
        of_merged = np.where(alone, _MERGED_ALONE[phase], _MERGED[phase])
        moved = of_sent * np.asarray(sent) + _RECEIVED[phase] * np.asarray(received)
        touched = self._kv_bytes * moved + query_bytes * of_merged * np.asarray(merged)
        seconds: Seconds = layers / hardware.memory_bandwidth * touched
        if (expansion := latent_expansion(self.shape)) and self.shape.indexer is None:
            gemm_rate = hardware.peak_flops * hardware.gemm_efficiency * self.tp
            seconds = seconds + layers * LINEAR_FACTORS[phase] * 2.0 * expansion / gemm_rate * np.asarray(received)
        return seconds

    def attention_seconds(self, lengths: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_a of each whole document, shared evenly by the ``cp`` ranks."""
        seconds = self._whole(lengths, phase)
        if self.recomputed == "full" and phase != "forward":
            seconds = seconds + self._whole(lengths, "forward")
        return seconds / self.cp

    def linear_seconds(self, tokens: ArrayLike, phase: Phase = "both") -> Seconds:
        """W_l of micro-batches of ``tokens`` tokens, shared evenly by the ``cp`` ranks; 0 for an empty one."""
        if phase == "both":
            return self.linear_seconds(tokens, "forward") + self.linear_seconds(tokens, "backward")
        count = np.asarray(tokens, dtype=np.float64)
        own, others = count / self.cp, count * (self.cp - 1) / self.cp
        again = phase == "backward" and self.recomputed != "none"
        seconds = self.blocks_seconds(own, "both" if again else phase) + self.head_seconds(own, phase)
        seconds = seconds + (1 + again) * (self.tp_seconds(own) + self.expert_seconds(own))
        return seconds + self.exchange_seconds(others, self.cp)

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """W_a plus the part of W_l that grows with tokens, forward and backward: prices that add up over documents."""
        d = np.asarray(lengths, dtype=np.float64)
        return self.attention_seconds(d) + self._token_seconds * d

    @property
    def gathers_context(self) -> bool:
        """Whether ranks gather all keys and values before attention, instead of needed ones in parts beside it."""
        return False

    @property
    def own_weights(self) -> float:
        """Weights of all blocks on a tensor-parallel group, of the experts only its own."""
        others = expert_weights(self.shape) * (1 - 1 / self.ep_ranks)
        return self.shape.layers * mean_block_weights(self.shape) - others

    @property
    def ep_ranks(self) -> int:
        """The tensor-parallel groups that share the experts."""
        return max(1, self.ep // self.tp)

    @cached_property
    def _token_seconds(self) -> float:
        once, twice = self.linear_seconds([_LARGE, 2 * _LARGE])
        return float(twice - once) / _LARGE

    @property
    def _share(self) -> float:
        return 1.0 if self.profile is None else self.profile.tp / self.tp

    @cached_property
    def _rates(self) -> dict[Phase, Rates]:
        forward, backward = self.phase_rates("forward"), self.phase_rates("backward")
        return {"forward": forward, "backward": backward, "both": Rates(*map(sum, zip(forward, backward, strict=True)))}

    def phase_rates(self, phase: Direction) -> Rates:
        shape, hardware, tp, backward = self.shape, self.hardware, self.tp, phase == "backward"
        head_flops = 2.0 * shape.vocab_size * shape.hidden
        grouping = 0.0  # a token over all layers, in operations of bf16 matrix products
        if (experts := shape.experts) is not None:
            columns = _EXPERT_COLUMNS + experts.biased * _EXPERT_BIASES * experts.ffn_hidden
            matrices = routed_layers(shape) * shape.ffn_matrices
            grouping = 2.0 * matrices * shape.expert_input * experts.active * columns
        block_flops = (gemm_flops_per_token(shape) - head_flops) + grouping
        kernel = hardware.attention
        rate = kernel.backward_flops if backward else kernel.forward_flops
        half_length = kernel.backward_half_length if backward else kernel.forward_half_length
        factor = LINEAR_FACTORS[phase]
        pair, window_pair = (flops / rate / tp for flops in layers_pair_flops(shape, phase))
        drain = 0.0 if backward else kernel.drain_tiles * QUERY_TILE * pair_flops(shape) / shape.heads / rate
        gemm_rate = hardware.peak_flops * hardware.gemm_efficiency * tp
        element_seconds = (
            elementwise_values_per_token(shape, phase) * hardware.bytes_per_value / hardware.memory_bandwidth / tp
        )
        element_seconds += factor * state_flops_per_token(shape) / gemm_rate
        converting = 0 if hardware.bytes_per_value == MASTER_BYTES else hardware.bytes_per_value + MASTER_BYTES
        score_bytes = _LOSS_BYTES_PER_SCORE[phase] + converting
        loss_seconds = shape.vocab_size * score_bytes / hardware.memory_bandwidth / tp
        return Rates(
            pair=pair,
            padding=(pair + window_pair) * half_length / 2,
            window_pair=window_pair,
            drain=shape.layers_of("full") * drain,
            window_drain=shape.layers_of("sliding", "indexed") * drain,
            block_token=factor * block_flops / gemm_rate + element_seconds,
            head_token=factor * head_flops / gemm_rate + loss_seconds,
            block_products=factor * block_flops / gemm_rate,
            head_products=factor * head_flops / gemm_rate,
            experts=factor * 2.0 * _EXPERT_TOKENS * expert_weights(shape) / self.ep_ranks / gemm_rate,
            expert_token=factor * (grouping + 2.0 * expert_weights(shape, active=True)) / gemm_rate,
        )

    @property
    def _kv_bytes(self) -> float:
        """Bytes that a tensor-parallel rank receives per token of another context-parallel rank, in one layer."""
        latent, shape = self.shape.latent, self.shape
        values = 2.0 * shape.kv_heads * shape.head_dim / self.tp if latent is None else latent.kv_rank + latent.rope_dim
        values += 0 if shape.indexer is None else shape.indexer.head_dim
        return values * self.hardware.bytes_per_value

    def _whole(self, lengths: ArrayLike, phase: Phase) -> Seconds:
        """Attention of whole documents on this GPU."""
        d, rates = np.asarray(lengths, dtype=np.float64), self._rates[phase]
        if self.profile is not None:
            return self._share * self.profile.attention_seconds(d, phase)
        seconds: Seconds = d * (rates.pair / 2 * d + (rates.pair / 2 + rates.padding))
        if self.shape.window is not None:
            seconds = seconds + rates.window_pair * attended_pairs(d, self.shape.window)
        return seconds

    def _at_least_moving(self, weights: float, tokens: ArrayLike, token_seconds: float, phase: Direction) -> Seconds:
        """``token_seconds`` per token, or the time of reading the ``weights`` if that is longer; 0 for no tokens."""
        count, hardware = np.asarray(tokens), self.hardware
        reading = weights * hardware.bytes_per_value / (hardware.memory_bandwidth * self.tp)
        seconds = np.maximum(token_seconds * count, reading) + self._adding_seconds(weights, phase)
        return np.where(count > 0, seconds, 0.0)

    def _head_share(self, phase: Phase) -> float:
        """Share of output head and loss outside attention; a profile is divided in the proportion of the hardware."""
        rates = self._rates[phase]
        return rates.head_token / (rates.head_token + rates.block_token)


class Rates(NamedTuple):
    """Seconds on one tensor-parallel rank."""

    pair: float  # for each attended query-key pair
    padding: float  # for each token of a document, in attention
    window_pair: float  # for each query-key pair inside the window, in blocks that have one
    drain: float  # for each key of the longest document
    window_drain: float  # for each of these keys inside the window, in blocks that have one
    block_token: float  # for each token in blocks, without attention
    head_token: float  # for each token in output head and loss
    block_products: float  # the part of block_token in matrix products
    head_products: float
    experts: float  # for all experts in a micro-batch, whatever its tokens
    expert_token: float  # the part of block_token in products of experts


def crossover_tokens(workload: Costs) -> int | None:
    """Length at which attention of a document costs as much as everything else; None if over ten million tokens."""
    lengths = range(1, 10_000_001)
    shorter = bisect_left(lengths, 0.0, key=lambda n: float(workload.attention_seconds(n) - workload.linear_seconds(n)))
    return lengths[shorter] if shorter < len(lengths) else None
