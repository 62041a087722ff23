import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError


@given(st.integers(1, 500), st.integers(1, 1 << 20), st.integers(0, 9))
def test_lengths_are_seeded_and_inside_the_window(documents, window, seed):
    lengths = sample_lengths(documents, window, seed)
    assert lengths.shape == (documents,)
    assert lengths.dtype == np.int64
    assert 1 <= lengths.min() <= lengths.max() <= window
    np.testing.assert_array_equal(lengths, sample_lengths(documents, window, seed))


def test_seeds_differ():
    assert (sample_lengths(100, 4096, 1) != sample_lengths(100, 4096, 2)).any()


@pytest.mark.parametrize("window", [4096, 131072])
def test_shape_is_what_the_module_says(window):
    lengths = sample_lengths(200_000, window, 7)
    assert np.median(lengths) == pytest.approx(window / 128, rel=0.05)
    assert (lengths < window / 16).mean() == pytest.approx(0.95, abs=0.01)
    assert (lengths == window).mean() == pytest.approx(0.0017, abs=0.0005)
    assert lengths[lengths > window / 2].sum() / lengths.sum() == pytest.approx(0.15, abs=0.02)


@pytest.mark.parametrize(("documents", "window"), [(10**14, 4096), (10, 10**20), (0, 5), (10, -1)])
def test_counts_without_bound_are_refused(documents, window):
    with pytest.raises(UserError, match="it must be from 1 to"):
        sample_lengths(documents, window)
