"""Many micro-batches at once are sharded and priced exactly as one at a time."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from tests.sharding.micro_batches import sampled_micro_batches
from wlb.sharding import (
    STRATEGIES,
    MicroBatches,
    ShardPlan,
    make_shard_plan,
    price_shards,
    shard_many,
)
from wlb.sharding import (
    pieces as pieces_module,
)
from wlb.sharding.latency import Priced
from wlb.sharding.pieces import locality
from wlb.workload import make_workload
from wlb_studies.sharding import pairs_of_ranks, shard_latency

WORKLOAD = make_workload("llama3-8b", "h100", tp=2)


def check(micro_batches: list[list[int]], cp: int, strategy: str) -> None:
    together = MicroBatches(
        np.array([size for sizes in micro_batches for size in sizes]), np.array([len(m) for m in micro_batches])
    )
    pieces = shard_many(together, cp, strategy, WORKLOAD)
    where = locality(pieces, len(together.sizes), len(micro_batches), cp)
    seconds = Priced.of(where.attending(pieces, WORKLOAD), WORKLOAD).whole.both
    for index, (sizes, first) in enumerate(zip(micro_batches, together.first, strict=True)):
        plan = make_shard_plan(sizes, cp, strategy, workload=WORKLOAD)
        for rank in range(cp):
            mine = pieces.lane == index * cp + rank
            table = np.stack([pieces.segment[mine] - first, pieces.start[mine], pieces.stop[mine]], axis=1)
            np.testing.assert_array_equal(table, plan.pieces[rank])
        traffic = plan.kv_traffic
        latency = shard_latency(plan, WORKLOAD)
        np.testing.assert_array_equal(where.received[index], traffic.sum(axis=0))
        np.testing.assert_array_equal(where.sent[index], traffic.sum(axis=1))
        np.testing.assert_array_equal(where.waits_for[index], _waits_for(plan))
        np.testing.assert_array_equal(where.merged_tokens[index], _merged_tokens(plan))
        assert where.kept[index] == plan.keeps_received
        assert where.parts[index] == plan.exchange_parts
        assert seconds[index] == latency.slowest


def _waits_for(plan: ShardPlan) -> list[int]:
    """The most that a rank or one that it shares a segment with moves, where it moves anything."""
    moved = np.maximum(plan.kv_traffic.sum(axis=0), plan.kv_traffic.sum(axis=1))
    held = [set(table[:, 0].tolist()) for table in plan.pieces]
    return [
        max(int(moved[other]) for other in range(plan.cp_size) if held[rank] & held[other]) if moved[rank] else 0
        for rank in range(plan.cp_size)
    ]


def _merged_tokens(plan: ShardPlan) -> list[int]:
    """Tokens of pieces that have keys before them which their rank does not hold."""
    merged = []
    for table in plan.pieces:
        tokens = 0
        for segment, start, stop in table.tolist():
            held = sum(e - b for s, b, e in table.tolist() if s == segment and e <= start)
            tokens += stop - start if start > held else 0
        merged.append(tokens)
    return merged


@settings(deadline=None, max_examples=examples(30))
@given(
    st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=8), min_size=1, max_size=4),
    st.integers(2, 9),
    st.sampled_from(sorted(STRATEGIES)),
)
def test_small_micro_batches(micro_batches, cp, strategy):
    check(micro_batches, cp, strategy)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("cp", [2, 8])
def test_windows_of_documents(cp, strategy):
    check(sampled_micro_batches(10), cp, strategy)


some_micro_batches = st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=12), min_size=1, max_size=5)


@settings(deadline=None, max_examples=examples(15))
@given(some_micro_batches, st.sampled_from([2, 3, 8]), st.sampled_from(sorted(STRATEGIES)))
def test_own_share_counts_pairs_whose_keys_the_rank_holds(lengths, cp, strategy):
    shards = price_shards(lengths, cp, strategy, WORKLOAD)
    for index, of_one in enumerate(lengths):
        plan = make_shard_plan(of_one, cp, strategy, workload=WORKLOAD)
        segment = np.repeat(np.arange(len(of_one)), of_one)
        for rank in range(cp):
            held = plan.positions(rank)
            of_segments = (held[segment[held] == number] for number in range(len(of_one)))
            pairs = sum(int(np.searchsorted(own, own, side="right").sum()) for own in of_segments)
            if len(held):
                assert shards.own_share[index, rank] == pytest.approx(pairs / pairs_of_ranks(plan)[rank])


def test_an_empty_micro_batch_costs_nothing():
    shards = price_shards([[], [100], []], 2, "balanced", WORKLOAD)
    assert shards.tokens.sum(axis=1).tolist() == [0, 100, 0]
    assert not shards.attention_forward[[0, 2]].any()
    assert not shards.waits_for[[0, 2]].any()


def test_the_worked_example_of_locality():
    results = doctest.testmod(pieces_module)
    assert results.attempted
    assert not results.failed
