"""A rank's share of a micro-batch under context parallelism.

Labels and positions are those of the whole micro-batch, taken along with the tokens: the label of a piece's last token
is the next token of its document although another rank holds it, and a piece that starts inside a segment goes on
counting where the piece before it ends. So rotary angles and loss are those without sharding, and the losses of the
ranks, each summed over its labels, add up to that of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wlb.sharding.plan import ShardPlan
from wlb.training.batch import TokenBatch


@dataclass(frozen=True)
class ShardedBatch:
    """The tokens of one rank; every tensor is int64 of shape (local tokens,), in the order of the plan.

    ``labels`` and ``positions`` mean what they do in ``TokenBatch``; attention takes ``shard_plan`` in place of the
    segment lengths.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    shard_plan: ShardPlan


def shard_batch(batch: TokenBatch, shard_plan: ShardPlan, rank: int) -> ShardedBatch:
    """The part of ``batch`` that ``rank`` of the context-parallel group holds; it may be empty.

    Raises ``ValueError`` if the plan is for other segments.
    """
    if shard_plan.segment_lengths != batch.segment_lengths:
        raise ValueError(
            f"the plan shards {len(shard_plan.segment_lengths)} segments of {shard_plan.tokens} tokens, "
            f"the batch has {len(batch.segment_lengths)} of {len(batch.tokens)}, or of other lengths"
        )
    mine = torch.from_numpy(shard_plan.positions(rank)).to(batch.tokens.device)
    return ShardedBatch(batch.tokens[mine], batch.labels[mine], batch.positions[mine], shard_plan)
