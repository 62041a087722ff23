"""Operation lists by the longest remaining path: they can run, within their memory, and nearly as fast as any could."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.schedules.critical_path import PipelineLoad, critical_path_lists
from wlb.schedules.operations import BACKWARD, FORWARD, INPUT, WEIGHT, Operation
from wlb.schedules.timing import pipeline_times

UNBOUNDED = 10**12


def _load(seed: int, stages: int, documents: list[int], *, splits: bool, spread: float = 0.5) -> PipelineLoad:
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
    )


def _makespan(lists, load: PipelineLoad) -> float:
    weight = None if load.weight is None else load.weight.astype(float)
    times = pipeline_times(
        lists, load.forward.astype(float), load.backward.astype(float), weight, transfer=load.transfer
    )
    return float(times.rank_ends.max())


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
    st.floats(0.3, 3),
)
def test_lists_are_complete_ordered_and_within_memory(seed, pp, per_rank, documents, splits, room):
    stages = pp * per_rank
    load = _load(seed, stages, documents, splits=splits)
    limit = int(room * 100 * pp * per_rank)
    lists = critical_path_lists(load, documents, pp, [limit] * pp)
    first, last = (INPUT, WEIGHT) if splits else (BACKWARD, BACKWARD)
    kinds = {FORWARD, first, last}
    count = sum(documents)
    expected = {Operation(stage, index, kind) for stage in range(stages) for index in range(count) for kind in kinds}
    assert sorted(operation for of_rank in lists for operation in of_rank) == sorted(expected)
    _makespan(lists, load)  # asserts that no rank waits in a circle
    starts = np.cumsum([0, *documents])
    back = [index for begin, end in itertools.pairwise(starts) for index in reversed(range(begin, end))]
    for rank, of_rank in enumerate(lists):
        for stage in range(rank, stages, pp):
            assert [o.micro_batch for o in of_rank if o.stage == stage and o.kind == FORWARD] == [*range(count)]
            assert [o.micro_batch for o in of_rank if o.stage == stage and o.kind == first] == back
        change = {FORWARD: 1, last: -1}
        held = np.cumsum([change.get(o.kind, 0) * load.held[o.stage, o.micro_batch] for o in of_rank])
        alone = max(load.held[rank::pp, begin:end].sum() for begin, end in itertools.pairwise(starts))
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
