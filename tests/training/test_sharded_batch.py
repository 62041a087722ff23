"""The shards of all ranks together are the batch, and a model on them is the model on the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.training.distributed import run_ranks
from tests.training.documents import RandomDocuments
from wlb.attention import context_parallel_attention, segment_attention
from wlb.documents.segments import Segment
from wlb.packing.plan import MicroBatch
from wlb.sharding import STRATEGIES, make_shard_plan
from wlb.training.batch import IGNORE_LABEL, TokenBatch, make_batch
from wlb.training.model import rotary_angles, rotate
from wlb.training.sharded_batch import shard_batch

STORE = RandomDocuments(np.array([1, 9, 2, 60, 17, 33]), vocab_size=50)
VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 50, 4, 2, 8
STRATEGY = st.sampled_from(list(STRATEGIES))


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    """Whole documents and pieces of them, also such that end before their document does."""
    segments = []
    for index in draw(st.lists(st.integers(0, len(STORE.lengths) - 1), min_size=1, max_size=6)):
        start = draw(st.integers(0, int(STORE.lengths[index]) - 1))
        segments.append(Segment(index, start, draw(st.integers(1, int(STORE.lengths[index]) - start))))
    return make_batch(MicroBatch(tuple(segments), 0.0), STORE)


@settings(deadline=None)
@given(batches(), st.integers(1, 5), STRATEGY)
def test_the_shards_together_are_the_batch(batch: TokenBatch, cp_size: int, strategy: str) -> None:
    plan = make_shard_plan(batch.segment_lengths, cp_size, strategy)
    shards = [shard_batch(batch, plan, rank) for rank in range(cp_size)]
    order = torch.from_numpy(np.concatenate([plan.positions(rank) for rank in range(cp_size)])).argsort()
    for name in ("tokens", "labels", "positions"):
        whole = torch.cat([getattr(shard, name) for shard in shards])[order]
        assert torch.equal(whole, getattr(batch, name))


@settings(deadline=None)
@given(batches(), st.integers(2, 5), STRATEGY)
def test_labels_and_positions_do_not_see_the_borders_of_shards(batch: TokenBatch, cp_size: int, strategy: str) -> None:
    plan = make_shard_plan(batch.segment_lengths, cp_size, strategy)
    for rank in range(cp_size):
        shard = shard_batch(batch, plan, rank)
        expected_positions: list[int] = []
        for segment, start, stop in plan.pieces[rank].tolist():
            expected_positions += range(start, stop)
            first = int(plan.segment_starts[segment])
            end = len(expected_positions)
            if stop < plan.segment_lengths[segment]:  # the next token is on another rank
                assert int(shard.labels[end - 1]) == int(batch.tokens[first + stop])
        assert shard.positions.tolist() == expected_positions


def test_a_plan_of_other_segments_is_refused() -> None:
    batch = make_batch(MicroBatch((Segment(3, 0, 60),), 0.0), STORE)
    with pytest.raises(ValueError, match="shards 2 segments of 60 tokens, the batch has 1 of 60"):
        shard_batch(batch, make_shard_plan([20, 40], 2, "per_document"), 0)


def _weights() -> list[Tensor]:
    """Embedding; query, key and value projections; output head. In float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = 16
    shapes = [
        (VOCABULARY, hidden),
        (hidden, HEADS * HEAD_DIM),
        (hidden, KV_HEADS * HEAD_DIM),
        (hidden, KV_HEADS * HEAD_DIM),
        (HEADS * HEAD_DIM, VOCABULARY),
    ]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def _project(weights: list[Tensor], tokens: Tensor, positions: Tensor) -> list[Tensor]:
    rotation = rotary_angles(positions, HEAD_DIM, 10_000.0, torch.float64)
    query, key, value = ((weights[0][tokens] @ weight).unflatten(-1, (-1, HEAD_DIM)) for weight in weights[1:4])
    return [rotate(query, rotation), rotate(key, rotation), value]


def _loss(weights: list[Tensor], attended: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(attended.flatten(1) @ weights[4], labels, ignore_index=IGNORE_LABEL, reduction="sum")


def _sharded_loss_and_gradients(batch: TokenBatch, strategy: str) -> list[Tensor]:
    plan = make_shard_plan(batch.segment_lengths, dist.get_world_size(), strategy)
    shard, weights = shard_batch(batch, plan, dist.get_rank()), _weights()
    query, key, value = _project(weights, shard.tokens, shard.positions)
    loss = _loss(weights, context_parallel_attention(query, key, value, plan, None), shard.labels)
    loss.backward()
    results = [loss.detach(), *(weight.grad for weight in weights if weight.grad is not None)]
    for result in results:
        dist.all_reduce(result)
    return results


@pytest.mark.parametrize("strategy", ["per_sequence", "per_document"])
def test_loss_and_gradients_of_all_ranks_add_up_to_those_of_one(strategy: str) -> None:
    segments = (Segment(3, 0, 45), Segment(1, 0, 9), Segment(0, 0, 1), Segment(5, 4, 20))
    batch, weights = make_batch(MicroBatch(segments, 0.0), STORE), _weights()
    query, key, value = _project(weights, batch.tokens, batch.positions)
    loss = _loss(weights, segment_attention(query, key, value, batch.segment_lengths, "reference"), batch.labels)
    loss.backward()
    expected = [loss.detach(), *(weight.grad for weight in weights if weight.grad is not None)]
    for results in run_ranks(2, _sharded_loss_and_gradients, batch, strategy):
        for actual, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, exact, rtol=1e-10, atol=1e-10)
