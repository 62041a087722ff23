"""Floating-point operations and bytes of a model's blocks, per document and per token.

Everything here counts, for the whole model on one GPU; ``wlb.workload.costs`` has the speed of GPUs. One multiply-add
is two operations.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.workload.base import Phase
from wlb.workload.shapes import ModelShape
from wlb.workload.weights import feed_forward_width, parameters, routed_layers

# A backward multiplies once for the gradient of the input and once for that of the weight.
LINEAR_BACKWARD_FACTOR = 2.0
FORWARD_SHARE = 1 / (1 + LINEAR_BACKWARD_FACTOR)
# The backward of flash attention has five matrix products (it recomputes the scores), the forward two.
ATTENTION_BACKWARD_FACTOR = 2.5


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
    full = shape.layers_of("full") * pair_flops(shape) * attended_pairs(lengths)
    sliding = shape.layers_of("sliding") * pair_flops(shape) * attended_pairs(lengths, shape.sliding_window)
    return _in_phase(full + sliding, ATTENTION_BACKWARD_FACTOR, phase)


def pair_flops(shape: ModelShape) -> float:
    """Forward operations of one layer for each attended pair: two products, of scores and of weighted values."""
    return 2.0 * shape.heads * (shape.head_dim + shape.value_dim)


def linear_flops(shape: ModelShape, tokens: ArrayLike, phase: Phase = "both") -> NDArray[np.float64]:
    """Operations of everything that grows with tokens, including the output head; shape of ``tokens``."""
    forward = gemm_flops_per_token(shape) * np.asarray(tokens, dtype=np.float64)
    return _in_phase(forward, LINEAR_BACKWARD_FACTOR, phase)


def gemm_flops_per_token(shape: ModelShape) -> float:
    """Forward operations for one token: projections, feed-forward or chosen experts, and output head."""
    return 2.0 * parameters(shape, active=True, tied_embeddings=True)  # the embedding is a lookup; the head counts


def routed_flops_per_token(shape: ModelShape) -> float:
    """The part of ``gemm_flops_per_token`` in the chosen experts, without shared ones."""
    experts = shape.experts
    if experts is None:
        return 0.0
    return 2.0 * routed_layers(shape) * 3 * shape.hidden * experts.active * experts.ffn_hidden


def elementwise_values_per_token(shape: ModelShape) -> tuple[float, float]:
    """Values read and written for one token by element-wise kernels, all layers: (forward, backward).

    Each block has two RMS norms, two residual additions, rotary embedding of q and k, and SwiGLU; each is one kernel
    that reads its inputs and writes its output once. Variants of the model add kernels or change rotary embedding.
    """
    latent, experts = shape.latent, shape.experts
    if latent is None:
        rotary, norms = 2 * shape.head_dim * (shape.heads + shape.kv_heads), 0
    else:  # keys are concatenated from two parts, and both latents have norms
        rotary = 2 * latent.rope_dim * (shape.heads + 1) + 2 * shape.heads * shape.head_dim
        norms = latent.q_rank + latent.kv_rank
    forward = backward = 0
    for kind, count in shape.blocks.items():
        width = feed_forward_width(shape, kind)
        # A token is copied for each of its experts, and their results are summed; the backward mirrors this.
        moved = (3 * experts.active + 1) * shape.hidden if experts is not None and kind.routed else 0
        forward += count * (2 * (2 + 3) * shape.hidden + rotary + 2 * norms + moved + 3 * width)
        backward += count * (2 * (3 + 3) * shape.hidden + rotary + 3 * norms + moved + 5 * width)
    return float(forward), float(backward)


def linear_columns(shape: ModelShape, tp: int) -> float:
    """Columns of inputs and outputs of each linear layer in blocks, on a tensor-parallel rank (which has all rows)."""
    projected = (shape.heads + shape.kv_heads) * (shape.head_dim + shape.value_dim)
    if shape.latent is not None:
        projected += 2 * (shape.latent.q_rank + shape.latent.kv_rank) + shape.latent.rope_dim
    columns = 0.0
    for kind, count in shape.blocks.items():
        width = shape.experts.shared_hidden if shape.experts is not None and kind.routed else shape.ffn_hidden
        columns += count * (7 * shape.hidden + (projected + 3 * width) / tp)
    return columns


def _in_phase(forward: NDArray[np.float64], backward_factor: float, phase: Phase) -> NDArray[np.float64]:
    factor = {"forward": 1.0, "backward": backward_factor, "both": 1.0 + backward_factor}[phase]
    return forward * factor
