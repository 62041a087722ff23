"""Operation lists by the longest remaining path: they can run, within their memory, and nearly as fast as any could."""

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.schedules.critical_path import PipelineLoad, _dealt, _Ranks, critical_path_lists
from wlb.schedules.layout import Layout
from wlb.schedules.operations import BACKWARD, FORWARD, HEAD, INPUT, WEIGHT, Operation
from wlb.schedules.timing import PipelineTimes, pipeline_times, planned_times

UNBOUNDED = 10**12


def _load(
    seed: int, stages: int, documents: list[int], *, splits: bool, spread: float = 0.5, dealt: bool = False
) -> PipelineLoad:
    rng = np.random.default_rng(seed)
    count = sum(documents)
    sizes = rng.uniform(1 - spread, 1 + spread, count)
    forward = np.rint(1000 * np.outer(rng.uniform(0.9, 1.1, stages), sizes)).astype(np.int64)
    weight = forward * 9 // 10 if splits else None
    return PipelineLoad(
        forward,
        2 * forward,
        weight,
        np.full(count, 20),
        np.rint(100 * np.outer(np.ones(stages), sizes)).astype(np.int64),
        np.rint(700 * sizes).astype(np.int64) if dealt else None,
        None if weight is None else weight // 3,
    )


def _times(lists, load: PipelineLoad) -> PipelineTimes:
    weight, joined, head = (0.0 if of is None else of.astype(float) for of in (load.weight, load.joined, load.head))
    return pipeline_times(
        lists, load.forward.astype(float), load.backward.astype(float), weight, joined, head, load.transfer
    )


def _makespan(lists, load: PipelineLoad) -> float:
    return float(_times(lists, load).rank_ends.max())


def _heads(load: PipelineLoad) -> list[int]:
    assert load.head is not None
    return list(load.head.tolist())


def _bound(load: PipelineLoad, pp: int) -> float:
    """No order is faster: the busiest rank's work, after the shortest way to it."""
    return max(
        float((load.forward[rank::pp] + load.backward[rank::pp]).sum())
        + float(load.forward[:rank].sum(axis=0).min() + rank * load.transfer.min())
        for rank in range(pp)
    )


@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
    st.floats(0.3, 3),
)
def test_lists_are_complete_ordered_and_within_memory(seed, pp, per_rank, documents, splits, dealt, room):
    stages = pp * per_rank
    load = _load(seed, stages, documents, splits=splits, dealt=dealt)
    limit = int(room * 100 * pp * per_rank)
    lists = critical_path_lists(load, documents, pp, [limit] * pp)
    first, last = (INPUT, WEIGHT) if splits else (BACKWARD, BACKWARD)
    kinds = {FORWARD, first, last}
    count = sum(documents)
    expected = {Operation(stage, index, kind) for stage in range(stages) for index in range(count) for kind in kinds}
    in_blocks = [operation for of_rank in lists for operation in of_rank if operation.kind != HEAD]
    assert sorted(in_blocks) == sorted(expected)
    heads = [
        (one.micro_batch, rank, one.stage) for rank, of_rank in enumerate(lists) for one in of_rank if one[2] == HEAD
    ]
    assert [micro_batch for micro_batch, *_ in sorted(heads)] == [*range(count)] * dealt
    assert all(rank == stage for _, rank, stage in heads)
    times = _times(lists, load)  # asserts that no rank waits in a circle
    starts, ends = (dict(zip(times.operations, of.tolist(), strict=True)) for of in (times.starts, times.ends))
    for micro_batch, rank, stage in heads:
        sent = load.transfer[micro_batch] * (rank != pp - 1)
        head, of_last = Operation(stage, micro_batch, HEAD), (stages - 1, micro_batch)
        assert starts[head] >= ends[Operation(*of_last, FORWARD)] + sent
        assert ends[head] == starts[head] + _heads(load)[micro_batch]
        assert starts[Operation(*of_last, first)] >= ends[head] + sent
    bounds = np.cumsum([0, *documents])
    back = [index for begin, end in itertools.pairwise(bounds) for index in reversed(range(begin, end))]
    for rank, of_rank in enumerate(lists):
        for stage in range(rank, stages, pp):
            assert [o.micro_batch for o in of_rank if o.stage == stage and o.kind == FORWARD] == [*range(count)]
            assert [o.micro_batch for o in of_rank if o.stage == stage and o.kind == first] == back
        change = {FORWARD: 1, last: -1}
        held = np.cumsum([change.get(o.kind, 0) * load.held[o.stage, o.micro_batch] for o in of_rank])
        alone = max(load.held[rank::pp, begin:end].sum() for begin, end in itertools.pairwise(bounds))
        assert held.max() <= max(limit, alone)
        assert held[-1] == 0


@pytest.mark.parametrize("per_rank", [1, 2])
def test_lists_of_even_micro_batches_are_within_a_hundredth_of_the_least(per_rank):
    over = []
    for seed in range(6):
        load = _load(seed, 4 * per_rank, [1, 3, 2, *[1] * 12], splits=True, spread=0.05)
        lists = critical_path_lists(load, [1, 3, 2, *[1] * 12], 4, [UNBOUNDED] * 4)
        over.append(_makespan(lists, load) / _bound(load, 4))
    assert np.mean(over) < 1.01


