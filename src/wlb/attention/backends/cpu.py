"""PyTorch's flash attention for CPU, one call per sequence, in time proportional to the attended area.

We call the operator directly, because ``scaled_dot_product_attention`` does not return the log-sum-exp of the scores.

The operator takes (batch, heads, tokens, head_dim). It gets slices of our tensors as transposed views, so nothing is
copied on the way in, and each result is copied to its place before the next sequence is computed. The operator has no
window. A sequence with a window runs in blocks of queries, each with a mask over the keys that any query of the block
sees, so that time is still proportional to the attended area.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from wlb.attention.variable_length import VariableLengthBatch

_TYPES = (torch.float64, torch.float32, torch.bfloat16)
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_NO_DROPOUT = 0.0
_LEAST_BLOCK = 128  # queries of a sequence in one call, also where the window is narrower


def unsupported(query: Tensor) -> str | None:
    """Why this back end cannot attend with ``query``; ``None`` if it can."""
    if query.device.type != "cpu":
        return f"the tensors are on {query.device.type}, not on the CPU"
    if query.dtype not in _TYPES:
        return f"{query.dtype} is not one of {', '.join(str(dtype) for dtype in _TYPES)}"
    return None


def forward(q_QHE: Tensor, k_KGE: Tensor, v_KGE: Tensor, batch: VariableLengthBatch) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as ``AttentionBackend.forward``."""
    out_QHE = torch.empty_like(q_QHE, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q_QHE.dtype, torch.float32)
    log_sum_exp_HQ = q_QHE.new_empty(q_QHE.shape[1], len(q_QHE), dtype=wide)
    for queries, keys, is_causal, mask_QK in _blocks(batch, q_QHE.dtype):
        inputs = [_batched(x) for x in (q_QHE[queries], k_KGE[keys], v_KGE[keys])]
        of_block = _forward(*inputs, _NO_DROPOUT, is_causal, attn_mask=mask_QK)
        _batched(out_QHE[queries]).copy_(of_block[0])
        log_sum_exp_HQ[None, :, queries].copy_(of_block[1])
    return out_QHE, log_sum_exp_HQ


def backward(
    grad_QHE: Tensor,
    q_QHE: Tensor,
    k_KGE: Tensor,
    v_KGE: Tensor,
    out_QHE: Tensor,
    log_sum_exp_HQ: Tensor,
    batch: VariableLengthBatch,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, as ``AttentionBackend.backward``."""
    grad_q_QHE, grad_k_KGE, grad_v_KGE = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_QHE, k_KGE, v_KGE)
    )
    if batch.window is not None:  # several blocks of queries see a key; in a narrow type each addition would round
        wide = torch.promote_types(k_KGE.dtype, torch.float32)
        grad_k_KGE, grad_v_KGE = (torch.zeros(k_KGE.shape, dtype=wide) for _ in range(2))
    for queries, keys, is_causal, mask_QK in _blocks(batch, q_QHE.dtype):
        inputs = [_batched(x) for x in (grad_QHE[queries], q_QHE[queries], k_KGE[keys], v_KGE[keys], out_QHE[queries])]
        log_sum_exp = log_sum_exp_HQ[None, :, queries]
        of_block = _backward(*inputs, log_sum_exp, _NO_DROPOUT, is_causal, attn_mask=mask_QK)
        _batched(grad_q_QHE[queries]).copy_(of_block[0])
        for grad_KGE, of_keys in ((grad_k_KGE, of_block[1]), (grad_v_KGE, of_block[2])):
            place = _batched(grad_KGE[keys])
            place.copy_(of_keys) if batch.window is None else place.add_(of_keys)
    return grad_q_QHE, grad_k_KGE.to(k_KGE.dtype), grad_v_KGE.to(v_KGE.dtype)


class _QueryBlock(NamedTuple):
    """Queries of a sequence, all keys that any of them sees, and how: causally, or by a mask added to the scores."""

    queries: slice
    keys: slice
    is_causal: bool
    mask_QK: Tensor | None


def _blocks(batch: VariableLengthBatch, dtype: torch.dtype) -> Iterator[_QueryBlock]:
    """Whole sequences, or with a window blocks of their queries."""
    first_query = first_key = 0
    for queries, keys in zip(batch.query_lengths, batch.key_lengths, strict=True):
        if batch.window is None:
            own, seen = slice(first_query, first_query + queries), slice(first_key, first_key + keys)
            yield _QueryBlock(own, seen, batch.causal, None)
        else:
            yield from _blocks_in_window(first_query, queries, first_key, keys, batch.window, dtype)
        first_query += queries
        first_key += keys


def _blocks_in_window(
    first_query: int, queries: int, first_key: int, keys: int, window: int, dtype: torch.dtype
) -> Iterator[_QueryBlock]:
    before, most = keys - queries, max(window, _LEAST_BLOCK)
    for begin in range(0, queries, most):
        end = min(begin + most, queries)
        seen = max(0, before + begin - window + 1)
        distance_QK = torch.arange(before + begin, before + end)[:, None] - torch.arange(seen, before + end)
        mask_QK = torch.zeros(distance_QK.shape, dtype=dtype)
        mask_QK.masked_fill_((distance_QK < 0) | (distance_QK >= window), float("-inf"))
        of_keys = slice(first_key + seen, first_key + before + end)
        yield _QueryBlock(slice(first_query + begin, first_query + end), of_keys, False, mask_QK)


def _batched(x_THE: Tensor) -> Tensor:
    """A view (1, H, T, E), of queries or keys."""
    return x_THE.transpose(0, 1)[None]
