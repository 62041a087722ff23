"""A micro-batch as tensors, and the part of it that one rank holds under context parallelism.

Labels and positions come from the whole micro-batch. The label of the last token of a piece is the next token of its
document, even if another rank holds that token. A piece that starts inside a segment continues the positions of the
piece before it. So rotary angles and loss equal those without sharding, and the summed losses of the ranks add up to
the loss of the micro-batch. Padding has no label and no attention.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wlb.attention import context_parallel_attention
from wlb.attention.exchange import KVReexchanges
from wlb.attention.packed_attention import AttentionCache
from wlb.attention.shard_layout import on_device
from wlb.attention.slices import KeptSlices, SliceInLayer, SliceOf
from wlb.errors import UserError
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.loss import IGNORE_LABEL, packed_loss
from wlb.runtime.own_lists import own_batches
from wlb.schedules.layout import Layout
from wlb.sharding import LEVEL_SHARDING, make_shard_plan
from wlb.sharding.plan import ShardPlan
from wlb.workload import Costs


@dataclass(frozen=True)
class ShardedAttention:
    """Attention over the rows of a part: over its ``local_tokens`` by the plan, and zero for the padding after them.

    The plan is for ``members`` of ``group``, all by default; a plan for one rank has no group. The layers of a stage
    share ``reexchanges``; without it the backward exchanges keys and values only when it needs them. A slice needs
    ``layers``, which its stage keeps (``of_one_stage``).
    """

    local_tokens: int
    shard_plan: ShardPlan
    group: dist.ProcessGroup | None
    members: tuple[int, ...] | None = None
    reexchanges: KVReexchanges | None = None
    slice_of: SliceOf | None = None
    layers: Iterator[SliceInLayer] | None = None

    def of_one_stage(self, kept_slices: KeptSlices | None = None) -> Self:
        """A copy for one forward through the layers of a stage, which holds ``kept_slices`` in this step."""
        layers = kept_slices.layers(self.slice_of) if kept_slices and self.slice_of else None
        return replace(self, reexchanges=KVReexchanges(), layers=layers)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, cache: AttentionCache | None = None, window: int | None = None
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


@dataclass(frozen=True)
class Batch:
    """A micro-batch, or the part of it that one rank holds; every tensor is int64 of shape (tokens,).

    ``labels`` holds the next token of the document, or -100. ``position_ids`` count from 0 in each segment, or in a
    slice from the number of tokens before it. ``segment_lengths`` are those of the whole micro-batch, in packed order;
    ``slice_of`` locates the first segment in its document, if it is a slice. A part comes with its ``attention``.
    ``loss_tokens`` counts the labelled tokens of the step on all ``ranks`` (dp x cp). A batch that ``is_empty`` has no
    documents, and one token without a label.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    segment_lengths: tuple[int, ...]
    slice_of: SliceOf | None = None
    attention: ShardedAttention | None = None
    loss_tokens: int = 0
    ranks: int = 1
    is_empty: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hold parts of the micro-batch."""
        return self.attention is not None and self.attention.shard_plan.cp_size > 1

    @property
    def own_tokens(self) -> int:
        """Tokens of the step on this rank; padding is none, nor is the token of an empty batch."""
        held = len(self.tokens) if self.attention is None else self.attention.local_tokens
        return 0 if self.is_empty else held

    @property
    def attend(self) -> ShardedAttention | None:
        """The attention over the rows of all ranks that share the micro-batch; None if this one has it alone.

        ``attend(query, key, value)`` takes tensors of shape (tokens, heads, head_dim).
        """
        return self.attention if self.is_shared else None

    def loss(self, logits: Tensor, router: Tensor | None = None) -> Tensor:
        """The loss of this micro-batch as part of its step, a scalar in float32, or float64 for float64 logits.

        ``logits`` are (tokens, vocabulary) or (1, tokens, vocabulary). It assumes that gradients are averaged over
        ranks, as DDP and FSDP do. If your loop sums them, divide by ``ranks``. Without labels it is zero, and warns.
        ``router`` are the summed losses of tokens in a mixture's routers (``RouterLosses``), weighted alike.
        """
        rows = logits[0] if isinstance(logits, Tensor) and logits.dim() == 3 and len(logits) == 1 else logits
        if not isinstance(rows, Tensor) or rows.shape[:-1] != self.labels.shape:
            kind = f"of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            needed = f"({len(self.labels)}, vocabulary), as model(**batch).logits of a Hugging Face model"
            raise UserError(f"logits are {kind}, and the batch has {len(self.labels)} tokens; give a tensor {needed}")
        loss = packed_loss(rows, self.labels, self.loss_tokens, averaged_over=self.ranks)
        return loss if router is None else loss + router * (self.ranks / max(self.loss_tokens, 1))

    def to(self, device: torch.device | str) -> Self:
        there, names = torch.device(device), ("tokens", "labels", "position_ids")
        moved: dict[str, Any] = {name: on_device(getattr(self, name), there) for name in names}
        return replace(self, **moved)


AnyBatch = TypeVar("AnyBatch", bound=Batch)


@dataclass(frozen=True)
class RankSlice:
    """The part of a step that a rank trains, and how its context-parallel ``group`` shards micro-batches.

    ``workload`` prices shards: the workload of one GPU without context parallelism. Pipeline ranks with the same dp and
    cp rank, and all tensor-parallel ranks, have the same part.
    """

    dp_rank: int = 0
    cp_rank: int = 0
    layout: Layout = field(default_factory=Layout)
    strategy: str = "balanced"
    workload: Costs | None = None
    group: dist.ProcessGroup | None = None

    def of(self, batch: AnyBatch, ranks: tuple[int, ...] = ()) -> AnyBatch:
        """The part of a whole ``batch`` on this rank, if the context-parallel ``ranks`` share it; empty means all.

        Its rows are in the order of the plan. They are padded to a multiple of the tensor-parallel size, and to at
        least one: a rank without tokens gets only padding. In level steps one document is shared by
        ``LEVEL_SHARDING``, as ``Job.level_shards`` prices it.
        """
        alone = bool(ranks) and (len(ranks) == 1 or len(batch.segment_lengths) == 1)
        strategy, workload = (LEVEL_SHARDING, None) if alone else (self.strategy, self.workload)
        cp, earlier = len(ranks) or self.layout.pool_size, batch.slice_of and batch.slice_of.earlier
        plan = make_shard_plan(batch.segment_lengths, cp, strategy, workload=workload, earlier=earlier)
        rank = ranks.index(self.cp_rank) if ranks else self.cp_rank
        mine = torch.from_numpy(plan.positions(rank)).to(batch.tokens.device)
        padding = max(-len(mine) % self.layout.tp, 0 if len(mine) else self.layout.tp)
        sharing = self.group if cp > 1 else None
        return replace(
            batch,
            tokens=F.pad(batch.tokens[mine], (0, padding)),
            labels=F.pad(batch.labels[mine], (0, padding), value=IGNORE_LABEL),
            position_ids=F.pad(batch.position_ids[mine], (0, padding)),
            attention=ShardedAttention(len(mine), plan, sharing, ranks or None, slice_of=batch.slice_of),
        )

    def batches(self, plan: StepPlan, read: Callable[[MicroBatch], AnyBatch]) -> tuple[AnyBatch, ...]:
        """The parts of the micro-batches of ``plan`` on this rank (``own_batches``)."""
        return own_batches(plan, self.dp_rank, self.cp_rank, lambda part: self.of(read(part), part.ranks))
