"""What every strategy's plan must be, checked token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharding.micro_batches import (
    WORKLOADS,
    attended_by_rank,
    causal_mask,
    cp_sizes,
    long_lengths,
    small_lengths,
)
from wlb.errors import UserError
from wlb.sharding import STRATEGIES, make_shard_plan
from wlb_studies.sharding import pairs_of_ranks, shard_latency

strategies = st.sampled_from(sorted(STRATEGIES))
workloads = st.sampled_from(sorted(WORKLOADS))


@settings(deadline=None)
@given(small_lengths, cp_sizes, strategies, workloads)
def test_every_pair_of_the_mask_is_computed_on_exactly_one_rank(lengths, cp_size, strategy, workload):
    plan = make_shard_plan(lengths, cp_size, strategy, workload=WORKLOADS[workload])
    np.testing.assert_array_equal(attended_by_rank(plan).sum(axis=0), causal_mask(plan.segment_lengths))


@settings(deadline=None)
@given(small_lengths, cp_sizes, strategies)
def test_traffic_is_what_ranks_attend_and_do_not_hold(lengths, cp_size, strategy):
    plan = make_shard_plan(lengths, cp_size, strategy)
    needs = attended_by_rank(plan).any(axis=1)  # (ranks, tokens)
    holds = np.zeros_like(needs)
    for rank in range(cp_size):
        holds[rank, plan.positions(rank)] = True
    missing = needs & ~holds
    np.testing.assert_array_equal(plan.kv_traffic, holds.astype(int) @ missing.T.astype(int))
    assert plan.kv_gather_fraction == missing.any(axis=0).sum() / plan.tokens


@settings(deadline=None)
@given(long_lengths, cp_sizes, strategies, workloads)
def test_plans_are_permutations_in_packed_order(lengths, cp_size, strategy, workload):
    plan = make_shard_plan(lengths, cp_size, strategy, workload=WORKLOADS[workload])
    positions = [plan.positions(rank) for rank in range(cp_size)]
    assert [len(local) for local in positions] == plan.tokens_per_rank.tolist()
    assert all((np.diff(local) > 0).all() for local in positions)
    np.testing.assert_array_equal(np.sort(np.concatenate(positions)), np.arange(sum(lengths)))
    for table in plan.pieces:
        assert table.shape[1] == 3
        assert (table[:, 1] < table[:, 2]).all()
        touching = (table[1:, 0] == table[:-1, 0]) & (table[1:, 1] == table[:-1, 2])
        assert not touching.any(), "pieces that continue each other are one"


@settings(deadline=None)
@given(long_lengths, cp_sizes, strategies, workloads)
def test_the_same_arguments_give_the_same_plan(lengths, cp_size, strategy, workload):
    plan = make_shard_plan(lengths, cp_size, strategy, workload=WORKLOADS[workload])
    again = make_shard_plan(np.array(lengths, dtype=np.int32), cp_size, strategy, workload=WORKLOADS[workload])
    assert (plan.segment_lengths, plan.earlier) == (again.segment_lengths, again.earlier)
    for mine, its in zip(plan.pieces, again.pieces, strict=True):
        np.testing.assert_array_equal(mine, its)


@settings(deadline=None)
@given(long_lengths, cp_sizes)
def test_tokens_are_even_unless_documents_stay_whole(lengths, cp_size):
    for strategy in ("per_sequence", "per_document", "adaptive"):
        tokens = make_shard_plan(lengths, cp_size, strategy).tokens_per_rank
        assert tokens.max() - tokens.min() <= (sum(lengths) % cp_size > 0)


@settings(deadline=None)
@given(long_lengths, cp_sizes, workloads)
def test_no_choice_is_slower_than_what_it_chose_from(lengths, cp_size, workload):
    seconds = {
        strategy: shard_latency(
            make_shard_plan(lengths, cp_size, strategy, workload=WORKLOADS[workload]), WORKLOADS[workload]
        ).slowest
        for strategy in STRATEGIES
    }
    assert seconds["adaptive"] == min(seconds["per_sequence"], seconds["per_document"])


@settings(deadline=None)
@given(small_lengths, cp_sizes, strategies, st.integers(0, 50))
def test_a_slice_is_dealt_evenly_and_all_ranks_receive_it(lengths, cp_size, strategy, earlier):
    plan = make_shard_plan(lengths, cp_size, strategy, earlier=earlier)
    tokens = np.array([(table[:, 2] - table[:, 1])[table[:, 0] == 0].sum() for table in plan.pieces])
    assert tokens.sum() == lengths[0]
    assert tokens.max() - tokens.min() <= 1
    traffic, pairs = tokens[:, None] * (1 - np.eye(cp_size, dtype=int)), causal_mask((lengths[0],)).sum()
    if lengths[1:]:
        others = make_shard_plan(lengths[1:], cp_size, strategy)
        traffic, pairs = traffic + others.kv_traffic, pairs + pairs_of_ranks(others).sum()
        for table, of_others in zip(plan.pieces, others.pieces, strict=True):
            np.testing.assert_array_equal(table[table[:, 0] > 0] - [1, 0, 0], of_others)
    np.testing.assert_array_equal(plan.kv_traffic, traffic)
    assert pairs_of_ranks(plan).sum() == pairs + earlier * lengths[0]
    assert plan.earlier == earlier


def test_pieces_cannot_be_changed_by_whoever_shares_the_plan():
    with pytest.raises(ValueError, match="read-only"):
        make_shard_plan([9, 5], 2, "per_document").pieces[0][0, 0] = 1


@pytest.mark.parametrize(
    ("lengths", "cp_size", "strategy", "message"),
    [
        ([5], 2, "ring", "'ring' is unknown; choose from per_sequence, per_document, adaptive, balanced"),
        ([5], 0, "balanced", "cp_size = 0"),
        ([], 2, "balanced", "a list of at least one document length"),
        ([5, 0], 2, "balanced", "a document of 0 tokens"),
        ([5, -3], 2, "per_document", "a document of -3 tokens"),
        ([5.0], 2, "per_document", "whole numbers of tokens, not float64"),
        ([[5], [6]], 2, "per_document", "a list of at least one document length"),
    ],
)
def test_mistakes_are_named_in_one_line(lengths, cp_size, strategy, message):
    with pytest.raises(UserError, match="earlier = -1 tokens cannot be before a slice"):
        make_shard_plan([5], 2, "balanced", earlier=-1)
    with pytest.raises(UserError, match=message) as caught:
        make_shard_plan(lengths, cp_size, strategy)
    assert "\n" not in str(caught.value)
