"""A ``ShardPlan`` as a load balancer of PyTorch's own context parallelism.

    balancer = torch_load_balancer(make_shard_plan(document_lengths, mesh.size(), "per_document"), device)
    q, k, v, block_mask = _context_parallel_shard(mesh, [q, k, v, block_mask], [2, 2, 2, 2], balancer)

PyTorch cuts a rearranged micro-batch into equal parts, so a plan fits if all ranks hold equally many tokens: pack to a
multiple of 2 x CP tokens (PyTorch 2.13 itself wants a multiple of 128 x CP) and choose ``per_sequence`` or
``per_document``. PyTorch gathers all keys and values and attends through a block mask of ``flex_attention``; only the
balance is ours. Its other path, ring attention under ``context_parallel()``, is written for one fixed order and takes
no balancer.

The balancer interface is private to PyTorch and used in this file only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor.experimental._attention import _LoadBalancer

from wlb.errors import UserError
from wlb.sharding.plan import ShardPlan


def torch_load_balancer(shard_plan: ShardPlan, device: torch.device | str = "cpu") -> _LoadBalancer:
    """A load balancer that rearranges a micro-batch as ``shard_plan`` does.

    Accepted wherever PyTorch takes one: ``_context_parallel_shard``, ``context_parallel_unshard``. Every sequence of a
    batch is rearranged alike. Raises ``UserError`` for a plan that gives ranks different numbers of tokens.
    """
    tokens = shard_plan.tokens_per_rank
    if tokens.min() != tokens.max():
        raise UserError(
            f"the {shard_plan.strategy} plan gives ranks {tokens.min()} to {tokens.max()} tokens, PyTorch wants "
            "equally many; choose per_sequence or per_document and pack to a multiple of "
            f"{2 * shard_plan.cp_size} tokens"
        )
    return _PlanLoadBalancer(shard_plan, torch.device(device))


class _PlanLoadBalancer(_LoadBalancer):
    def __init__(self, shard_plan: ShardPlan, device: torch.device) -> None:
        order = np.concatenate([shard_plan.positions(rank) for rank in range(shard_plan.cp_size)])
        self._rearrange = torch.from_numpy(order).to(device)[None]
        self._restore = self._rearrange.argsort()

    def _generate_indices(self, restore: bool = False) -> Tensor:
        return self._restore if restore else self._rearrange
