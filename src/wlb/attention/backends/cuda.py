"""PyTorch's variable-length flash attention: one CUDA kernel for all runs.

The forward pass is the public ``varlen_attn``; from torch 2.12 on grouped queries must be asked for by name,
before that they may not be, and ``_options`` is the one place that knows. Its gradient cannot be used as it is,
because the output and log-sum-exp of queries that attend two sets of keys are merged ones; so the backward pass
calls the operator beneath it.

Both follow ``torch.nn.attention.activate_flash_attention_impl``: where FlashAttention 3 or 4 is installed and
activated, they run it.
"""

from __future__ import annotations

import inspect
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from wlb.attention.runs import Runs

_TYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD_DIM = 256  # of FlashAttention-2, which also wants multiples of 8
_ANY, _CAUSAL = (-1, -1), (-1, 0)  # tokens seen to the left and to the right; -1 is any number
_NO_DROPOUT, _NO_RANDOM_STATE = 0.0, 2  # the operator wants a state of two numbers also where nothing is random


def unsupported(query: Tensor) -> str | None:
    """Why this back end cannot attend with ``query``; ``None`` if it can."""
    if not query.is_cuda:
        return f"the tensors are on {query.device.type}, not on a CUDA device"
    if torch.version.hip:
        return "PyTorch for ROCm arranges the log-sum-exp differently"
    return unsupported_by_kernel(query)


def unsupported_by_kernel(query: Tensor) -> str | None:
    """The same for a query that is on a CUDA device."""
    if query.dtype not in _TYPES:
        return f"{query.dtype} is none of {', '.join(str(dtype) for dtype in _TYPES)}"
    if query.shape[-1] > _LARGEST_HEAD_DIM or query.shape[-1] % 8:
        return f"head_dim {query.shape[-1]} is not a multiple of 8 up to {_LARGEST_HEAD_DIM}"
    return None


def forward(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as ``AttentionBackend.forward``."""
    out, log_sum_exp = varlen_attn(
        query,
        key,
        value,
        *_extents(runs, query.device),
        return_aux=AuxRequest(lse=True),
        window_size=_window_size(runs),
        **_options(query.shape[1] != key.shape[1]),
    )
    return out, log_sum_exp


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, as ``AttentionBackend.backward``."""
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        grad_out.contiguous(),
        query,
        key,
        value,
        out,
        log_sum_exp.contiguous(),
        *_extents(runs, query.device),
        _NO_DROPOUT,
        runs.causal,
        torch.zeros(_NO_RANDOM_STATE, dtype=torch.uint64, device=query.device),
        torch.empty(0, device=query.device),
        **_window_options(runs),
    )
    return grad_query, grad_key, grad_value


def _window_size(runs: Runs) -> tuple[int, int]:
    if runs.window is not None:  # aligned at the last query and the last key, as the runs are
        return runs.window - 1, 0
    return _CAUSAL if runs.causal else _ANY


def _window_options(runs: Runs) -> dict[str, int]:
    """For the operator beneath, which takes a window beside ``causal``."""
    left, right = _window_size(runs)
    return {} if runs.window is None else {"window_size_left": left, "window_size_right": right}


@lru_cache(maxsize=64)  # every layer of a micro-batch asks for the same
def _extents(runs: Runs, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Where the runs of queries and of keys begin and end, and the longest of each."""
    queries, keys = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        for lengths in (runs.query_lengths, runs.key_lengths)
    )
    return queries, keys, max(runs.query_lengths), max(runs.key_lengths)


@cache
def _options(grouped: bool) -> dict[str, Any]:
    return {"enable_gqa": True} if grouped and "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
