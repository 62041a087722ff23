"""A rank's share of a collated micro-batch, for models whose ranks attend it together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wlb.errors import UserError
from wlb.sharding import make_shard_plan
from wlb.training.data.batch import IGNORE_LABEL
from wlb.workload.base import Workload


def context_parallel_group(cp: int) -> dist.ProcessGroup | None:
    """The group of this process's ``cp`` neighbours; every process calls it. None, the default group, where it is all.

    Raises ``UserError`` where the processes cannot be divided so.
    """
    world = dist.get_world_size()
    if world % cp:
        raise UserError(
            f"{world} processes cannot be divided into context-parallel groups of cp = {cp}; give a divisor"
        )
    if world == cp:
        return None
    groups: list[dist.ProcessGroup] = [dist.new_group(list(range(first, first + cp))) for first in range(0, world, cp)]
    return groups[dist.get_rank() // cp]


def context_parallel_share(
    batch: Mapping[str, Any], cp: int, rank: int, sharding: str = "hybrid", workload: Workload | None = None
) -> dict[str, Any]:
    """What ``rank`` of a context-parallel group of ``cp`` trains of a collated micro-batch.

    Tokens, positions and labels are those at ``shard_plan.positions(rank)``; ``shift_labels`` (the token to predict at
    each position) take the place of labels, because the next token may lie on another rank. A rank without tokens gets
    one that is neither attended nor learnt. ``cu_seq_lens_q`` stays that of the whole micro-batch.
    """
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    plan = make_shard_plan(lengths, cp, sharding, workload=workload)
    positions = torch.from_numpy(plan.positions(rank))
    padding = 0 if len(positions) else 1
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_LABEL)

    def mine(tensor: Tensor, value: int = 0) -> Tensor:
        return F.pad(tensor[:, positions], (0, padding), value=value)

    shifted = mine(labels, IGNORE_LABEL)
    return {
        **batch,
        "input_ids": mine(batch["input_ids"]),
        "position_ids": mine(batch["position_ids"]),
        "labels": shifted,  # only counted: the loss reads shift_labels
        "shift_labels": shifted,
        "shard_plan": plan,
    }
