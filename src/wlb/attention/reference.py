"""The oracle: dense scores, an explicit mask, one segment at a time, gradients from autograd.

Nothing is fused and nothing is skipped, so what it computes can be read off the code; float64 stays float64
and types below float32 are computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unsupported(query: Tensor) -> str | None:
    """The reference runs everywhere."""
    return None


def attend(query: Tensor, key: Tensor, value: Tensor, segment_lengths: tuple[int, ...]) -> Tensor:
    """Causal attention inside each segment; shapes as in ``segment_attention``."""
    pieces = zip(*(tensor.split(segment_lengths) for tensor in (query, key, value)), strict=True)
    return torch.cat([_attend_one(*piece) for piece in pieces])


def _attend_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tokens, heads, head_dim = query.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    group = heads // key.shape[1]
    k, v = (tensor.to(exact).repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.to(exact), k) / head_dim**0.5
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(diagonal=1)
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)
