"""Predictions of ranks and stages add up to what packing predicts for the micro-batch."""

from __future__ import annotations

import numpy as np
import pytest

from wlb.schedules.layer_split import split_layers
from wlb.sharding import ShardPlan, make_shard_plan
from wlb.training.observe.predicted_load import PredictedLoad
from wlb.workload import HARDWARE, make_workload, model_shape

SHAPE = model_shape("tiny")
LENGTHS = [[3000, 40, 700], [4096], [1]]


def plans(cp: int) -> list[ShardPlan]:
    return [make_shard_plan(lengths, cp, "per_document") for lengths in LENGTHS]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_share_a_micro_batch(stages):
    workload = make_workload(SHAPE, "cpu")
    loss_seconds = 5 * 4 * SHAPE.vocab_size / HARDWARE["cpu"].memory_bandwidth  # for each token
    whole = [
        workload.attention_seconds(lengths).sum() + workload.linear_seconds(sum(lengths)) + loss_seconds * sum(lengths)
        for lengths in LENGTHS
    ]
    parts = [PredictedLoad(SHAPE, "cpu", [chunk]).seconds(plans(1)) for chunk in split_layers(SHAPE, stages)]
    assert np.sum(parts, axis=0)[:, 0] == pytest.approx(whole)


def test_a_rank_with_several_chunks_has_them_all():
    first, *_, last = chunks = split_layers(SHAPE, 4)
    both = PredictedLoad(SHAPE, "cpu", [first, last]).seconds(plans(1))
    assert both == pytest.approx(sum(PredictedLoad(SHAPE, "cpu", [chunk]).seconds(plans(1)) for chunk in chunks[::3]))


def test_context_and_tensor_parallel_ranks_divide_the_work():
    chunks = split_layers(SHAPE, 1)
    alone = PredictedLoad(SHAPE, "cpu", chunks).seconds(plans(1))
    shared = PredictedLoad(SHAPE, "cpu", chunks).seconds(plans(2))
    assert shared.shape == (len(LENGTHS), 2)
    # Per-document shards are even; partly filled tiles of queries make their sum a little more than the whole.
    assert shared[0].max() / shared[0].mean() < 1.1
    assert shared[0].sum() == pytest.approx(alone[0, 0], rel=0.15)
    assert PredictedLoad(SHAPE, "cpu", chunks, tp=4).seconds(plans(1)) == pytest.approx(alone / 4)
