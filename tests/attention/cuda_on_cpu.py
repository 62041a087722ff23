"""The CUDA back end on CPU tensors, also in float64: an emulation of the two operators that it calls.

It computes what PyTorch's kernels compute, and checks what they check: ``mha_varlen_fwd`` and ``mha_varlen_bwd``
(aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp), and torch/nn/attention/_fa3.py, which runs
FlashAttention 3 behind the same operators. What the kernels would leave unwritten is NaN.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from wlb.attention.backends import cuda

_on_gpu: Any = cuda.unsupported


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Let the CUDA back end attend with CPU tensors of any float type, and ``auto`` choose it."""
    with torch.library._scoped_library("aten", "IMPL") as library, mock.patch.object(cuda, "unsupported", _unsupported):
        library.impl("_flash_attention_forward", _forward, "CPU")
        library.impl("_flash_attention_backward", _backward, "CPU")
        yield


def _unsupported(query: Tensor) -> str | None:
    reason: str | None = _on_gpu(SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=query.shape))
    return reason


def _forward(q_QHE: Tensor, k_KGE: Tensor, v_KGE: Tensor, *arguments: Any, **window: int) -> tuple[Tensor, ...]:
    *lengths, dropout, is_causal, debug_mask = arguments
    assert not dropout
    assert not debug_mask
    q, k, v = _checked(q_QHE, k_KGE, v_KGE)
    out_QHE, log_sum_exp_HQ = torch.full_like(q, torch.nan), q.new_full(q.shape[1::-1], torch.nan)
    for queries, keys, seen_QK in _sequences(lengths, is_causal, **window):
        scores_HQK = _scores(q[queries], k[keys], seen_QK)
        # A query that sees no key gets zeros.
        log_sum_exp_HQ[:, queries] = scores_HQK.logsumexp(-1).masked_fill(~seen_QK.any(-1), torch.inf)
        weights_HQK = (scores_HQK - log_sum_exp_HQ[:, queries, None]).exp()
        out_QHE[queries] = torch.einsum("hqk,khe->qhe", weights_HQK, v[keys])
    random_state, unused = (torch.empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return out_QHE.to(q_QHE.dtype), log_sum_exp_HQ, random_state, unused, q_QHE.new_empty(0)


def _backward(grad_QHE: Tensor, q_QHE: Tensor, k_KGE: Tensor, v_KGE: Tensor, *arguments: Any, **window: int) -> Any:
    out_QHE, log_sum_exp_HQ, *lengths, dropout, is_causal, random_state, _ = arguments
    assert not dropout
    assert (random_state.dtype, random_state.shape) == (torch.uint64, (2,))
    q, k, v, grad, out = _checked(q_QHE, k_KGE, v_KGE, grad_QHE, out_QHE)
    assert (log_sum_exp_HQ.dtype, log_sum_exp_HQ.shape) == (q.dtype, q.shape[1::-1])
    assert log_sum_exp_HQ.is_contiguous()
    heads_of = [x.shape[1] for x in (q_QHE, k_KGE, v_KGE)]
    grads = grad_q, grad_k, grad_v = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    delta_HQ1 = (grad * out).sum(-1).T[..., None]
    for queries, keys, seen_QK in _sequences(lengths, is_causal, **window):
        weights_HQK = (_scores(q[queries], k[keys], seen_QK) - log_sum_exp_HQ[:, queries, None]).exp()
        of_weights_HQK = torch.einsum("qhe,khe->hqk", grad[queries], v[keys]) - delta_HQ1[:, queries]
        of_scores_HQK = weights_HQK * of_weights_HQK * q.shape[-1] ** -0.5
        grad_q[queries] = torch.einsum("hqk,khe->qhe", of_scores_HQK, k[keys])
        grad_k[keys] = torch.einsum("hqk,qhe->khe", of_scores_HQK, q[queries])
        grad_v[keys] = torch.einsum("hqk,qhe->khe", weights_HQK, grad[queries])
    of_heads = (x.unflatten(1, (heads, -1)).sum(2) for x, heads in zip(grads, heads_of, strict=True))
    return tuple(x.to(q_QHE.dtype) for x in of_heads)


def _checked(*tensors: Tensor) -> list[Tensor]:
    """Query, key, value and others, all with the heads of the query and in the type to compute in."""
    query, key, value, *others = tensors
    assert len({tensor.dtype for tensor in tensors}) == 1
    assert all(tensor.ndim == 3 and tensor.stride(-1) == 1 for tensor in tensors)
    assert key.shape == (len(value), *value.shape[1:2], query.shape[2]) == value.shape
    assert all(tensor.shape == query.shape for tensor in others)
    share, rest = divmod(query.shape[1], key.shape[1])
    assert not rest
    wide = torch.promote_types(query.dtype, torch.float32)
    repeated = (tensor.repeat_interleave(share, dim=1) for tensor in (key, value))
    return [tensor.to(wide) for tensor in (query, *repeated, *others)]


def _sequences(
    lengths: list[Any], is_causal: bool, window_size_left: int, window_size_right: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries and keys of each sequence, and which keys each query sees; the last of both are at one place."""
    begins_q, begins_k, *longest_of = lengths
    for begins, longest in zip((begins_q, begins_k), longest_of, strict=True):
        assert begins.dtype == torch.int32
        assert begins.is_contiguous()
        assert longest == int(begins.diff().max())
    assert is_causal == ((window_size_left, window_size_right) == (-1, 0))  # as ``varlen_attn`` calls them
    left, right = (tokens if tokens >= 0 else torch.inf for tokens in (window_size_left, window_size_right))
    for queries, keys in zip(*(pairwise(begins.tolist()) for begins in (begins_q, begins_k)), strict=True):
        places_q, places_k = (torch.arange(begin - end, 0) for begin, end in (queries, keys))
        ahead_QK = places_k - places_q[:, None]
        yield slice(*queries), slice(*keys), (ahead_QK <= right) & (ahead_QK >= -left)


def _scores(q_QHE: Tensor, k_KHE: Tensor, seen_QK: Tensor) -> Tensor:
    scores_HQK = torch.einsum("qhe,khe->hqk", q_QHE, k_KHE).mul_(q_QHE.shape[-1] ** -0.5)
    return scores_HQK.masked_fill_(~seen_QK, -torch.inf)
