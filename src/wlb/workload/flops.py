"""Floating-point operations and bytes of a model's blocks, per document and per token.

Everything here counts, for the whole model on one GPU; ``wlb.workload.costs`` has the speed of GPUs. One multiply-add
is two operations.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.workload.base import Direction, Phase
from wlb.workload.shapes import ModelShape
from wlb.workload.weights import feed_forward_width, parameters

# A backward multiplies once for the gradient of the input and once for that of the weight.
LINEAR_FACTORS: dict[Phase, float] = {"forward": 1.0, "backward": 2.0, "both": 3.0}
FORWARD_SHARE = 1 / LINEAR_FACTORS["both"]
# The backward of flash attention has five matrix products (it recomputes the scores), the forward two.
ATTENTION_BACKWARD_FACTOR = 2.5
# Forward operations of a linear layer for a token and a value of its state (quoted: ``mamba_layer_flops``,
# ``gdn_layer_flops`` of NVIDIA-NeMo/Megatron-Bridge, training/utils/flop_utils.py). Assumed: KDA as gated DeltaNet.
_STATE_FLOPS = {"mamba2": 7.0, "gated_delta": 8.0, "kda": 8.0}
# Values that it moves, in widths of all its keys and of all its values, forward and backward: convolution, norms and
# kernels of chunks, each reading its inputs and writing its outputs once. Derived by counting, with heads of 128 and a
# state for each 128 tokens in mamba_ssm/ops/triton/ssd_combined.py (state-spaces/mamba), and for each 64 in
# fla/ops/gated_delta_rule and fla/ops/kda (fla-org/flash-linear-attention).
_LINEAR_PASSES = {
    "mamba2": ((12, 16), (37, 42)),
    "gated_delta": ((12, 17.5), (21, 44)),
    "kda": ((22, 16.5), (51, 34.5)),
}


def model_flops(shape: ModelShape, lengths: ArrayLike) -> float:
    """Operations of training on documents of ``lengths``: the products of PaLM (arXiv 2204.02311, appendix B).

    A forward counts once and a backward twice, without recomputation; causal attention counts the pairs in documents.
    """
    attention = float(attention_flops(shape, lengths, "forward").sum())
    return 3.0 * (attention + float(linear_flops(shape, np.sum(lengths), "forward")))


def attended_pairs(lengths: ArrayLike, window: int | None = None) -> NDArray[np.float64]:
    """Query-key pairs under a causal mask, d (d + 1) / 2 for a document of d tokens; shape of ``lengths``.

    With a ``window``, a token attends at most that many tokens, including itself.
    """
    d = np.asarray(lengths, dtype=np.float64)
    seen = d if window is None else np.minimum(d, window)
    pairs: NDArray[np.float64] = seen * (seen + 1) / 2
    return pairs if window is None else pairs + window * np.maximum(d - window, 0.0)


def attention_flops(shape: ModelShape, lengths: ArrayLike, phase: Phase = "both") -> NDArray[np.float64]:
    """Operations of attention over each document, all layers; shape of ``lengths`` (tokens).

    ``pair_flops`` for each attended pair, times 2.5 for the backward (FlashAttention-2, arXiv 2307.08691, section 4.1).
    """
    if phase == "both":
        return attention_flops(shape, lengths, "forward") + attention_flops(shape, lengths, "backward")
    full, windowed = layers_pair_flops(shape, phase)
    return full * attended_pairs(lengths) + windowed * attended_pairs(lengths, shape.window)


def pair_flops(shape: ModelShape) -> float:
    """Forward operations of one layer for each attended pair: two products, of scores and of weighted values.

    Over chosen tokens all heads attend the latent itself (arXiv 2512.02556, section 2.1), whose expansion is then part
    of the projections of queries and outputs.
    """
    if shape.indexer is not None and shape.latent is not None:
        return 2.0 * shape.heads * (2 * shape.latent.kv_rank + shape.latent.rope_dim)
    return 2.0 * shape.heads * (shape.head_dim + shape.value_dim)


def layers_pair_flops(shape: ModelShape, phase: Direction) -> tuple[float, float]:
    """Operations of all layers for each pair in a document, and for each inside the window or chosen by an indexer.

    An indexer scores every pair in the forward. Its loss is over chosen tokens alone, so the backward multiplies twice
    for each of them. Finding the best scores is not counted.
    """
    backward = phase == "backward"
    of_pair = pair_flops(shape) * (ATTENTION_BACKWARD_FACTOR if backward else 1.0)
    full, windowed = shape.layers_of("full") * of_pair, shape.layers_of("sliding", "indexed") * of_pair
    if (indexer := shape.indexer) is None:
        return full, windowed
    scoring = 2.0 * indexer.layers * indexer.heads * indexer.head_dim
    return (full, windowed + LINEAR_FACTORS[phase] * scoring) if backward else (full + scoring, windowed)


def linear_flops(shape: ModelShape, tokens: ArrayLike, phase: Phase = "both") -> NDArray[np.float64]:
    """Operations of everything that grows with tokens, including the output head; shape of ``tokens``."""
    of_token = gemm_flops_per_token(shape) + state_flops_per_token(shape)
    return of_token * np.asarray(tokens, dtype=np.float64) * LINEAR_FACTORS[phase]


def gemm_flops_per_token(shape: ModelShape) -> float:
    """Forward operations for one token: projections, feed-forward or chosen experts, and output head."""
    return 2.0 * parameters(shape, active=True, tied_embeddings=True)  # the embedding is a lookup; the head counts


def state_flops_per_token(shape: ModelShape) -> float:
    """Forward operations of all linear layers for one token, beside their projections."""
    if (linear := shape.linear) is None:
        return 0.0
    layers = sum(count for kind, count in shape.blocks.items() if kind.linear)
    return layers * _STATE_FLOPS[linear.kind] * linear.values * linear.key_dim


def elementwise_values_per_token(shape: ModelShape, phase: Direction) -> float:
    """Values read and written for one token by element-wise kernels, all layers.

    Each block has two RMS norms, two residual additions, rotary embedding of q and k, and SwiGLU; each is one kernel
    that reads its inputs and writes its output once. Variants of the model add kernels or change rotary embedding. A
    block without a feed-forward layer has one norm and one addition.
    """
    latent, experts, linear, backward = shape.latent, shape.experts, shape.linear, phase == "backward"
    if latent is None:
        rotary, norms = 2 * shape.head_dim * (shape.heads + shape.kv_heads), 0
    else:  # keys are concatenated from two parts, and both latents have norms
        rotary = 2 * latent.rope_dim * (shape.heads + 1) + 2 * shape.heads * shape.head_dim
        norms = latent.q_rank + latent.kv_rank
    gate = shape.gated_attention * shape.heads * shape.head_dim
    attending = (2 + backward) * norms + (3 + 2 * backward) * gate + rotary
    # A token is copied for each of its experts, and their results are summed; the backward mirrors this.
    copying = 0 if experts is None else (3 * experts.active + 1) * shape.expert_input
    mixing = 0.0
    if linear is not None:
        keys, values = _LINEAR_PASSES[linear.kind][backward]
        mixing = keys * linear.keys + values * linear.values
    columns = 2 * shape.ffn_matrices - 1 if backward else shape.ffn_matrices
    total = 0.0
    for kind, count in shape.blocks.items():
        of_block = (2 + 3 + backward) * (1 + kind.feeds_forward) * shape.hidden  # norm and addition
        of_block += kind.attends * attending + kind.routed * copying + columns * feed_forward_width(shape, kind)
        total += count * (of_block + kind.linear * mixing)
    return total


def linear_columns(shape: ModelShape, tp: int) -> float:
    """Columns of inputs and outputs of each matrix in blocks, on a tensor-parallel rank (which has all rows)."""
    linear, latent, matrices = shape.linear, shape.latent, shape.ffn_matrices
    projected = (shape.heads + shape.kv_heads) * (shape.head_dim + shape.value_dim)
    projected += shape.gated_attention * shape.heads * shape.head_dim
    if latent is not None:
        projected += 2 * (latent.q_rank + latent.kv_rank) + latent.rope_dim
    of_linear = 0 if linear is None else 2 * (linear.keys + linear.values)
    columns = 0.0
    for kind, count in shape.blocks.items():
        width = shape.experts.shared_hidden if shape.experts is not None and kind.routed else shape.ffn_hidden
        of_hidden = (4 * (kind.attends + kind.linear) + matrices * kind.feeds_forward) * shape.hidden
        own = kind.attends * projected + kind.linear * of_linear + matrices * width * kind.feeds_forward
        columns += count * (of_hidden + own / tp)
    return columns
