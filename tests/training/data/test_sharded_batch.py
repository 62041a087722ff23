"""The shards of all ranks together are the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.documents import RandomDocuments
from wlb.documents.segments import Segment
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.schedules.layout import Layout
from wlb.sharding import STRATEGIES, make_shard_plan
from wlb.training.data.batch import IGNORE_LABEL, TokenBatch, make_batch
from wlb.training.data.loader import RankShare, micro_batches_of
from wlb.training.data.sharded_batch import shard_batch

STORE = RandomDocuments(np.array([1, 9, 2, 60, 17, 33]), vocab_size=50)
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
        whole = torch.cat([getattr(shard, name)[: shard.local_tokens] for shard in shards])[order]
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
        assert shard.positions[: shard.local_tokens].tolist() == expected_positions


@st.composite
def level_plans(draw: st.DrawFn) -> tuple[StepPlan, int]:
    """Micro-batches on ranks of their own, documents in any of them; and how many ranks there are."""
    ranks = draw(st.integers(1, 4))
    parts = []
    for document in draw(st.permutations(range(len(STORE.lengths)))):
        members = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
        parts.append(MicroBatch((Segment(document, 0, int(STORE.lengths[document])),), 1.0, tuple(members)))
    return StepPlan(0, (tuple(parts),)), ranks


@settings(deadline=None)
@given(level_plans(), st.integers(1, 2))
def test_ranks_read_the_micro_batches_that_name_them(drawn: tuple[StepPlan, int], tp: int) -> None:
    plan, ranks = drawn
    micro_batches = plan.ranks[0]
    held: list[int] = []
    ends = [len(micro_batches)] * ranks
    for place, micro_batch in enumerate(micro_batches):
        for rank in micro_batch.ranks:
            ends[rank] = place
    for rank in range(ranks):
        read: list[MicroBatch] = []

        def reading(micro_batch: MicroBatch, read: list[MicroBatch] = read) -> TokenBatch:
            read.append(micro_batch)
            return make_batch(micro_batch, STORE)

        batches = RankShare(0, rank, Layout(cp=ranks, tp=tp)).batches(plan, reading)
        mine = [micro_batches[place] for place in micro_batches_of(plan, 0, rank)]
        assert mine == [micro_batch for micro_batch in micro_batches if rank in micro_batch.ranks]
        # The last one is that of all that share it.
        reduces_in_it = bool(mine) and all(ends[other] == ends[rank] for other in mine[-1].ranks)
        assert read == mine + [MicroBatch((), 0.0, (rank,))] * (not reduces_in_it)
        assert [batch.ranks[batch.rank] for batch in batches] == [rank] * len(read)
        assert all(batch.rows > 0 and batch.rows % tp == 0 for batch in batches)
        assert all((batch.labels == IGNORE_LABEL).all() for batch in batches[len(mine) :])
        held += [token for batch in batches[: len(mine)] for token in batch.tokens[: batch.local_tokens].tolist()]
    assert sorted(held) == sorted(token for place in range(len(STORE.lengths)) for token in STORE.read(place).tolist())


def test_a_plan_of_other_segments_is_refused() -> None:
    batch = make_batch(MicroBatch((Segment(3, 0, 60),), 0.0), STORE)
    with pytest.raises(ValueError, match="shards 2 segments of 60 tokens, the batch has 1 of 60"):
        shard_batch(batch, make_shard_plan([20, 40], 2, "per_document"), 0)


@settings(deadline=None)
@given(batches(), st.integers(1, 5), STRATEGY, st.integers(1, 8))
def test_rows_divide_evenly_and_padding_has_no_label(
    batch: TokenBatch, cp_size: int, strategy: str, multiple_of: int
) -> None:
    plan = make_shard_plan(batch.segment_lengths, cp_size, strategy)
    for rank in range(cp_size):
        shard = shard_batch(batch, plan, rank, multiple_of)
        assert shard.rows > 0
        assert shard.rows % multiple_of == 0
        assert shard.rows - shard.local_tokens < multiple_of or shard.local_tokens == 0
        assert (shard.labels[shard.local_tokens :] == IGNORE_LABEL).all()
