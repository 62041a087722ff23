"""What pieces of documents cost on context-parallel ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.workload import make_workload
from wlb.workload.analytic import QUERY_TILE

WORKLOAD = make_workload("7b", "h100")


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_full_tiles_cost_what_their_pairs_cost(tiles):
    stops = QUERY_TILE * np.cumsum(tiles)
    seconds = WORKLOAD.piece_seconds(stops - QUERY_TILE * np.array(tiles), stops)
    assert seconds.sum() == pytest.approx(float(WORKLOAD.attention_seconds(stops[-1])))


@given(st.integers(1, 50_000), st.integers(1, QUERY_TILE))
def test_a_started_tile_costs_as_much_as_a_full_one(start, queries):
    partial, full = WORKLOAD.piece_seconds([start, start], [start + queries, start + QUERY_TILE])
    assert partial <= full * (1 + 1e-6)
    assert partial >= full / 2, "only the causal triangle of the tile may be cheaper"


@given(st.integers(1, 200_000))
def test_a_first_piece_is_a_document(length):
    for phase in ("forward", "backward", "both"):
        np.testing.assert_array_equal(
            WORKLOAD.piece_seconds(0, length, phase), WORKLOAD.attention_seconds(length, phase)
        )
