"""Policies that move attention: equal tokens, tolerances and blocks on random documents; bytes worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.rivals.ranks import DOCUMENTS, lengths_of, ranks
from wlb.rivals import fcp, libra, magi
from wlb.rivals.distca import TILE, TOLERANCE, attention_servers
from wlb.rivals.exchange import kv_bytes, moved_bytes, query_bytes
from wlb.rivals.plan import MovedPlan, tasks_of
from wlb.workload.flops import attended_pairs

PLANS = {
    "distca": lambda lengths, of: attention_servers(lengths, of, idle_stages_serve=True),
    "distca-busy": lambda lengths, of: attention_servers(lengths, of, idle_stages_serve=False),
    "libra": libra.pools,
    "fcp": fcp.blocks,
    "magi": magi.dispatched,
}
PIPELINED = {"pp": 2, "micro_batches": 2}


def home_tokens(plan: MovedPlan) -> np.ndarray:
    return plan.by_lane((plan.home.stop - plan.home.start).astype(float), plan.home)


@pytest.mark.parametrize("name", PLANS)
@settings(max_examples=8)
@given(lengths=DOCUMENTS)
def test_every_query_is_attended_once_over_all_heads(name, lengths):
    plan = PLANS[name](lengths, ranks(8, **PIPELINED))
    times = plan.slots if name.startswith("distca") else 1
    if times > 1:  # every micro-batch passes both stages
        times = 2
    assert plan.work.pairs.sum() == pytest.approx(times * attended_pairs(lengths).sum())
    for tasks in (plan.home, plan.work):
        area = np.zeros(len(lengths))
        np.add.at(area, tasks.document, tasks.share * (tasks.stop - tasks.start))
        np.testing.assert_allclose(area, times * lengths)


@settings(max_examples=8)
@given(lengths=DOCUMENTS)
def test_distca_has_equal_tokens_and_attention_within_its_tolerance(lengths):
    plan = attention_servers(lengths, ranks(8), idle_stages_serve=True)
    tokens, load = home_tokens(plan), plan.by_lane(plan.work.pairs, plan.work)
    assert np.all(tokens.max(axis=0) - tokens.min(axis=0) <= 1)
    moved = 2 * TILE * lengths.max()  # attended pairs that a head and a tail tile have at most: less is not moved
    even = load.max(axis=0) <= (1 + TOLERANCE) * load.mean(axis=0) + moved
    full = load.mean(axis=0) - load.min(axis=0) < moved  # no server lacks as much
    assert np.all(even | full)


def test_distca_levels_long_documents_within_its_tolerance():
    lengths = lengths_of(65_536, 40_000, 20_000, 9_000, 3_000, 1_000)
    plan = attention_servers(lengths, ranks(8, capacity=32_768), idle_stages_serve=True)
    load = plan.by_lane(plan.work.pairs, plan.work)
    moved = 2 * TILE * lengths.max()
    assert moved < 0.06 * load.mean()  # so the bound says something
    assert np.all(load.max(axis=0) <= (1 + TOLERANCE) * load.mean(axis=0) + moved)


def test_idle_stages_serve_or_not():
    lengths = lengths_of(8192, 4096, 2048, 1024)
    for serve in (True, False):
        plan = attention_servers(lengths, ranks(4, capacity=16_384, **PIPELINED), idle_stages_serve=serve)
        load = plan.by_lane(plan.work.pairs, plan.work)
        second_stage = load[4:, 0]  # the first tick, which it has no micro-batch in
        assert (second_stage.sum() > 0) == serve


@settings(max_examples=8)
@given(lengths=DOCUMENTS)
def test_libra_keeps_pools_apart_and_ranks_under_the_soft_cap(lengths):
    plan = libra.pools(lengths, ranks(16, capacity=16_384))
    lane_of_pool = plan.pools.T.ravel()
    for document in range(len(lengths)):
        pools = {
            (int(lane) // plan.ranks, int(lane_of_pool[lane]))
            for tasks in (plan.home, plan.work)
            for lane in tasks.lane[tasks.document == document]
        }
        assert len(pools) == 1
    load = plan.by_lane(plan.work.pairs, plan.work)
    for slot in range(plan.slots):
        for pool in np.unique(plan.pools[:, slot]):
            of_pool = load[plan.pools[:, slot] == pool, slot]
            assert of_pool.max() <= libra.SOFT_CAP * of_pool.mean() + plan.work.pairs.max()


@settings(max_examples=8)
@given(lengths=DOCUMENTS)
def test_fcp_has_blocks_of_4k_and_a_memory_cap(lengths):
    plan = fcp.blocks(lengths, ranks(8))
    assert np.all(plan.work.start % fcp.BLOCK == 0)
    assert np.all(plan.work.stop - plan.work.start <= fcp.BLOCK)
    tokens = plan.by_lane((plan.work.stop - plan.work.start).astype(float), plan.work)
    even = tokens.mean(axis=0)
    assert np.all(tokens <= np.maximum(fcp.MEMORY * even, even + 2 * fcp.BLOCK) + 2 * fcp.BLOCK)


def test_fcp_by_hand():
    """Three blocks: the first and the last are a pair, the one between them goes to the other rank."""
    plan = fcp.blocks(lengths_of(3 * fcp.BLOCK), ranks(2, capacity=8192))
    owner = {int(start) // fcp.BLOCK: int(lane) for lane, _, start, _, _ in zip(*plan.work, strict=True)}
    assert owner[0] == owner[2] != owner[1]


def test_libra_by_hand():
    """Two documents of one pool of two ranks: each lies on its own, and the long one's heads are shared."""
    plan = libra.pools(lengths_of(8192, 8192), ranks(2, capacity=16_384))
    assert plan.slots == 1
    load = plan.by_lane(plan.work.pairs, plan.work)
    assert load[0, 0] == pytest.approx(load[1, 0])


