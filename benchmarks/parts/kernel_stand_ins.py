"""Stand-ins in PyTorch for the kernels that keep documents apart in hybrid models, one token at a time.

They work in any type and on any device, so that a model can be compared in float64 on a CPU. They read ``seq_idx`` and
``cu_seqlens`` as the kernels do; whether transformers hands those on is what they are for.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def install() -> None:
    """Let transformers find them, which looks for kernels as it imports a model."""
    kernels: dict[str, list[Any]] = {
        "causal_conv1d": [causal_conv1d_fn],
        "mamba_ssm.ops.triton.ssd_combined": [mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined],
        "fla.ops.gated_delta_rule": [chunk_gated_delta_rule],
    }
    for name, functions in kernels.items():
        package = name.partition(".")[0]
        module = ModuleType(package)
        module.__spec__ = ModuleSpec(package, None)
        vars(module).update({function.__name__: function for function in functions})
        sys.modules[package] = sys.modules[name] = module
    vars(sys.modules["fla"])["chunk_kda"] = chunk_gated_delta_rule


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, activation: str | None = None
) -> Tensor:
    parts = []
    for part in x.split(_lengths(seq_idx, None, x.shape[-1]), dim=-1):
        padded = F.pad(part, (weight.shape[-1] - 1, 0))
        parts.append(F.conv1d(padded, weight[:, None], bias, groups=part.shape[1]))
    convolved = torch.cat(parts, dim=-1)
    return F.silu(convolved) if activation in ("silu", "swish") else convolved


def mamba_split_conv1d_scan_combined(*arguments: Any, seq_idx: Tensor | None = None, **more: Any) -> None:
    """None, which lets a model take the convolution and the scan one after the other."""


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (tensor.repeat_interleave(x.shape[2] // tensor.shape[2], dim=2) for tensor in (B, C))
    scanned = []
    for first, length in _documents(_lengths(seq_idx, None, x.shape[1])):
        state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1])
        for t in range(first, first + length):
            state = state * torch.exp(A * dt[:, t])[..., None, None]
            state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
            read = (state * C[:, t, :, None]).sum(-1)
            scanned.append(read if D is None else read + D[:, None] * x[:, t])
    return torch.stack(scanned, dim=1)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    q, k = (tensor.repeat_interleave(v.shape[2] // tensor.shape[2], dim=2) for tensor in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = (tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6) for tensor in (q, k))
    decay = g.exp() if g.ndim == 4 else g.exp()[..., None]
    read = []
    for first, length in _documents(_lengths(None, cu_seqlens, q.shape[1])):
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        for t in range(first, first + length):
            state = state * decay[:, t, ..., None]
            learnt = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], learnt)
            read.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(read, dim=1), None


def _lengths(seq_idx: Tensor | None, cu_seqlens: Tensor | None, tokens: int) -> list[int]:
    if cu_seqlens is not None:
        found: list[int] = cu_seqlens.diff().tolist()
        return found
    return [tokens] if seq_idx is None else seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()


def _documents(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(sum(lengths[:number]), length) for number, length in enumerate(lengths)]
