"""Floating-point operations and bytes of one transformer block, per document and per token.

Everything here is counting, for the whole model on one GPU; how fast a GPU gets through it is the business of
``wlb.workload.analytic``. One multiply-add is two operations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.workload.base import Phase
from wlb.workload.shapes import ModelShape

# A backward multiplies once for the gradient of the input and once for that of the weight.
LINEAR_BACKWARD_FACTOR = 2.0
# Flash attention's backward has five matrix products (it recomputes the scores), the forward two.
ATTENTION_BACKWARD_FACTOR = 2.5


def attended_pairs(lengths: ArrayLike) -> NDArray[np.float64]:
    """Query-key pairs under a causal mask, d (d + 1) / 2 for a document of d tokens; shape of ``lengths``."""
    d = np.asarray(lengths, dtype=np.float64)
    pairs: NDArray[np.float64] = d * (d + 1) / 2
    return pairs


def attention_flops(shape: ModelShape, lengths: ArrayLike, phase: Phase = "both") -> NDArray[np.float64]:
    """Operations of attention over each document, all layers; shape of ``lengths`` (tokens).

    Two products (scores, weighted values) of 2 * heads * head_dim operations for each attended pair, times
    2.5 for the backward (FlashAttention-2, arXiv 2307.08691, section 4.1).
    """
    forward = shape.layers * 4.0 * shape.heads * shape.head_dim * attended_pairs(lengths)
    return _in_phase(forward, ATTENTION_BACKWARD_FACTOR, phase)


def linear_flops(shape: ModelShape, tokens: ArrayLike, phase: Phase = "both") -> NDArray[np.float64]:
    """Operations of all matrix products outside attention, output head included; shape of ``tokens``."""
    forward = gemm_flops_per_token(shape) * np.asarray(tokens, dtype=np.float64)
    return _in_phase(forward, LINEAR_BACKWARD_FACTOR, phase)


def gemm_flops_per_token(shape: ModelShape) -> float:
    """Forward operations for one token: projections, feed-forward and output head."""
    projections = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    feed_forward = 3 * shape.hidden * shape.ffn_hidden
    return 2.0 * (shape.layers * (projections + feed_forward) + shape.hidden * shape.vocab_size)


def elementwise_values_per_token(shape: ModelShape) -> tuple[float, float]:
    """Values read and written for one token by element-wise kernels, all layers: (forward, backward).

    Each block has two RMS norms, two residual additions, rotary embedding of q and k, and SwiGLU, every one a
    kernel of its own that reads its inputs and writes its output once.
    """
    rotary = shape.head_dim * (shape.heads + shape.kv_heads)
    forward = 2 * (2 + 3) * shape.hidden + 2 * rotary + 3 * shape.ffn_hidden
    backward = 2 * (3 + 3) * shape.hidden + 2 * rotary + 5 * shape.ffn_hidden
    return float(shape.layers * forward), float(shape.layers * backward)


def _in_phase(forward: NDArray[np.float64], backward_factor: float, phase: Phase) -> NDArray[np.float64]:
    factor = {"forward": 1.0, "backward": backward_factor, "both": 1.0 + backward_factor}[phase]
    return forward * factor
