"""Attention over a micro-batch that one rank holds whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from wlb.attention.backends import AttentionBackend, check_shapes, check_window, pick_backend
from wlb.attention.runs import Runs


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    backend: str = "auto",
    window: int | None = None,
) -> Tensor:
    """Causal softmax attention inside each segment of a packed micro-batch, scaled by 1/sqrt(head_dim).

    Args:
        query: (tokens, heads, head_dim).
        key: (tokens, kv_heads, head_dim); ``heads`` is a multiple of ``kv_heads``, and query head h reads
            key/value head ``h // (heads // kv_heads)`` (grouped-query attention).
        value: Same shape as ``key``.
        segment_lengths: Tokens of each segment, in packed order; they add up to ``tokens``.
        backend: A name in ``BACKENDS``, or ``auto`` for the fastest that supports the query.
        window: Tokens that each token attends up to its own; all of them without it.

    Returns:
        (tokens, heads, head_dim), of the query's type.

    Raises:
        UserError: No such back end, or it does not support a tensor of this device or type.
        ValueError: Shapes or lengths do not fit together.
    """
    check_shapes(query, key, value)
    if sum(segment_lengths) != len(query) or min(segment_lengths, default=0) < 1:
        raise ValueError(
            f"segment_lengths must be positive and add up to the {len(query)} tokens of the query, "
            f"got {len(segment_lengths)} segments with {sum(segment_lengths)} tokens"
        )
    if window is not None:
        check_window(window)
    runs = Runs.of_segments(tuple(segment_lengths), window)
    out: Tensor = _SegmentAttention.apply(query, key, value, runs, pick_backend(query, backend))
    return out


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: Runs, backend: AttentionBackend) -> Tensor:
        out, log_sum_exp = backend.forward(query, key, value, runs)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        ctx.runs, ctx.backend = runs, backend
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        return *ctx.backend.backward(grad_out, *ctx.saved_tensors, ctx.runs), None, None
