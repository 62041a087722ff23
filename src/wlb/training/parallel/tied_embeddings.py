"""One matrix for embedding and head, on two pipeline ranks.

With tied embeddings the first and the last stage each hold ``embedding.weight``. Both start equal, because initial
values follow from the name. Each computes the gradient of its own use, and both get the sum, as in Megatron-LM. So the
optimizer changes both copies alike, and they stay equal to the last bit. A checkpoint has the matrix once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from wlb.models.transformer import Transformer


def sum_tied_gradients(stages: Sequence[Transformer], group: dist.ProcessGroup) -> None:
    """Add the gradients of both copies of a tied embedding, if the ranks of ``group`` hold two.

    ``group`` holds the pipeline ranks in order. Call it on all of them, once per step when gradients are complete.
    """
    shared = next((stage.embedding for stage in stages if _has_other_copy(stage)), None)
    if shared is None or shared.weight.grad is None:
        return
    grad = shared.weight.grad
    mine = grad.to_local() if isinstance(grad, DTensor) else grad
    if mine.numel() == 0:  # the other copy is sharded alike
        return
    last = dist.get_world_size(group) - 1
    peer = last - dist.get_rank(group)
    others = torch.empty_like(mine, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, mine.contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, others, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    mine += others


def is_second_copy(stage: Transformer, parameter: Tensor) -> bool:
    """Whether ``parameter`` is the last stage's copy of the tied embedding."""
    return (
        _has_other_copy(stage) and stage.is_last and stage.embedding is not None and parameter is stage.embedding.weight
    )


def _has_other_copy(stage: Transformer) -> bool:
    return stage.config.tied_embeddings and stage.is_first != stage.is_last
