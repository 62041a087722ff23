"""Load balancers for PyTorch's own context parallelism of ``flex_attention``, which gathers all keys and values.

    balancer = MaskBlockBalancer(block_mask, mesh.size())
    q, k, v, block_mask = _context_parallel_shard(mesh, [q, k, v, block_mask], [2, 2, 2, 2], balancer)

Its kernel attends by blocks of the mask, 128 queries by 128 keys, so a rank's work is the number of its blocks that are
not empty. ``MaskBlockBalancer`` divides whole blocks, which leaves no more of them than one process attends.

A ``ShardPlan`` cuts documents at any token, and a block that holds parts of many documents is attended for each of
them; ``torch_load_balancer`` takes one all the same, where every rank holds as many tokens. Micro-batches are a
multiple of 128 x CP tokens, as PyTorch wants. Its ring attention under ``context_parallel()`` has one fixed order and
takes no balancer.

The balancer interface is private to PyTorch and used in this file only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor.experimental._attention import _LoadBalancer
from torch.nn.attention.flex_attention import BlockMask

from wlb.errors import UserError
from wlb.packing.balance import balance
from wlb.sharding.plan import ShardPlan


class _FixedOrder(_LoadBalancer):
    """``order``: positions in the micro-batch, rank after rank, of shape (rows or 1, tokens)."""

    def __init__(self, order: Tensor) -> None:
        self._rearrange = order
        self._restore = order.argsort()

    def _generate_indices(self, restore: bool = False) -> Tensor:
        return self._restore if restore else self._rearrange


class MaskBlockBalancer(_FixedOrder):
    """Every rank gets equally many blocks of queries, and as equally many blocks of the mask as ``wlb.balance`` finds.

    Takes the place of PyTorch's ``_PTRRLoadBalancer`` and has its arguments: the mask of the whole micro-batch, of any
    kind (documents, sliding windows) but the same for all heads, and the context-parallel ranks. Rows of a batch are
    divided each for itself. Raises ``UserError`` for blocks that cannot be divided equally.
    """

    def __init__(self, block_mask: BlockMask, world_size: int) -> None:
        size, key_size = block_mask.BLOCK_SIZE
        tokens = block_mask.seq_lengths[0]
        if size != key_size:
            raise UserError(f"mask blocks of {size} queries by {key_size} keys cannot be divided; make them square")
        if tokens % (size * world_size):
            raise UserError(
                f"{tokens} tokens are no whole number of mask blocks for each of {world_size} context-parallel ranks; "
                f"pad micro-batches to a multiple of {size * world_size} tokens"
            )
        work = block_mask.kv_num_blocks
        if block_mask.full_kv_num_blocks is not None:
            work = work + block_mask.full_kv_num_blocks
        if work.shape[1] != 1:
            raise UserError(f"the mask differs between {work.shape[1]} heads; ranks are balanced for one mask")
        blocks = [
            np.concatenate(balance(row, world_size, workload="tokens", equal_size=True))
            for row in work[:, 0].clamp(min=1).cpu().numpy()
        ]
        first = torch.from_numpy(np.stack(blocks) * size).to(work.device)
        super().__init__((first[:, :, None] + torch.arange(size, device=work.device)).flatten(1))


def torch_load_balancer(shard_plan: ShardPlan, device: torch.device | str = "cpu") -> _LoadBalancer:
    """A load balancer that rearranges a micro-batch as ``shard_plan`` does.

    Accepted wherever PyTorch takes one: ``_context_parallel_shard``, ``context_parallel_unshard``. Every sequence of a
    batch is rearranged alike. Raises ``UserError`` for a plan that gives ranks different numbers of tokens.
    """
    tokens = shard_plan.tokens_per_rank
    if tokens.min() != tokens.max():
        raise UserError(
            f"the {shard_plan.strategy} plan gives ranks {tokens.min()} to {tokens.max()} tokens, PyTorch wants "
            "equally many; use MaskBlockBalancer, or per_sequence or per_document with micro-batches of a multiple of "
            f"{2 * shard_plan.cp_size} tokens"
        )
    order = np.concatenate([shard_plan.positions(rank) for rank in range(shard_plan.cp_size)])
    return _FixedOrder(torch.from_numpy(order).to(device)[None])
