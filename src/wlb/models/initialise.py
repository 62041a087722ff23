"""Initial weights that depend only on the seed and the parameter's name.

The rows of a parameter are drawn in blocks, each by a generator of its own, seeded by a hash of (seed, full-model name,
block). So any split over pipeline stages and ranks, and any type of the weights, starts from the same numbers, and a
rank draws little more than the rows that it holds.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

# GPT-2's scheme: normal of this deviation, the projections back into the residual stream scaled down by
# sqrt(2 * layers), so that the stream's variance does not grow with depth.
_DEVIATION = 0.02
_INTO_RESIDUAL_STREAM = ("attention.wo.weight", "feed_forward.w2.weight")
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
    """What this rank holds of a matrix of standard normal numbers of the shape of ``matrix``."""
    rows, columns = _held_indices(matrix, 0), _held_indices(matrix, 1)
    values = torch.empty(len(rows), len(columns))
    blocks, counts = torch.unique_consecutive(rows // _BLOCK_ROWS, return_counts=True)
    here = counts.tolist()
    for block, rows_here, values_here in zip(blocks.tolist(), rows.split(here), values.split(here), strict=True):
        digest = hashlib.sha256(f"{key}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        drawn = torch.randn(_BLOCK_ROWS, matrix.shape[1], generator=generator)
        values_here.copy_(drawn[rows_here - block * _BLOCK_ROWS][:, columns])
    return values


def _held_indices(matrix: Tensor, dimension: int) -> Tensor:
    """The rows (0) or columns (1) of ``matrix`` that this rank holds."""
    indices = torch.arange(matrix.shape[dimension])
    if not isinstance(matrix, DTensor):
        return indices
    divided = [getattr(place, "dim", None) == dimension for place in matrix.placements]  # by Shard or _StridedShard
    along = [Shard(0) if dimension else place for place in matrix.placements]
    places = [place if cut else Replicate() for place, cut in zip(along, divided, strict=True)]
    # Every rank has the same numbers; src_data_rank=None cuts out the local part, no broadcast.
    return distribute_tensor(indices, matrix.device_mesh, places, src_data_rank=None).to_local().cpu()