def test_magi_deals_chunks_by_a_heap_as_its_published_example():
    """8, 7, 6, 5, 4, 2, 2, 2 to two ranks: 8, 5, 4 and a 2 are 19; 7, 6 and two 2 are 17. Each has four."""
    areas = [8.0, 7.0, 6.0, 5.0, 4.0, 2.0, 2.0, 2.0]
    owner = magi.dealt(areas, 2)
    assert [sorted(areas[chunk] for chunk in np.flatnonzero(owner == rank)) for rank in (0, 1)] == [
        [2, 4, 5, 8],
        [2, 2, 6, 7],
    ]
    assert magi.dealt([9.0, 1.0, 1.0], 2).tolist() == [0, 1, 1]  # two each at most
    assert magi.dealt([9.0, 1.0, 1.0, 1.0], 2).tolist() == [0, 0, 1, 1]  # the first is cheap, and its rank has room


@settings(max_examples=8)
@given(lengths=DOCUMENTS)
def test_magi_keeps_tokens_where_they_are_attended_and_gives_ranks_as_many(lengths):
    of = ranks(8)
    plan = magi.dispatched(lengths, of)
    assert plan.home is plan.work
    tokens = home_tokens(plan)
    for slot in range(plan.slots):
        for pool in np.unique(plan.pools[:, slot]):
            of_pool = tokens[plan.pools[:, slot] == pool, slot]
            assert len(of_pool) == 4  # as many ranks as a window needs
            assert of_pool.max() - of_pool.min() <= magi.CHUNKS  # chunks differ by a token
    moved = moved_bytes(plan, of.job, resent=False)["forward"]
    np.testing.assert_allclose(np.maximum(moved.received, moved.sent), moved.keys)  # keys and values only


def moved_plan(*, reshuffled: bool) -> MovedPlan:
    """A document of 4 tokens at rank 0, whose last two queries rank 1 attends."""
    home = tasks_of([(0, 0, 0, 4, 1.0)])
    work = tasks_of([(0, 0, 0, 2, 1.0), (1, 0, 2, 4, 1.0)])
    return MovedPlan(lengths_of(4), np.zeros((2, 1), np.int64), home, work, reshuffled=reshuffled)


def test_bytes_of_moved_attention_by_hand():
    """Two queries and all four keys go to rank 1, two outputs back; gradients the other way, all again if asked."""
    job = ranks(2).job
    query, key = query_bytes(job), kv_bytes(job)
    moved = moved_bytes(moved_plan(reshuffled=False), job, resent=True)
    there, back = 2 * query + 4 * key, 2 * query
    assert moved["forward"].received.ravel().tolist() == [back, there]
    assert moved["forward"].sent.ravel().tolist() == [there, back]
    assert moved["backward"].received.ravel().tolist() == [there + back, back + there]
    once = moved_bytes(moved_plan(reshuffled=False), job, resent=False)
    assert once["backward"].received.ravel().tolist() == [there, back]


def test_bytes_of_reshuffled_blocks_by_hand():
    """Queries, keys and values of two tokens go to rank 1, outputs back; then rank 1 gets the other two's keys."""
    job = ranks(2).job
    query, key = query_bytes(job), kv_bytes(job)
    forward = moved_bytes(moved_plan(reshuffled=True), job, resent=False)["forward"]
    assert forward.received.ravel().tolist() == [2 * query, 2 * (query + key) + 2 * key]
    assert forward.keys.ravel().tolist() == [2 * key, 2 * key]


def test_distca_moves_the_surplus_of_a_long_document():
    """One document over two ranks: the second has three quarters of the area, and gives what is over a half away."""
    lengths = lengths_of(16_384)
    plan = attention_servers(lengths, ranks(2, capacity=16_384), idle_stages_serve=True)
    load = plan.by_lane(plan.work.pairs, plan.work).ravel()
    assert load.max() / load.mean() <= 1 + TOLERANCE
    given = plan.work.lane[plan.work.start >= 8192] == 0
    assert given.sum() == 2  # a head and a tail of what lies at rank 1
