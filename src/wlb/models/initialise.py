"""Initial weights that depend only on the seed and the parameter's name.

The rows of a parameter are drawn in blocks. Each block has its own generator, seeded by a hash of (seed, full-model
name, block). So any layout and any type of the weights starts from the same numbers, and a rank draws little more than
the rows that it holds.
"""

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # DCP's

# GPT-2's scheme: normal of this deviation, the projections back into the residual stream scaled down by
# sqrt(2 * layers), so that the stream's variance does not grow with depth.
_DEVIATION = 0.02
_INTO_RESIDUAL_STREAM = ("attention.wo.weight", "feed_forward.w2.weight", "experts.w2", "shared.w2.weight")
_BLOCK_ROWS = 64


@torch.no_grad()
def initialise_weights(module: nn.Module, *, layers: int, seed: int) -> None:
    """Fill the parameters of a ``Transformer`` or of one stage of it, sharded or not.

    ``layers`` counts the blocks of the full model.
    """
    for name, parameter in module.named_parameters():
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if name.endswith("norm.weight"):
            held.fill_(1.0)
        elif name.endswith(".bias"):
            held.zero_()
        else:
            scale = (2 * layers) ** -0.5 if name.endswith(_INTO_RESIDUAL_STREAM) else 1.0
            held.copy_(_held_normals(f"{seed}/{name}", parameter) * (_DEVIATION * scale))


def _held_normals(key: str, matrix: Tensor) -> Tensor:
    """This rank's part of a matrix of standard normal numbers of the shape of ``matrix``."""
    (height, width), (top, left) = matrix.shape, (0, 0)
    if isinstance(matrix, DTensor):  # from sizes alone, because in a dry run tensors have no values
        of_mesh = matrix.device_mesh, matrix.placements
        (height, width), (top, left) = compute_local_shape_and_global_offset(matrix.shape, *of_mesh)
    drawn = [torch.empty(0, width)]
    for begin in range(top - top % _BLOCK_ROWS, top + height, _BLOCK_ROWS):
        digest = hashlib.sha256(f"{key}/{begin}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        block = torch.randn(_BLOCK_ROWS, matrix.shape[1], generator=generator)
        drawn.append(block[max(0, top - begin) : top + height - begin, left : left + width])
    return torch.cat(drawn)
