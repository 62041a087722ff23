"""How even the strategies are on documents of realistic lengths, and examples small enough to read."""

import numpy as np
import pytest

from tests.sharding.micro_batches import sampled_micro_batches
from wlb.sharding import ShardPlan, make_shard_plan
from wlb.workload import make_workload
from wlb_studies.sharding import shard_latency


def attended_area(plan: ShardPlan, rank: int) -> int:
    """Query-key pairs that ``rank`` computes, counted query by query from its positions alone."""
    positions = plan.positions(rank)
    starts = np.cumsum([0, *plan.segment_lengths])
    return int((positions - starts[np.searchsorted(starts, positions, side="right") - 1] + 1).sum())


def pieces(plan: ShardPlan) -> list[list[list[int]]]:
    return [table.tolist() for table in plan.pieces]


def test_per_sequence_cuts_regardless_of_documents():
    plan = make_shard_plan([10, 6], 2, "per_sequence")
    assert pieces(plan) == [[[0, 0, 4], [1, 2, 6]], [[0, 4, 10], [1, 0, 2]]]


def test_per_document_pairs_head_and_tail_and_deals_what_is_left_over():
    plan = make_shard_plan([8, 5, 1, 2], 2, "per_document")
    assert pieces(plan)[0] == [[0, 0, 2], [0, 6, 8], [1, 0, 2], [1, 4, 5], [3, 1, 2]]
    assert pieces(plan)[1] == [[0, 2, 6], [1, 2, 4], [2, 0, 1], [3, 0, 1]]


def test_balanced_keeps_documents_whole_where_that_is_even():
    plan = make_shard_plan([4000, 3000, 3000, 4000], 2, "balanced")
    assert plan.kv_traffic.sum() == 0
    assert plan.tokens_per_rank.tolist() == [7000, 7000]


def test_balanced_cuts_a_document_longer_than_a_share_and_no_other():
    plan = make_shard_plan([60_000, *[2000] * 20], 4, "balanced")
    latency = shard_latency(plan, make_workload())
    assert plan.kv_traffic.sum() > 0
    assert plan.kv_gather_fraction * plan.tokens < 60_000 - 3000  # the tail stays on its rank
    assert plan.kv_gather_fraction < 0.65
    assert latency.imbalance < 1.02


@pytest.mark.parametrize("cp_size", [2, 4, 8, 16])
def test_synthetic_micro_batches_are_balanced(cp_size):
    workload = make_workload("7b", "h100")
    area, balanced, gathered, gathered_per_document = [], [], [], []
    for lengths in sampled_micro_batches(20):
        plan = make_shard_plan(lengths, cp_size, "per_document")
        areas = [attended_area(plan, rank) for rank in range(cp_size)]
        area.append(max(areas) / np.mean(areas))
        gathered_per_document.append(plan.kv_gather_fraction)
        plan = make_shard_plan(lengths, cp_size, "balanced", workload=workload)
        balanced.append(shard_latency(plan, workload).imbalance)
        gathered.append(plan.kv_gather_fraction)
    assert np.mean(area) <= 1.002
    assert np.mean(balanced) <= (1.02 if cp_size < 16 else 1.05)
    assert np.mean(gathered) <= np.mean(gathered_per_document) / 1.5


def test_a_whole_document_costs_its_workload():
    workload = make_workload("llama3-8b", tp=2)
    plan = make_shard_plan([1, 77, 5000], 1, "per_sequence")
    latency = shard_latency(plan, workload)
    assert latency.gather == 0
    assert latency.attention.sum() == pytest.approx(
        float(workload.attention_seconds([1, 77, 5000]).sum() + workload.drain_seconds(5000))
    )
    assert latency.linear[0] == pytest.approx(float(workload.linear_seconds(5078)))
    assert latency.imbalance == 1


def test_short_documents_prefer_cuts_regardless_of_documents():
    many_short = [128] * 64
    plan = make_shard_plan(many_short, 4, "adaptive")
    assert pieces(plan) == pieces(make_shard_plan(many_short, 4, "per_sequence"))
    few_long = [30_000, 300, 60_000]
    plan = make_shard_plan(few_long, 4, "adaptive")
    assert pieces(plan) == pieces(make_shard_plan(few_long, 4, "per_document"))
