"""A ``ShardPlan`` as Megatron-Core's ``PackedSeqParams``, where Transformer Engine holds the same tokens.

Transformer Engine cuts every sequence of a packed (THD) micro-batch into 2 x CP equal chunks and gives rank r chunks r
and 2 x CP - 1 - r. That is our strategy ``per_document`` for lengths padded to a multiple of 2 x CP. Other plans lay
tokens out otherwise; attention over them is ``wlb.attention``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from wlb.errors import UserError
from wlb.sharding import ShardPlan, make_shard_plan


def padded_lengths(lengths: Sequence[int], cp_size: int) -> list[int]:
    """``lengths`` (tokens) rounded up to a multiple of 2 x ``cp_size``; for 1, where nothing is cut, unchanged."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    return [-(-length // multiple) * multiple for length in lengths]


def packed_seq_params(shard_plan: ShardPlan, device: torch.device | str = "cpu") -> PackedSeqParams:
    """Where the sequences of a micro-batch begin and end, for THD attention over ``shard_plan``.

    The plan is one of padded lengths. As in Megatron-Core's own packing, cumulative lengths with and without padding
    are the same tensor: int32 of shape (sequences + 1,), over all context-parallel ranks together. A rank's tokens are
    those at ``shard_plan.positions(rank)``.

    Raises ``UserError`` for a plan that lays tokens out otherwise than Transformer Engine.
    """
    _check_layout(shard_plan)
    ends = torch.from_numpy(shard_plan.segment_starts.astype(np.int32)).to(device)
    longest = max(shard_plan.segment_lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _check_layout(plan: ShardPlan) -> None:
    if plan.cp_size == 1:
        return
    multiple = 2 * plan.cp_size
    for index, length in enumerate(plan.segment_lengths):
        if length % multiple:
            raise UserError(
                f"sequence {index} has {length} tokens, Transformer Engine wants a multiple of {multiple} with "
                f"cp = {plan.cp_size}; plan for padded_lengths(...)"
            )
    theirs = make_shard_plan(plan.segment_lengths, plan.cp_size, "per_document")
    if any(not np.array_equal(plan.positions(rank), theirs.positions(rank)) for rank in range(plan.cp_size)):
        raise UserError(
            f"the {plan.strategy} plan lays tokens out otherwise than Transformer Engine; make it with "
            'make_shard_plan(padded_lengths(...), cp_size, "per_document"), or attend with wlb.attention'
        )
