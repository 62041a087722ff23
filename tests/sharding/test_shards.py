"""Prices of many micro-batches at once are those of ``wlb.sharding``, one at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from tests.simulate.jobs import job
from wlb.sharding import STRATEGIES, make_shard_plan, price_shards, shard_latency

some_micro_batches = st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=12), min_size=1, max_size=5)


@settings(deadline=None, max_examples=examples(15))
@given(some_micro_batches, st.sampled_from([1, 2, 3, 8]), st.sampled_from(sorted(STRATEGIES)))
def test_shards_are_priced_as_sharding_prices_them(lengths, cp, strategy):
    simulated = job(cp=cp, tp=2, sharding=strategy)
    shards = price_shards(lengths, cp, strategy, simulated.costs)
    for index, of_one in enumerate(lengths):
        plan = make_shard_plan(of_one, cp, strategy, workload=simulated.costs)
        latency = shard_latency(plan, simulated.costs)
        seconds = shards.attention_forward[index] + shards.attention_backward[index]
        np.testing.assert_allclose(seconds, latency.attention, rtol=1e-12)
        np.testing.assert_array_equal(shards.tokens[index], plan.tokens_per_rank)
        traffic = plan.kv_traffic
        assert shards.received[index].tolist() == traffic.sum(axis=0).tolist()
        assert shards.sent[index].tolist() == traffic.sum(axis=1).tolist()
        assert shards.kept[index] == plan.keeps_received


@settings(deadline=None, max_examples=examples(15))
@given(some_micro_batches, st.sampled_from([2, 3, 8]), st.sampled_from(sorted(STRATEGIES)))
def test_own_share_counts_pairs_whose_keys_the_rank_holds(lengths, cp, strategy):
    simulated = job(cp=cp, sharding=strategy)
    shards = price_shards(lengths, cp, strategy, simulated.costs)
    for index, of_one in enumerate(lengths):
        plan = make_shard_plan(of_one, cp, strategy, workload=simulated.costs)
        segment = np.repeat(np.arange(len(of_one)), of_one)
        for rank in range(cp):
            held = plan.positions(rank)
            of_segments = (held[segment[held] == number] for number in range(len(of_one)))
            pairs = sum(int(np.searchsorted(own, own, side="right").sum()) for own in of_segments)
            if len(held):
                assert shards.own_share[index, rank] == pytest.approx(pairs / plan.attended_pairs[rank])


def test_an_empty_micro_batch_costs_nothing():
    shards = price_shards([[], [100], []], 2, "hybrid", job(cp=2).costs)
    assert shards.tokens.sum(axis=1).tolist() == [0, 100, 0]
    assert not shards.attention_forward[[0, 2]].any()
    assert not shards.waits_for[[0, 2]].any()
