"""PyTorch's flash attention for CPU, one call per run, in time proportional to the attended area.

The operator returns the log-sum-exp of each query's scores beside the output, and its backward twin takes
both. That is why it is called directly instead of through ``scaled_dot_product_attention``.

The operator wants (batch, heads, tokens, head_dim); slices of (tokens, heads, head_dim) are handed to it as
transposed views, so nothing is copied on the way in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wlb.attention.runs import Runs

_TYPES = (torch.float64, torch.float32, torch.bfloat16)
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_NO_DROPOUT = 0.0


def unsupported(query: Tensor) -> str | None:
    """Why this back end cannot attend with ``query``; ``None`` if it can."""
    if query.device.type != "cpu":
        return f"the tensors are on {query.device.type}, not on the CPU"
    if query.dtype not in _TYPES:
        return f"{query.dtype} is none of {', '.join(str(dtype) for dtype in _TYPES)}"
    return None


def forward(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as ``AttentionBackend.forward``."""
    cut = zip(
        _heads_first(query, runs.query_lengths),
        *(_heads_first(tensor, runs.key_lengths) for tensor in (key, value)),
        strict=True,
    )
    outs, log_sum_exps = zip(*(_forward(*run, _NO_DROPOUT, runs.causal) for run in cut), strict=True)
    return _tokens_first(outs), torch.cat(log_sum_exps, dim=-1)[0]


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, as ``AttentionBackend.backward``."""
    cut = zip(
        *(_heads_first(tensor, runs.query_lengths) for tensor in (grad_out, query)),
        *(_heads_first(tensor, runs.key_lengths) for tensor in (key, value)),
        _heads_first(out, runs.query_lengths),
        log_sum_exp[None].split(runs.query_lengths, dim=-1),
        strict=True,
    )
    grads = zip(*(_backward(*run, _NO_DROPOUT, runs.causal) for run in cut), strict=True)
    grad_query, grad_key, grad_value = (_tokens_first(pieces) for pieces in grads)
    return grad_query, grad_key, grad_value


def _heads_first(tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Views (1, heads, run, head_dim), one per run, of a tensor (tokens, heads, head_dim)."""
    return [run.transpose(0, 1)[None] for run in tensor.split(lengths)]


def _tokens_first(runs: Sequence[Tensor]) -> Tensor:
    """The inverse of ``_heads_first``, contiguous."""
    return torch.cat([run[0].transpose(0, 1) for run in runs])
