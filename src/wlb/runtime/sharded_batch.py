"""The part of a micro-batch that one rank holds under context parallelism.

Labels and positions come from the whole micro-batch. The label of the last token of a piece is the next token of its
document, even if another rank holds that token. A piece that starts inside a segment continues the positions of the
piece before it. So rotary angles and loss equal those without sharding, and the summed losses of the ranks add up to
the loss of the micro-batch.

Tensor-parallel ranks split these tokens evenly, so padding may follow. It has no label and no attention, and changes no
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wlb.attention import context_parallel_attention
from wlb.attention.exchange import KVReexchanges
from wlb.attention.packed_attention import AttentionCache
from wlb.attention.shard_layout import on_device
from wlb.attention.slices import KeptSlices, SliceInLayer, SliceOf
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.batch import TokenBatch
from wlb.runtime.loss import IGNORE_LABEL
from wlb.runtime.own_lists import own_batches
from wlb.schedules.layout import Layout
from wlb.sharding import LEVEL_SHARDING, make_shard_plan
from wlb.sharding.plan import ShardPlan
from wlb.workload import Costs


@dataclass(frozen=True)
class ShardedBatch:
    """The tokens of one rank; every tensor is int64 of shape (rows,), in the order of the plan.

    The first ``local_tokens`` rows are tokens, the rest is padding. ``TokenBatch`` explains ``labels``, ``positions``
    and ``slice_of``. This rank is ``rank`` of ``shard_plan``. ``ranks`` are those of the context-parallel group that
    share the plan; empty means all.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    local_tokens: int
    shard_plan: ShardPlan
    rank: int = 0
    ranks: tuple[int, ...] = ()
    slice_of: SliceOf | None = None

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment of the whole micro-batch."""
        return self.shard_plan.segment_lengths

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hold parts of the micro-batch."""
        return self.shard_plan.cp_size > 1

    @property
    def rows(self) -> int:
        return len(self.tokens)

    def attention(self, group: dist.ProcessGroup) -> ShardedAttention:
        """Attention over these rows, together with the context-parallel ``group``."""
        sharing = group if self.shard_plan.cp_size > 1 else None
        ranks = self.ranks or None
        return ShardedAttention(self.local_tokens, self.shard_plan, sharing, ranks, KVReexchanges(), self.slice_of)

    def to(self, device: torch.device) -> ShardedBatch:
        named: dict[str, Any] = {
            name: on_device(getattr(self, name), device) for name in ("tokens", "labels", "positions")
        }
        return replace(self, **named)


def shard_batch(
    batch: TokenBatch, shard_plan: ShardPlan, rank: int, multiple_of: int = 1, ranks: tuple[int, ...] = ()
) -> ShardedBatch:
    """The part of ``batch`` that ``rank`` holds in a plan for ``ranks`` of the context-parallel group.

    It is padded to a multiple of ``multiple_of`` (the tensor-parallel size), and to at least one: a rank without tokens
    gets only padding. Raises ``ValueError`` if the plan is for other segments.
    """
    earlier = batch.slice_of and batch.slice_of.earlier
    if (shard_plan.segment_lengths, shard_plan.earlier) != (batch.segment_lengths, earlier):
        raise ValueError(
            f"the plan shards {len(shard_plan.segment_lengths)} segments of {shard_plan.tokens} tokens, the batch has "
            f"{len(batch.segment_lengths)} of {len(batch.tokens)}, other lengths, or another slice; plan this batch"
        )
    mine = torch.from_numpy(shard_plan.positions(rank)).to(batch.tokens.device)
    padding = max(-len(mine) % multiple_of, 0 if len(mine) else multiple_of)
    return ShardedBatch(
        F.pad(batch.tokens[mine], (0, padding)),
        F.pad(batch.labels[mine], (0, padding), value=IGNORE_LABEL),
        F.pad(batch.positions[mine], (0, padding)),
        len(mine),
        shard_plan,
        rank,
        ranks,
        batch.slice_of,
    )


@dataclass(frozen=True)
class RankSlice:
    """The part of a step that a rank trains, and how its context-parallel group shards micro-batches.

    ``workload`` prices shards: the workload of one GPU without context parallelism. Pipeline ranks with the same dp and
    cp rank, and all tensor-parallel ranks, have the same part.
    """

    dp_rank: int = 0
    cp_rank: int = 0
    layout: Layout = field(default_factory=Layout)
    strategy: str = "balanced"
    workload: Costs | None = None

    def of(self, batch: TokenBatch, ranks: tuple[int, ...] = ()) -> ShardedBatch:
        """The part of ``batch`` on this rank, if the context-parallel ``ranks`` share the batch; empty means all."""
        strategy, workload = (LEVEL_SHARDING, None) if ranks else (self.strategy, self.workload)
        cp, earlier = len(ranks) or self.layout.cp, batch.slice_of and batch.slice_of.earlier
        plan = make_shard_plan(batch.segment_lengths, cp, strategy, workload=workload, earlier=earlier)
        rank = ranks.index(self.cp_rank) if ranks else self.cp_rank
        return shard_batch(batch, plan, rank, self.layout.tp, ranks)

    def batches(self, plan: StepPlan, read: Callable[[MicroBatch], TokenBatch]) -> tuple[ShardedBatch, ...]:
        """The parts of the micro-batches of ``plan`` on this rank (``own_batches``)."""
        return own_batches(plan, self.dp_rank, self.cp_rank, lambda part: self.of(read(part), part.ranks))


@dataclass(frozen=True)
class ShardedAttention:
    """Attention over the rows of a ``ShardedBatch``: over its tokens by the plan, and zero for padding.

    The plan is for ``members`` of ``group``, all by default; a plan for one rank has no group. The layers of a stage
    share ``reexchanges``; without it the backward exchanges keys and values only when it needs them. A slice needs
    ``layers``, which its stage keeps.
    """

    local_tokens: int
    shard_plan: ShardPlan
    group: dist.ProcessGroup | None
    members: tuple[int, ...] | None = None
    reexchanges: KVReexchanges | None = None
    slice_of: SliceOf | None = None
    layers: Iterator[SliceInLayer] | None = None

    def of_one_stage(self, kept_slices: KeptSlices) -> ShardedAttention:
        """A copy for one forward through the layers of a stage, which holds ``kept_slices`` in this step."""
        layers = self.slice_of and kept_slices.layers(self.slice_of)
        return replace(self, reexchanges=KVReexchanges(), layers=layers)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: AttentionCache | None = None,
        window: int | None = None,
    ) -> Tensor:
        """From query (rows, heads, head_dim), key and value (rows, kv_heads, head_dim) to an output like the query.

        ``context_parallel_attention`` explains ``cache``, for activation checkpointing, and ``window``.
        """
        sliced = None if self.layers is None else (cache and cache.sliced) or next(self.layers)
        if cache is not None:
            cache.sliced = sliced
        padding = len(query) - self.local_tokens
        if padding:
            query, key, value = (tensor[: self.local_tokens] for tensor in (query, key, value))
        out = context_parallel_attention(
            query,
            key,
            value,
            self.shard_plan,
            self.group,
            cache=cache,
            reexchanges=self.reexchanges,
            window=window,
            members=self.members,
            sliced=sliced,
        )
        return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out
