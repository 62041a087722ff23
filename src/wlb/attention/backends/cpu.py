"""PyTorch's flash attention for CPU, one call per run, in time proportional to the attended area.

The operator returns the log-sum-exp of each query's scores beside the output, and its backward twin takes
both. That is why it is called directly instead of through ``scaled_dot_product_attention``.

The operator wants (batch, heads, tokens, head_dim); slices of (tokens, heads, head_dim) are handed to it as
transposed views, so nothing is copied on the way in, and each run's result is copied to its place before the next
run is computed.
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
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    log_sum_exp = query.new_empty(query.shape[1], len(query), dtype=torch.promote_types(query.dtype, torch.float32))
    cut = zip(
        _by_run(query, runs.query_lengths),
        _by_run(key, runs.key_lengths),
        _by_run(value, runs.key_lengths),
        _by_run(out, runs.query_lengths),
        log_sum_exp[None].split(runs.query_lengths, dim=-1),
        strict=True,
    )
    for *inputs, run_out, run_log_sum_exp in cut:
        results = _forward(*inputs, _NO_DROPOUT, runs.causal)
        run_out.copy_(results[0])
        run_log_sum_exp.copy_(results[1])
    return out, log_sum_exp


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, as ``AttentionBackend.backward``."""
    grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
    cut = zip(
        _by_run(grad_out, runs.query_lengths),
        _by_run(query, runs.query_lengths),
        _by_run(key, runs.key_lengths),
        _by_run(value, runs.key_lengths),
        _by_run(out, runs.query_lengths),
        log_sum_exp[None].split(runs.query_lengths, dim=-1),
        strict=True,
    )
    grads_cut = zip(
        _by_run(grads[0], runs.query_lengths),
        _by_run(grads[1], runs.key_lengths),
        _by_run(grads[2], runs.key_lengths),
        strict=True,
    )
    for inputs, run_grads in zip(cut, grads_cut, strict=True):
        for run_grad, result in zip(run_grads, _backward(*inputs, _NO_DROPOUT, runs.causal), strict=True):
            run_grad.copy_(result)
    return grads[0], grads[1], grads[2]


def _by_run(tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Views (1, heads, run, head_dim), one per run, of a tensor (tokens, heads, head_dim)."""
    return [run.transpose(0, 1)[None] for run in tensor.split(lengths)]