def test_a_dealt_head_levels_the_work_of_ranks_and_costs_little_waiting():
    over = []
    for seed in range(6):
        load = _load(seed, 4, [1] * 40, splits=True, spread=0.3, dealt=True)
        lists = critical_path_lists(load, [1] * 40, 4, [UNBOUNDED] * 4)
        blocks, heads = (load.forward + load.backward).sum(axis=1), _heads(load)
        busy = blocks + [sum(heads[one.micro_batch] for one in of_rank if one.kind == HEAD) for of_rank in lists]
        level = max(busy[1:].mean(), blocks.max())
        assert busy[0] == blocks[0]  # the first of four ranks has no head
        assert busy.max() < level + 2 * 700
        over.append(_makespan(lists, load) / (level + 3 * load.forward.min()))
    assert np.mean(over) < 1.03


def test_a_rank_with_more_work_than_all_will_have_gets_no_head():
    load = _load(0, 2, [1] * 6, splits=False, dealt=True)
    load.forward[1] *= 3
    lists = critical_path_lists(load, [1] * 6, 2, [UNBOUNDED] * 2)
    assert [sum(one.kind == HEAD for one in of_rank) for of_rank in lists] == [6, 0]


@pytest.mark.parametrize(("of_stages", "shares"), [([9] * 4, [0, 10, 10, 10]), ([99, 60, 90, 30], [0, 8, 0, 22])])
def test_every_rank_gets_its_heads_in_even_intervals(of_stages, shares):
    ranks = np.array(_dealt([2] * 30, np.array(of_stages), 4))
    given = np.cumsum(ranks == np.arange(4)[:, None], axis=1)
    assert given[:, -1].tolist() == shares
    assert np.abs(given - np.outer(given[:, -1], np.arange(1, 31) / 30)).max() < 1


def test_lists_with_dealt_heads_run_as_planned():
    load = _load(0, 8, [1, 3, *[1] * 8], splits=True, dealt=True)._replace(transfer=np.arange(12) * 40)
    ranks = _Ranks(load, [1, 3, *[1] * 8], 4, [800] * 4)
    with mock.patch("wlb.schedules.critical_path._Ranks", return_value=ranks):
        lists = critical_path_lists(load, [], 4, [])
    assert _times(lists, load).rank_ends.tolist() == [rank.free for rank in ranks.each]


def test_pipelines_may_deal_their_heads_differently():
    load = _load(1, 2, [1] * 6, splits=False, dealt=True)
    busy = _load(2, 2, [1] * 6, splits=False, dealt=True)
    busy.forward[1] *= 3
    loads = [load, busy]
    lists = [critical_path_lists(one, [1] * 6, 2, [UNBOUNDED] * 2) for one in loads]
    forward, backward = (
        np.stack([getattr(one, name) for one in loads])[None].astype(float) for name in ("forward", "backward")
    )
    heads = np.array([[_heads(one) for one in loads]])
    together = planned_times([lists], forward, backward, 0, 0, heads, 20)
    assert together.rank_ends[:, 0].T.tolist() == [
        _times(*one).rank_ends.tolist() for one in zip(lists, loads, strict=True)
    ]


@pytest.mark.parametrize("per_rank", [1, 2])
def test_weight_parts_run_in_a_row_where_that_saves_time(per_rank):
    load = _load(0, 4 * per_rank, [1] * 60, splits=True, spread=0.3)
    rows, makespans = [], []
    for one in (load._replace(joined=None), load):
        lists = critical_path_lists(one, [1] * 60, 4, [2000 * per_rank] * 4)
        makespans.append(_makespan(lists, load))
        grouped = [[*of] for of_rank in lists for key, of in itertools.groupby(of_rank, lambda op: op[::2])]
        rows.append([len(of) for of in grouped if of[0].kind == WEIGHT])
    assert np.mean(rows[0]) < 2 < 4 < np.mean(rows[1])
    assert makespans[1] < 0.95 * makespans[0]


def test_other_operations_wait_for_eight_weight_parts_in_a_row():
    load = _load(0, 1, [1] * 40, splits=True, spread=0)
    lists = critical_path_lists(load, [1] * 40, 1, [2000])
    lengths = [len([*of]) for key, of in itertools.groupby(lists[0], lambda op: op[::2]) if key[1] == WEIGHT]
    assert {*lengths[:-1]} == {8} < {*lengths}  # nothing else is left to run beside the last


@pytest.mark.parametrize(("pp", "per_rank", "count"), [(2, 1, 4), (8, 1, 32), (4, 2, 16), (8, 4, 32), (4, 1, 3)])
def test_named_schedules_deal_a_head_with_little_more_in_flight(pp, per_rank, count):
    layout = Layout(pp=pp, virtual_pp=per_rank)
    named, dealt = layout.operations(count), Layout(pp=pp, virtual_pp=per_rank, head="dealt").operations(count)

    def most(lists):
        changes = {FORWARD: 1, BACKWARD: -1}
        return max(max(itertools.accumulate(changes.get(one.kind, 0) for one in of_rank)) for of_rank in lists)

    assert most(dealt) <= most(named) + 2 * per_rank
    one, head = np.ones((pp * per_rank, count)), 0.6
    on_last = one.copy()
    on_last[-1] += head / 3
    seconds = pipeline_times(dealt, one, 2 * one, head=head).rank_ends.max()
    assert seconds < pipeline_times(named, on_last, 2 * on_last).rank_ends.max()
