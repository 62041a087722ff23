"""PyTorch's flash attention for CPU, one call per run, in time proportional to the attended area.

The operator returns the log-sum-exp of each query's scores beside the output, and its backward twin takes
both. That is why it is called directly instead of through ``scaled_dot_product_attention``.

The operator wants (batch, heads, tokens, head_dim); slices of (tokens, heads, head_dim) are handed to it as transposed
views, so nothing is copied on the way in, and each run's result is copied to its place before the next run is computed.
It has no window; a run with one goes in blocks of queries, each with a mask over the keys that any of the block sees,
so that time is still proportional to the attended area.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wlb.attention.runs import Runs

_TYPES = (torch.float64, torch.float32, torch.bfloat16)
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_NO_DROPOUT = 0.0
_LEAST_BLOCK = 128  # queries of a run that go in one call, also where the window is narrower


def unsupported(query: Tensor) -> str | None:
    """Why this back end cannot attend with ``query``; ``None`` if it can."""
    if query.device.type != "cpu":
        return f"the tensors are on {query.device.type}, not on the CPU"
    if query.dtype not in _TYPES:
        return f"{query.dtype} is none of {', '.join(str(dtype) for dtype in _TYPES)}"
    return None


def forward(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as ``AttentionBackend.forward``."""
    if runs.window is not None:
        return _forward_in_window(query, key, value, runs)
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
    if runs.window is not None:
        return _backward_in_window(grad_out, query, key, value, out, log_sum_exp, runs)
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
    return [_batched(run) for run in tensor.split(lengths)]


class _Block(NamedTuple):
    """Queries of a run, all keys that one of them sees, and a mask to be added to the scores."""

    queries: slice
    keys: slice
    mask: Tensor


def _forward_in_window(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    log_sum_exp = query.new_empty(query.shape[1], len(query), dtype=torch.promote_types(query.dtype, torch.float32))
    for rows, keys, mask in _blocks(runs, query.dtype):
        inputs = (_batched(query[rows]), _batched(key[keys]), _batched(value[keys]))
        block_out, block_log_sum_exp = _forward(*inputs, _NO_DROPOUT, False, attn_mask=mask)
        _batched(out[rows]).copy_(block_out)
        log_sum_exp[None, :, rows].copy_(block_log_sum_exp)
    return out, log_sum_exp


def _backward_in_window(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    # Several blocks of queries see a key; a narrow type would round with each.
    wide = torch.promote_types(key.dtype, torch.float32)
    grad_key, grad_value = (torch.zeros(key.shape, dtype=wide) for _ in range(2))
    for rows, keys, mask in _blocks(runs, query.dtype):
        inputs = [_batched(tensor) for tensor in (grad_out[rows], query[rows], key[keys], value[keys], out[rows])]
        of_block = _backward(*inputs, log_sum_exp[None, :, rows], _NO_DROPOUT, False, attn_mask=mask)
        _batched(grad_query[rows]).copy_(of_block[0])
        _batched(grad_key[keys]).add_(of_block[1])
        _batched(grad_value[keys]).add_(of_block[2])
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _blocks(runs: Runs, dtype: torch.dtype) -> Iterator[_Block]:
    assert runs.window is not None
    most = max(runs.window, _LEAST_BLOCK)
    first_query = first_key = 0
    for queries, keys in zip(runs.query_lengths, runs.key_lengths, strict=True):
        before = keys - queries
        for begin in range(0, queries, most):
            end = min(begin + most, queries)
            seen = max(0, before + begin - runs.window + 1)
            distance = torch.arange(before + begin, before + end)[:, None] - torch.arange(seen, before + end)
            mask = torch.zeros(distance.shape, dtype=dtype)
            mask.masked_fill_((distance < 0) | (distance >= runs.window), float("-inf"))
            yield _Block(
                slice(first_query + begin, first_query + end), slice(first_key + seen, first_key + before + end), mask
            )
        first_query += queries
        first_key += keys


def _batched(tensor: Tensor) -> Tensor:
    """A view (1, heads, tokens, head_dim) of a tensor (tokens, heads, head_dim)."""
    return tensor.transpose(0, 1)[None]
