"""Policies that move attention: equal tokens, tolerances and blocks on random documents; bytes worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings

from studies.tests.policies.ranks import DOCUMENTS, lengths_of, ranks
from tests.limits import examples
from wlb.workload.flops import attended_pairs
from wlb.workload.links import group_link
from wlb_studies.policies import fcp, libra, magi
from wlb_studies.policies.distca import TILE, TOLERANCE, Items, attention_servers, serve
from wlb_studies.policies.exchange import kv_bytes, moved_bytes, query_bytes
from wlb_studies.policies.plan import MovedPlan, Tasks, tasks_of
from wlb_studies.policies.pricing import moved_seconds, step_seconds

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
@settings(max_examples=examples(5))
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


@settings(max_examples=examples(5))
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
    for idle in (True, False):
        plan = attention_servers(lengths, ranks(4, capacity=16_384, **PIPELINED), idle_stages_serve=idle)
        load = plan.by_lane(plan.work.pairs, plan.work)
        second_stage = load[4:, 0]  # the first tick, which it has no micro-batch in
        assert (second_stage.sum() > 0) == idle


@settings(max_examples=examples(5))
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


@settings(max_examples=examples(5))
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


@settings(max_examples=examples(5))
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
    moved = moved_bytes(plan, of.job)["forward"]
    np.testing.assert_allclose(np.maximum(moved.received, moved.sent), moved.keys)  # keys and values only


def moved_plan(*, reshuffled: bool = False, resent: bool = False) -> MovedPlan:
    """A document of 4 tokens at rank 0, whose last two queries rank 1 attends."""
    home = tasks_of([(0, 0, 0, 4, 1.0)])
    work = tasks_of([(0, 0, 0, 2, 1.0), (1, 0, 2, 4, 1.0)])
    pools = np.zeros((2, 1), np.int64)
    return MovedPlan(lengths_of(4), pools, home, work, hidden_by="attention", reshuffled=reshuffled, resent=resent)


def test_bytes_of_moved_attention_by_hand():
    """Two queries and all four keys go to rank 1, two outputs back; gradients the other way, all again if asked."""
    job = ranks(2).job
    query, key = query_bytes(job), kv_bytes(job)
    moved = moved_bytes(moved_plan(resent=True), job)
    there, back = 2 * query + 4 * key, 2 * query
    assert moved["forward"].received.ravel().tolist() == [back, there]
    assert moved["forward"].sent.ravel().tolist() == [there, back]
    assert moved["backward"].received.ravel().tolist() == [there + back, back + there]
    once = moved_bytes(moved_plan(), job)
    assert once["backward"].received.ravel().tolist() == [there, back]


def test_bytes_of_reshuffled_blocks_by_hand():
    """Queries, keys and values of two tokens go to rank 1, outputs back; then rank 1 gets the other two's keys."""
    job = ranks(2).job
    query, key = query_bytes(job), kv_bytes(job)
    forward = moved_bytes(moved_plan(reshuffled=True), job)["forward"]
    assert forward.received.ravel().tolist() == [2 * query, 2 * (query + key) + 2 * key]
    assert forward.keys.ravel().tolist() == [2 * key, 2 * key]


def test_links_carry_what_is_moved_and_no_weights_meanwhile():
    of = ranks(2, weights="gathered")
    seconds, _ = moved_seconds(moved_plan(), of)
    most = 2 * query_bytes(of.job) + 4 * kv_bytes(of.job)  # rank 1 receives them and rank 0 sends them
    wire = of.job.shape.layers * float(group_link(of.job.hardware, "all_to_all", 2, stride=1).seconds(most))
    np.testing.assert_allclose(np.ravel(seconds.moving), [wire, wire])
    shared, free = (step_seconds(seconds._replace(moving=moving), np.zeros((2, 1), int), of) for moving in (1.0, 0.0))
    assert shared > free


def pieces(tasks: Tasks) -> list[tuple[int, int, int, int]]:
    return sorted(zip(*(column.tolist() for column in tasks[:4]), strict=True))


def test_distca_lays_a_document_over_ranks_as_heads_and_tails():
    """Of 16 tokens a rank: the first document whole, the second from the outside in, half of it beside the third."""
    plan = serve([[0, 1, 2]], lengths_of(8, 16, 24), ranks(3, capacity=16), idle_stages_serve=True)
    assert pieces(plan.home) == [
        *((0, 0, 0, 8), (0, 1, 0, 4), (0, 1, 12, 16)),
        *((1, 1, 4, 12), (1, 2, 0, 4), (1, 2, 20, 24)),
        (2, 2, 4, 20),
    ]


def test_distca_moves_the_ends_of_head_and_tail_to_whom_the_tolerance_leaves_short():
    """A document of 8,192 tokens beside one of eight short ones: half the difference moves, in 128 queries a time."""
    long = 8192
    lengths = lengths_of(long, *[1024] * 8)
    two = ranks(2, capacity=long)
    plan = serve([range(9)], lengths, two, idle_stages_serve=True)
    share = attended_pairs(lengths).sum() / 2
    count = int((share - 8 * attended_pairs(1024)) / (long + 1) / (TILE // 2)) * TILE // 2  # of head, and of tail
    assert [piece for piece in pieces(plan.work) if piece[1] == 0] == [
        *((0, 0, 0, long // 2 - count), (0, 0, long // 2 + count, long)),
        (1, 0, long // 2 - count, long // 2 + count),
    ]
    assert pieces(serve([range(9)], lengths, two, idle_stages_serve=True, tolerance=0.9).work) == pieces(plan.home)


def test_distca_gives_nothing_to_servers_short_of_less_than_the_tolerance():
    """Seven servers lack 5% of a share each, and the eighth keeps what is over: 35%."""
    length, shares = 16_384, [0.95] * 7 + [1.35]
    lengths = lengths_of(*(4 * int(length * share**0.5) // 4 for share in shares))
    home = tasks_of([(rank, rank, 0, int(size), 1.0) for rank, size in enumerate(lengths)])
    middle = home.stop // 2
    items = Items(np.stack([home.lane, home.document, home.start, middle, middle, home.stop]), lengths, ranks(8))
    items.level(np.arange(8), TOLERANCE)
    assert pieces(items.tasks()) == pieces(home)
    items.level(np.arange(8), 0.01)
    load = np.bincount(items.lane, items.pairs)
    assert load.max() <= (1 + 7 * 0.01) * load.mean()


def test_distca_moves_what_has_the_most_attention_for_its_queries_and_its_documents_keys():
    """Where few pairs are needed keys decide, and where many are queries do: of a longer document they are fewer."""
    job = ranks(2).job
    lengths = lengths_of(4096, 65_536)
    home = [(0, 0, 0, 2048, 2048, 4096), (0, 1, 0, 32_768, 32_768, 65_536)]
    for need in (600_000.0, 900_000_000.0):
        moved = {}
        for document, length in enumerate(lengths.tolist()):
            queries = 2 * min(need // (length + 1) // 64 * 64, length // 2)
            bytes_moved = queries * query_bytes(job) + length * kv_bytes(job)
            moved[document] = min(queries / 2 * (length + 1), need) / bytes_moved
        items = Items(np.array(home).T, lengths, ranks(2))
        surplus = np.array([2e9, -need])
        gift = items.give(1, need, surplus, np.arange(2))
        assert gift is not None
        giver, pairs = gift
        taken = {document for lane, document, *_ in pieces(items.tasks()) if lane == 1}
        assert giver == 0
        assert 0 < pairs <= need
        assert taken == {max(moved, key=moved.__getitem__)}
