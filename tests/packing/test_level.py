"""Level steps: every document once, nobody over its tokens, nobody waiting in a circle, all ranks done together."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from tests.packing.stage import Prices
from wlb.errors import UserError
from wlb.packing.balanced import BalancedPacker
from wlb.packing.level import level_groups
from wlb.packing.options import PackingOptions
from wlb.packing.plan import PlannedMicroBatch, StageRanks, StepPlan
from wlb.packing.registry import make_packer
from wlb.settings import MOST_RANKS
from wlb.workload import make_workload


def even_nodes(ranks: int) -> list[int]:
    return [size for size in (1, 2, 4, 8) if ranks % size == 0]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, Prices, StageRanks]:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8, 12, 32]))
    speed = st.floats(0.5, 1.2) | st.sampled_from([1.0, 0.85])
    speeds = draw(st.none() | st.lists(speed, min_size=ranks, max_size=ranks).map(tuple))
    prices = Prices(draw(st.sampled_from([0.0, 1e-3, 0.1])), least=draw(st.sampled_from([0.0, 0.05, 1.0])))
    stage = StageRanks(ranks, draw(st.sampled_from(even_nodes(ranks))), speeds=speeds)
    capacity = draw(st.integers(1, 5000))
    lengths = draw(st.lists(st.integers(1, capacity * ranks), min_size=1, max_size=60))
    return lengths, capacity, prices, stage


@settings(max_examples=examples(200))
@given(steps())
def test_every_document_is_in_one_micro_batch_that_its_ranks_hold(step):
    lengths, capacity, prices, stage = step
    groups = level_groups(lengths, capacity, prices, stage)
    assert sorted(document for group in groups for document in group.documents) == list(range(len(lengths)))
    for group in groups:
        assert list(group.ranks) == sorted(set(group.ranks))
        assert 0 <= group.ranks[0] <= group.ranks[-1] < stage.count
        tokens = sum(lengths[document] for document in group.documents)
        assert -(-tokens // len(group.ranks)) <= capacity
        assert len(group.ranks) == 1 or len(group.documents) == 1
        assert group.seconds >= prices.least
        nodes = {rank // stage.per_node for rank in group.ranks}
        assert len(nodes) == -(-len(group.ranks) // stage.per_node)
    assert groups == level_groups(lengths, capacity, prices, stage)
    unknown = level_groups(lengths, capacity, prices, replace(stage, speeds=None))
    assert unknown == level_groups(lengths, capacity, prices, replace(stage, speeds=(1.0,) * stage.count))


def ends(
    groups: list[PlannedMicroBatch], ranks: int, speeds: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """When ranks are done with their groups, one after another in the order given; and how long each was busy."""
    free, busy = np.zeros(ranks), np.zeros(ranks)
    for group in groups:
        members = list(group.ranks)
        seconds = group.seconds / (1.0 if speeds is None else speeds[members].min())
        free[members] = free[members].max() + seconds
        busy[members] += seconds
    return free, busy


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ranks", "per_node"), [(8, 8), (64, 8)])
def test_ranks_are_done_together(ranks, per_node, seed):
    lengths = np.random.default_rng(seed).lognormal(7, 1.5, 100 * ranks).clip(16, 131_072).astype(int).tolist()
    free, busy = ends(level_groups(lengths, 16_384, Prices(), StageRanks(ranks, per_node)), ranks)
    assert free.max() <= 1.01 * busy.mean()


@pytest.mark.parametrize(("documents", "size"), [(3, 16), (7, 8), (30, 2)])
def test_few_documents_share_all_ranks_at_the_same_time(documents, size):
    """Groups as large as an even share do not fill nodes and would run one after another."""
    groups = level_groups([32_768] * documents, 16_384, Prices(), StageRanks(64, 8))
    assert [len(group.ranks) for group in groups] == [size] * documents
    assert len({rank for group in groups for rank in group.ranks}) == documents * size


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("slow", "speed", "late"), [(1, 0.9, 1.01), (8, 0.85, 1.02), (1, 0.5, 1.02)])
def test_slow_ranks_get_less_and_are_done_with_the_others(slow, speed, late, seed):
    generator = np.random.default_rng(seed)
    lengths = generator.lognormal(7, 1.5, 3200).clip(16, 131_072).astype(int).tolist()
    speeds = np.ones(32)
    speeds[generator.choice(32, slow, replace=False)] = speed
    known = StageRanks(32, 8, speeds=tuple(speeds))
    unknown = replace(known, speeds=None)
    work = sum(group.seconds * len(group.ranks) for group in level_groups(lengths, 16_384, Prices(), known))
    free, _ = ends(level_groups(lengths, 16_384, Prices(), known), 32, speeds)
    assert free.max() <= late * work / speeds.sum()
    without, _ = ends(level_groups(lengths, 16_384, Prices(), unknown), 32, speeds)
    assert free.max() < without.max()


@pytest.mark.parametrize("seed", range(4))
def test_documents_are_shared_by_ranks_alike_in_speed(seed):
    lengths = np.random.default_rng(seed).lognormal(7, 1.5, 3200).clip(16, 131_072).astype(int).tolist()
    speeds = np.where(np.arange(32) % 4, 1.0, 0.85)  # two slow ranks on each node
    groups = level_groups(lengths, 11_264, Prices(), StageRanks(32, 8, speeds=tuple(speeds)))
    shared, lost = (
        sum(group.seconds * measure(speeds[list(group.ranks)]) for group in groups if len(group.ranks) > 1)
        for measure in (len, lambda members: (members / members.min() - 1).sum())
    )
    assert lost <= 0.02 * shared


@pytest.mark.parametrize("least", [0.05, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_few_short_micro_batches_are_run_where_each_takes_a_least_time(least, seed):
    lengths = np.random.default_rng(seed).lognormal(7, 1.5, 640).clip(16, 131_072).astype(int).tolist()
    stage = StageRanks(32, 8)

    def end(prices: Prices) -> float:
        groups = level_groups(lengths, 16_384, prices, stage)
        free, _ = ends([group._replace(seconds=max(group.seconds, least)) for group in groups], 32)
        return float(free.max())

    assert end(Prices(least=least)) < end(Prices())


def test_a_document_goes_where_it_needs_no_new_micro_batch():
    groups = level_groups([9000, 9000, 9000, 6000, 5000, 4000], 15_000, Prices(least=1.0), StageRanks(3, 1))
    assert sorted(group.documents for group in groups) == [(0, 5), (1, 4), (2, 3)]


def test_what_no_rank_can_do_in_time_is_shared_by_more():
    lengths = [8000] + [100] * 40
    groups = level_groups(lengths, 8192, Prices(fixed=0.0), StageRanks(4, 4))
    (shared,) = (group for group in groups if 0 in group.documents)
    assert len(shared.ranks) > 1


def test_too_few_documents_to_be_even_are_shared_too():
    groups = level_groups([4000] * 3 + [50] * 2, 8192, Prices(), StageRanks(2, 2))
    assert [group.documents for group in groups if len(group.ranks) > 1] == [(0,)]
    free, busy = ends(groups, 2)
    assert free.max() <= 1.01 * busy.mean()


def test_no_document_lies_on_more_ranks_than_a_group_may_have():
    groups = level_groups([2**20] + [1000] * 100, 4096, Prices(), StageRanks(2048, 8))
    assert max(len(group.ranks) for group in groups) == MOST_RANKS


def test_a_packer_alone_does_not_know_the_ranks():
    for grouping in ("level", "slices"):
        with pytest.raises(UserError, match="in jobs that are trained or simulated"):
            make_packer(
                "balanced", micro_batches=4, context_window=64, workload=make_workload("tiny"), grouping=grouping
            )


def test_a_packer_plans_whole_global_batches():
    options = PackingOptions(grouping="level", max_length_factor=2)
    packer = BalancedPacker(4, 64, Prices(), options, StageRanks(4, 4))
    lengths = np.random.default_rng(0).integers(1, 65, 50).tolist()
    plans = packer.plan(lengths) + packer.drain()
    assert sorted(segment.document for plan in plans for segment in plan.segments) == list(range(50))
    assert all(plan.delay_token_steps == 0 for plan in plans)
    assert all(abs(plan.tokens - 4 * 64) < 64 for plan in plans[:-1])
    assert plans == [StepPlan.from_json(plan.to_json()) for plan in plans]
    busy = np.zeros(4)
    for micro_batch in plans[0].micro_batches:
        busy[list(micro_batch.ranks)] += micro_batch.workload
    assert plans[0].imbalance == pytest.approx(busy.max() / busy.mean())
