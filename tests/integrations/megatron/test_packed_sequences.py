"""``PackedSeqParams`` of our plans, against the layout that Transformer Engine documents."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("megatron.core.packed_seq_params", reason="needs Megatron-Core", exc_type=ImportError)

from wlb.errors import UserError  # Megatron-Core decides whether this file runs
from wlb.integrations.megatron.packed_sequences import packed_seq_params, padded_lengths
from wlb.sharding import make_shard_plan

LENGTHS = [300, 5, 87, 120]


def test_padded_plans_lie_as_transformer_engine_cuts_sequences():
    padded = padded_lengths(LENGTHS, 2)
    assert padded == [300, 8, 88, 120]
    plan = make_shard_plan(padded, 2, "per_document")
    # Chunks 0 and 3 of every sequence on rank 0, as thd_get_partitioned_indices deals them.
    chunks = [
        np.split(np.arange(length) + start, 4) for start, length in zip(plan.segment_starts, padded, strict=False)
    ]
    assert plan.positions(0).tolist() == np.concatenate([np.concatenate([c[0], c[3]]) for c in chunks]).tolist()
    params = packed_seq_params(plan)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv_padded.tolist() == [0, 300, 308, 396, 516]
    assert str(params.cu_seqlens_q.dtype) == "torch.int32"
    assert params.max_seqlen_q == params.max_seqlen_kv == 300


def test_alone_any_lengths_do():
    assert packed_seq_params(make_shard_plan(LENGTHS, 1, "hybrid")).cu_seqlens_q.tolist() == [0, 300, 305, 392, 512]
    assert padded_lengths(LENGTHS, 1) == LENGTHS


@pytest.mark.parametrize(
    ("lengths", "strategy", "message"),
    [
        (LENGTHS, "per_document", "sequence 1 has 5 tokens, Transformer Engine wants a multiple of 4"),
        ([300, 8, 88, 120], "hybrid", "hybrid plan lays tokens out otherwise"),
        ([300, 8, 88, 120], "per_sequence", "per_sequence plan lays tokens out otherwise"),
    ],
)
def test_other_layouts_are_refused(lengths: list[int], strategy: str, message: str):
    with pytest.raises(UserError, match=message):
        packed_seq_params(make_shard_plan(lengths, 2, strategy))
