"""PyTorch's variable-length flash attention: one CUDA kernel for all segments of a micro-batch.

From torch 2.12 on grouped queries must be asked for by name, before that they may not be; ``_options`` is
the one place that knows.
"""

from __future__ import annotations

import inspect
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_TYPES = (torch.bfloat16, torch.float16)
_CAUSAL = (-1, 0)  # any number of tokens to the left, none to the right


def unsupported(query: Tensor) -> str | None:
    """Why this back end cannot attend with ``query``; ``None`` if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not query.is_cuda:
        return f"the tensors are on {query.device.type}, not on a CUDA device"
    if query.dtype not in _TYPES:
        return f"{query.dtype} is none of {', '.join(str(dtype) for dtype in _TYPES)}"
    return None


def attend(query: Tensor, key: Tensor, value: Tensor, segment_lengths: tuple[int, ...]) -> Tensor:
    """Causal attention inside each segment; shapes as in ``segment_attention``."""
    boundaries = _boundaries(segment_lengths, query.device)
    longest = max(segment_lengths)
    options = _options(query.shape[1] != key.shape[1])
    out = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, window_size=_CAUSAL, **options)
    assert isinstance(out, Tensor)
    return out


@lru_cache(maxsize=64)  # every layer of a micro-batch asks for the same boundaries
def _boundaries(segment_lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(segment_lengths)], dtype=torch.int32, device=device)


@cache
def _options(grouped: bool) -> dict[str, Any]:
    return {"enable_gqa": True} if grouped and "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
