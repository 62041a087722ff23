"""PyTorch's variable-length flash attention: one CUDA kernel for all sequences.

Both passes call the operators beneath the public ``torch.nn.attention.varlen.varlen_attn``. We cannot use its gradient,
because the output and log-sum-exp of a query that attends two sets of keys are merged. Nor can we use its forward: from
torch 2.14 on it may run cuDNN's kernel on GPUs of compute capability 9.0 and 10.0, whose log-sum-exp only cuDNN's own
backward understands.

Both passes follow ``torch.nn.attention.activate_flash_attention_impl``. Under
``torch.use_deterministic_algorithms(True)`` the backward of FlashAttention 2 is deterministic, and the backward of
FlashAttention 3 (hopper/flash_bwd_launch_template.h) is not.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from wlb.attention.shard_layout import on_device
from wlb.attention.variable_length import VariableLengthBatch

_TYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD_DIM = 256  # of FlashAttention-2, which also wants multiples of 8
_ANY = -1  # number of tokens that a query sees to its left or right
_NO_DROPOUT, _NO_DEBUG_MASK = 0.0, False
_NO_RANDOM_STATE = 2  # numbers in the random state that the operator takes even without dropout


def unsupported(query: Tensor) -> str | None:
    """Why this back end cannot attend with ``query``; ``None`` if it can."""
    if not query.is_cuda:
        return f"the tensors are on {query.device.type}, not on a CUDA device"
    if torch.version.hip:
        return "PyTorch for ROCm arranges the log-sum-exp differently"
    if query.dtype not in _TYPES:
        return f"{query.dtype} is not one of {', '.join(str(dtype) for dtype in _TYPES)}"
    if query.shape[-1] > _LARGEST_HEAD_DIM or query.shape[-1] % 8:
        return f"head_dim {query.shape[-1]} is not a multiple of 8 up to {_LARGEST_HEAD_DIM}"
    return None


def forward(q_QHE: Tensor, k_KGE: Tensor, v_KGE: Tensor, batch: VariableLengthBatch) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as ``AttentionBackend.forward``."""
    is_causal, window = _mask(batch)
    cu_seqlens = _cu_seqlens(batch, q_QHE.device)
    out_QHE, log_sum_exp_HQ, *_ = torch.ops.aten._flash_attention_forward(
        q_QHE, k_KGE, v_KGE, *cu_seqlens, _NO_DROPOUT, is_causal, _NO_DEBUG_MASK, **window
    )
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
    is_causal, window = _mask(batch)
    grad_q_QHE, grad_k_KGE, grad_v_KGE = torch.ops.aten._flash_attention_backward(
        grad_QHE.contiguous(),
        *(q_QHE, k_KGE, v_KGE),
        out_QHE,
        log_sum_exp_HQ.contiguous(),
        *_cu_seqlens(batch, q_QHE.device),
        _NO_DROPOUT,
        is_causal,
        torch.zeros(_NO_RANDOM_STATE, dtype=torch.uint64, device=q_QHE.device),
        torch.empty(0, device=q_QHE.device),
        **window,
    )
    return grad_q_QHE, grad_k_KGE, grad_v_KGE


def _mask(batch: VariableLengthBatch) -> tuple[bool, dict[str, int]]:
    """The mask as the operators take it: causal or not, and how many tokens a query sees to its left and right.

    Both are aligned at the last query and the last key of a sequence. As in ``varlen_attn``, a window is not causal.
    """
    if batch.window is not None:
        return False, {"window_size_left": batch.window - 1, "window_size_right": 0}
    return batch.causal, {"window_size_left": _ANY, "window_size_right": 0 if batch.causal else _ANY}


@lru_cache(maxsize=64)  # all layers of a micro-batch call it with the same arguments
def _cu_seqlens(batch: VariableLengthBatch, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Cumulative lengths of queries and of keys, and the longest sequence of each."""
    queries, keys = (
        on_device(np.cumsum([0, *lengths], dtype=np.int32), device)
        for lengths in (batch.query_lengths, batch.key_lengths)
    )
    return queries, keys, max(batch.query_lengths), max(batch.key_lengths)
