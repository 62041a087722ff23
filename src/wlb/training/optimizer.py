"""AdamW, and the norm of gradients that are spread over the whole job."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wlb.config import TrainingConfig
from wlb.models.transformer import Transformer
from wlb.training.parallel.tied_embeddings import is_second_copy


def build_optimizer(stage: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over one model stage; weight decay acts on matrices, not on norms and other vectors.

    Its moments exist from the start, as zeros: a checkpoint has them also where every step so far was skipped.
    """
    parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


@torch.no_grad()
def clip_gradients(stages: Sequence[nn.Module], largest: float) -> float:
    """Scale all gradients of the job so that their global 2-norm is at most ``largest``; 0 only measures.

    Every rank contributes the squares of what it holds: its pipeline stages, of those its shards. Returns the norm
    before clipping, the same on every rank.
    """
    counted = [(p.grad, _share(stage, p)) for stage in stages for p in stage.parameters() if p.grad is not None]
    gradients = [_local(gradient) for gradient, _ in counted]
    squares = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for (_, share), part in zip(counted, torch._foreach_norm(gradients), strict=True):
        squares += part.double() ** 2 * share
    dist.all_reduce(squares)
    norm = math.sqrt(squares.item())
    if 0 < largest < norm:
        torch._foreach_mul_(gradients, largest / norm)
    return norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _share(stage: nn.Module, parameter: Tensor) -> float:
    """What this rank counts of its part, so that the ranks that hold the same part count it once.

    Tensor-parallel ranks do of the weights that they do not split, the first and the last stage of a tied embedding.
    """
    if isinstance(stage, Transformer) and is_second_copy(stage, parameter):
        return 0.0
    if not isinstance(parameter, DTensor):
        return 1.0
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return 1 / math.prod(size for size, placement in sizes if placement.is_replicate())
