import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.workload.prefix_table import prefix_table

QUERIES, KEYS = np.array([16, 64, 256, 1024]), np.array([64, 512, 4096])


def law(queries, keys):
    return 3e-9 * queries * keys + 2e-7 * queries + 1e-8 * keys + 1e-6


def test_any_bilinear_law_is_met_between_its_samples():
    forward = law(QUERIES[:, None], KEYS)
    table = prefix_table(QUERIES, KEYS, forward, 2 * forward)
    queries, keys = np.meshgrid(np.arange(16, 1025, 7), np.arange(64, 4097, 31))
    np.testing.assert_allclose(table.price(queries, keys, "forward"), law(queries, keys), rtol=1e-9)
    np.testing.assert_allclose(table.price(queries, keys, "both"), 3 * law(queries, keys), rtol=1e-9)


def test_beyond_the_samples():
    table = prefix_table(QUERIES, KEYS, law(QUERIES[:, None], KEYS), law(QUERIES[:, None], KEYS))
    largest = table.price(1024, 4096, "forward")
    assert table.price(2048, 8192, "forward") == pytest.approx(4 * largest)
    assert table.price(1, 512, "forward") == table.price(16, 512, "forward")  # a tile that is not full
    assert table.price(16, 32, "forward") == pytest.approx(table.price(16, 64, "forward") / 2)
    assert table.price([0, 16], [64, 0], "both").tolist() == [0, 0]


@given(
    st.lists(st.floats(1e-7, 1e3), min_size=12, max_size=12),
    st.tuples(st.integers(1, 10**5), st.integers(0, 10**5)),
    st.tuples(st.integers(0, 10**5), st.integers(0, 10**5)),
)
def test_more_work_never_costs_less_whatever_was_measured(seconds, size, more):
    measured = np.reshape(seconds, (len(QUERIES), len(KEYS)))
    table = prefix_table(QUERIES, KEYS, measured, measured)
    (queries, keys), (more_queries, more_keys) = size, more
    less = table.price(queries, keys, "both")
    assert table.price(queries + more_queries, keys + more_keys, "both") >= less * (1 - 1e-12)
