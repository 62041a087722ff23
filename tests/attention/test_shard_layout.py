"""What a layout brings to a rank; that every query meets its keys, test_packed_attention.py proves by their results."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.plans import random_plan
from wlb.attention.shard_layout import _layouts, shard_layout
from wlb.sharding import STRATEGIES, make_shard_plan
from wlb.sharding.plan import ShardPlan

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@st.composite
def plans(draw: st.DrawFn) -> ShardPlan:
    lengths, cp_size = draw(LENGTHS), draw(st.integers(1, 5))
    strategy = draw(st.sampled_from([*STRATEGIES, "random"]))
    if strategy != "random":
        return make_shard_plan(lengths, cp_size, strategy)
    return random_plan(lengths, cp_size, draw(st.integers(1, cp_size)), draw(st.integers(0, 1000)))


@settings(deadline=None)
@given(plans())
def test_nothing_travels_that_is_not_attended(plan: ShardPlan) -> None:
    for rank in range(plan.cp_size):
        for part in shard_layout(plan, rank, CPU).parts:
            received = torch.arange(sum(part.receive_counts))
            attended = received[:0] if part.attended is None else received[part.attended.key_rows]
            assert set(attended.tolist()) == set(received.tolist())


def test_whole_documents_need_no_exchange() -> None:
    rows = (np.array([[0, 0, 5], [2, 0, 7]]), np.array([[1, 0, 9]]))
    plan = ShardPlan("whole", (5, 9, 7), rows)
    assert not any(shard_layout(plan, rank, CPU).parts for rank in range(2))


def test_a_layout_is_made_once_and_goes_with_its_plan() -> None:
    plan = make_shard_plan([40, 3], 2, "per_document")
    assert shard_layout(plan, 1, CPU) is shard_layout(plan, 1, CPU)
    assert shard_layout(plan, 1, CPU) is not shard_layout(plan, 0, CPU)
    assert plan in _layouts
    known = len(_layouts)
    del plan
    gc.collect()
    assert len(_layouts) < known


@pytest.mark.parametrize("rows", [[[0, 4, 8], [0, 0, 4]], [[1, 0, 3], [0, 0, 8]], [[0, 2, 2]]])
def test_pieces_out_of_order_are_refused(rows: list[list[int]]) -> None:
    plan = ShardPlan("mine", (8, 3), (np.array(rows), np.zeros((0, 3), dtype=np.int64)))
    with pytest.raises(ValueError, match="rank 0 are empty or out of order"):
        shard_layout(plan, 0, CPU)
