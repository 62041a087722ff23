"""Initial weights that depend only on the seed and the parameter's name.

Every parameter draws from a generator of its own, seeded by a hash of (seed, full-model name). So any split
over pipeline stages and data-parallel ranks, and any type of the weights, starts from the same numbers, and
a model built on the meta device needs memory for one whole parameter at a time.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

# GPT-2's scheme: normal of this deviation, the projections back into the residual stream scaled down by
# sqrt(2 * layers), so that the stream's variance does not grow with depth.
_DEVIATION = 0.02
_INTO_RESIDUAL_STREAM = ("attention.wo.weight", "feed_forward.w2.weight")


@torch.no_grad()
def initialise_weights(module: nn.Module, *, layers: int, seed: int) -> None:
    """Fill the parameters of a ``Transformer`` or of one stage of it, sharded or not.

    ``layers`` counts the blocks of the full model.
    """
    for name, parameter in module.named_parameters():
        full = _initial_value(name, parameter.shape, layers, seed).to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            # Every rank drew the same numbers; src_data_rank=None cuts out the local part, no broadcast.
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(full)


def _initial_value(name: str, shape: torch.Size, layers: int, seed: int) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    scale = (2 * layers) ** -0.5 if name.endswith(_INTO_RESIDUAL_STREAM) else 1.0
    return torch.randn(shape, generator=generator) * (_DEVIATION * scale)
