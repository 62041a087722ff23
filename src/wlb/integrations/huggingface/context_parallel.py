"""A rank's share of a collated micro-batch, for models whose ranks attend it together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wlb.integrations.batches.processes import data_parallel_ranks
from wlb.runtime.batch import IGNORE_LABEL
from wlb.runtime.sharded_batch import ShardedAttention
from wlb.sharding import make_shard_plan
from wlb.workload import Costs


def context_parallel_group(cp: int) -> dist.ProcessGroup | None:
    """The group of this process's ``cp`` neighbours; every process calls it. None, the default group, where it is all.

    Raises ``UserError`` where the processes cannot be divided so.
    """
    dp = data_parallel_ranks(dist.get_world_size(), cp)
    if dp == 1:
        return None
    groups: list[dist.ProcessGroup] = [dist.new_group([*range(n * cp, (n + 1) * cp)]) for n in range(dp)]
    return groups[dist.get_rank() // cp]


def context_parallel_share(
    batch: Mapping[str, Any], cp: int, rank: int, sharding: str = "hybrid", workload: Costs | None = None
) -> dict[str, Any]:
    """What ``rank`` of a context-parallel group of ``cp`` trains of a collated micro-batch.

    Tokens and positions are those at ``shard_plan.positions(rank)`` of ``attend``, of shape (1, local tokens + 1): the
    last one is padding that is neither attended nor learnt. As the next token may lie on another rank,
    ``shift_labels`` has the one to predict at each position, and ``labels`` the same one place further on, for losses
    that shift by themselves. ``cu_seq_lens_q`` stays that of the whole micro-batch.
    """
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    plan = make_shard_plan(lengths, cp, sharding, workload=workload)
    positions = torch.from_numpy(plan.positions(rank))
    rows = (1, sum(lengths))
    share = {
        name: F.pad(value[:, positions], (0, 1)) if isinstance(value, Tensor) and value.shape == rows else value
        for name, value in batch.items()
    }
    shifted = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_LABEL)[:, positions]
    return {
        **share,
        "labels": F.pad(shifted, (1, 0), value=IGNORE_LABEL),
        "shift_labels": F.pad(shifted, (0, 1), value=IGNORE_LABEL),
        "attend": ShardedAttention(len(positions), plan, None),
    }
