"""Attention of a whole micro-batch in one process, in float64, by a formulation that shares nothing with ours."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, segment_lengths: Sequence[int], window: int | None = None
) -> Tensor:
    """PyTorch's own attention under a block-diagonal causal mask; arguments as in ``segment_attention``."""
    tokens = len(query)
    segment = torch.repeat_interleave(torch.arange(len(segment_lengths)), torch.tensor(segment_lengths))
    allowed = (segment[:, None] == segment[None]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if window is not None:
        allowed &= torch.arange(tokens)[:, None] - torch.arange(tokens) < window
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    return out.transpose(0, 1)


def random_inputs(
    tokens: int, heads: int, kv_heads: int, head_dim: int, seed: int, value_dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the gradient of the output, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(count: int, width: int) -> Tensor:
        return torch.randn(tokens, count, width, generator=generator, dtype=torch.float64)

    wide = value_dim or head_dim
    return random(heads, head_dim), random(kv_heads, head_dim), random(kv_heads, wide), random(heads, wide)


def output_and_gradients(
    inputs: Sequence[Tensor], segment_lengths: Sequence[int], window: int | None = None
) -> list[Tensor]:
    """The oracle's output and gradients of query, key and value, in float64."""
    *tensors, grad_out = inputs
    query, key, value = (tensor.double().requires_grad_() for tensor in tensors)
    out = dense_attention(query, key, value, segment_lengths, window)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad_out.double())]
