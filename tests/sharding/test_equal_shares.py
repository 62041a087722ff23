"""Balanced sharding levels tokens and attention at once, cuts what it must, and moves no more than that is worth."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from tests.sharding.micro_batches import WORKLOADS, long_lengths
from wlb.documents.lengths import read_lengths
from wlb.sharding import MicroBatches, ShardPlan, make_shard_plan
from wlb.sharding.equal_shares import balanced
from wlb.workload import make_workload
from wlb_studies.sharding import pairs_of_ranks, shard_latency

WINDOW = 131_072
WORKLOAD = make_workload("llama3-8b", "h100", tp=8)


def _slice(lengths: list[int], ranks: int) -> ShardPlan:
    return make_shard_plan(lengths, ranks, "balanced", workload=WORKLOAD)


def _unevenness(plan: ShardPlan) -> tuple[float, float]:
    """The most over the mean, of tokens and of attended pairs."""
    tokens, pairs = plan.tokens_per_rank, pairs_of_ranks(plan)
    return float(tokens.max() / tokens.mean()), float(pairs.max() / pairs.mean())


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_a_document_alone_is_cut_into_pairs_of_head_and_tail(ranks):
    plan = _slice([WINDOW], ranks)
    assert max(_unevenness(plan)) < 1.01
    assert max(len(table) for table in plan.pieces) <= 2


@pytest.mark.parametrize("ranks", [4, 8])
def test_among_short_documents_a_long_one_is_cut_into_contiguous_slices(ranks):
    plan = _slice([WINDOW, *[512] * 512], ranks)
    assert max(_unevenness(plan)) < 1.01
    slices = [table[table[:, 0] == 0] for table in plan.pieces]
    assert all(len(table) <= 2 for table in slices)  # its head lies where there is room
    deepest = [int(table[-1, 1]) for table in slices]
    lengths = [int(table[-1, 2] - table[-1, 1]) for table in slices]
    assert deepest == sorted(deepest, reverse=True)
    assert (np.diff(lengths[:-1]) >= -256).all()  # shorter the deeper they lie, but for rounding


def test_documents_that_fit_stay_whole():
    plan = _slice([8192] * 8 + [1024] * 64, 8)
    assert plan.kv_traffic.sum() == 0
    assert max(_unevenness(plan)) == 1


@pytest.mark.parametrize(("windows", "ranks"), [(2, 8), (4, 8), (4, 16)])
def test_sampled_micro_batches_are_level_in_tokens_in_forward_and_in_backward(windows, ranks):
    lengths = read_lengths(f"synthetic:2000:{WINDOW}:0").tolist()
    tokens, seconds = [], []
    for _ in range(4):
        micro_batch: list[int] = []
        while sum(micro_batch) < windows * WINDOW:
            micro_batch.append(lengths.pop(0))
        plan = _slice(micro_batch, ranks)
        latency = shard_latency(plan, WORKLOAD)
        computing = latency.attention + latency.linear
        tokens.append(_unevenness(plan)[0])
        seconds.append(computing.max() / computing.mean())
    assert max(tokens) < 1.01
    assert np.mean(seconds) < 1.03


@settings(deadline=None, max_examples=examples(20))
@given(st.lists(long_lengths, min_size=2, max_size=5), st.integers(2, 9), st.sampled_from(sorted(WORKLOADS)))
def test_a_micro_batch_is_cut_alike_whatever_is_cut_beside_it(micro_batches, ranks, workload):
    sizes, counts = np.array([*chain(*micro_batches)]), np.array([*map(len, micro_batches)])
    together = balanced(MicroBatches(sizes, counts), ranks, WORKLOADS[workload])
    apart = [
        balanced(MicroBatches(np.array(one), np.array([len(one)])), ranks, WORKLOADS[workload]) for one in micro_batches
    ]
    for number, pieces in enumerate(apart):
        found = [column[together.lane // ranks == number] for column in together]
        found[0] -= number * ranks
        found[1] -= counts[:number].sum()
        np.testing.assert_array_equal(found, pieces)


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [3, 2], [100, 1], [128] * 5])
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_less_than_there_is_to_level(lengths, ranks):
    plan = _slice(lengths, ranks)
    assert plan.tokens_per_rank.sum() == sum(lengths)
    assert plan.tokens_per_rank.max() <= -(-sum(lengths) // ranks) + 1


@pytest.mark.parametrize(("documents", "ranks", "seed"), [(20, 4, 54), (112, 8, 114), (112, 16, 3)])
def test_ranks_may_hold_over_their_share_before_anything_is_cut(documents, ranks, seed):
    """Documents of like lengths come out as 7 on each of 16 ranks, for instance, and some ranks have the longest."""
    lengths = np.random.default_rng(seed).integers(3000, 4600, documents).tolist()
    plan = _slice(lengths, ranks)
    assert int(plan.tokens_per_rank.sum()) == sum(lengths)
    assert _unevenness(plan)[0] < 1.05
