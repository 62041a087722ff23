"""The shards of all ranks together are the batch."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.documents import RandomDocuments
from wlb.documents.segments import Segment
from wlb.job.planner import StepPlanner
from wlb.packing.plan import MicroBatch
from wlb.runtime.batch import Batch, RankSlice
from wlb.runtime.loss import IGNORE_LABEL
from wlb.runtime.reading import make_batch
from wlb.schedules.layout import Layout
from wlb.sharding import STRATEGIES, make_shard_plan
from wlb.simulate import simulated_job
from wlb.simulate.decide import decide
from wlb.workload import model_shape
from wlb.workload.shapes import Experts

STORE = RandomDocuments(np.array([1, 9, 2, 60, 17, 33]), vocab_size=50)
STRATEGY = st.sampled_from(list(STRATEGIES))


def held_by(shard: Batch) -> int:
    assert shard.attention is not None
    return shard.attention.local_tokens


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Whole documents and pieces of them, also such that end before their document does."""
    segments = []
    for index in draw(st.lists(st.integers(0, len(STORE.lengths) - 1), min_size=1, max_size=6)):
        start = draw(st.integers(0, int(STORE.lengths[index]) - 1))
        segments.append(Segment(index, start, draw(st.integers(1, int(STORE.lengths[index]) - start))))
    return make_batch(MicroBatch(tuple(segments), 0.0), STORE)


@settings(deadline=None)
@given(batches(), st.integers(1, 5), STRATEGY)
def test_the_shards_together_are_the_batch(batch: Batch, cp_size: int, strategy: str) -> None:
    plan = make_shard_plan(batch.segment_lengths, cp_size, strategy)
    shards = [RankSlice(0, rank, Layout(cp=cp_size), strategy).of(batch) for rank in range(cp_size)]
    order = torch.from_numpy(np.concatenate([plan.positions(rank) for rank in range(cp_size)])).argsort()
    for name in ("tokens", "labels", "position_ids"):
        whole = torch.cat([getattr(shard, name)[: held_by(shard)] for shard in shards])[order]
        assert torch.equal(whole, getattr(batch, name))


@settings(deadline=None)
@given(batches(), st.integers(1, 5), STRATEGY, st.integers(1, 8))
def test_rows_divide_evenly_and_padding_has_no_label(
    batch: Batch, cp_size: int, strategy: str, multiple_of: int
) -> None:
    for rank in range(cp_size):
        shard = RankSlice(0, rank, Layout(cp=cp_size, tp=multiple_of), strategy).of(batch)
        assert len(shard.tokens) > 0
        assert len(shard.tokens) % multiple_of == 0
        assert len(shard.tokens) - held_by(shard) < multiple_of or held_by(shard) == 0
        assert (shard.labels[held_by(shard) :] == IGNORE_LABEL).all()


def test_rounds_of_ranks_that_share_experts_run_in_the_shards_that_are_priced() -> None:
    model = replace(model_shape("tiny"), experts=Experts(4, 2, 64))
    packing = {"grouping": "level", "global_batch": 8}
    job = decide(simulated_job(model, 256, "balanced", hardware="cpu", dp=4, ep=2, packing=packing), STORE.lengths)
    plan = next(StepPlanner(job, STORE.lengths, epochs=None).plans())
    rounds = plan.micro_batches
    assert any(len(one.ranks) == 2 and len(one.segments) > 1 for one in rounds)
    for places, _, shards in job.level_shards(rounds):
        for one, tokens in zip([rounds[place] for place in places], shards.tokens.tolist(), strict=True):
            batch = make_batch(one, STORE)
            ranks = [RankSlice(0, rank, job.layout, job.sharding.strategy, job.costs) for rank in one.ranks]
            assert [held_by(rank.of(batch, one.ranks)) for rank in ranks] == tokens
