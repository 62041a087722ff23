"""PyTorch's flash attention for CPU, one call per segment, in time proportional to the attended area.

The operator returns the log-sum-exp of each query's scores beside the output, and its backward twin takes
both. That is why it is called directly instead of through ``scaled_dot_product_attention``: one autograd
node covers the whole micro-batch, and a query attending several pieces of keys can later merge them by
log-sum-exp.

The operator wants (batch, heads, tokens, head_dim); slices of (tokens, heads, head_dim) are handed to it as
transposed views, so nothing is copied on the way in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_TYPES = (torch.float64, torch.float32, torch.bfloat16)
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_NO_DROPOUT, _CAUSAL = 0.0, True


def unsupported(query: Tensor) -> str | None:
    """Why this back end cannot attend with ``query``; ``None`` if it can."""
    if query.device.type != "cpu":
        return f"the tensors are on {query.device.type}, not on the CPU"
    if query.dtype not in _TYPES:
        return f"{query.dtype} is none of {', '.join(str(dtype) for dtype in _TYPES)}"
    return None


def attend(query: Tensor, key: Tensor, value: Tensor, segment_lengths: tuple[int, ...]) -> Tensor:
    """Causal attention inside each segment; shapes as in ``segment_attention``."""
    out: Tensor = _SegmentAttention.apply(query, key, value, segment_lengths)
    return out


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segment_lengths: tuple[int, ...]) -> Tensor:
        pieces = zip(*(_heads_first(tensor, segment_lengths) for tensor in (query, key, value)), strict=True)
        outs, log_sum_exps = zip(*(_forward(*piece, _NO_DROPOUT, _CAUSAL) for piece in pieces), strict=True)
        out = _tokens_first(outs)
        ctx.save_for_backward(query, key, value, out, *log_sum_exps)
        ctx.segment_lengths = segment_lengths
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        *tensors, out = ctx.saved_tensors[:4]
        pieces = zip(
            *(_heads_first(tensor, ctx.segment_lengths) for tensor in (grad_out, *tensors, out)),
            ctx.saved_tensors[4:],
            strict=True,
        )
        grads = zip(*(_backward(*piece, _NO_DROPOUT, _CAUSAL) for piece in pieces), strict=True)
        grad_query, grad_key, grad_value = (_tokens_first(pieces) for pieces in grads)
        return grad_query, grad_key, grad_value, None


def _heads_first(tensor: Tensor, segment_lengths: tuple[int, ...]) -> list[Tensor]:
    """Views (1, heads, segment, head_dim), one per segment, of a tensor (tokens, heads, head_dim)."""
    return [piece.transpose(0, 1)[None] for piece in tensor.split(segment_lengths)]


def _tokens_first(pieces: tuple[Tensor, ...]) -> Tensor:
    """The inverse of ``_heads_first``, contiguous."""
    return torch.cat([piece[0].transpose(0, 1) for piece in pieces])
