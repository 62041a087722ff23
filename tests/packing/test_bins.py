"""Largest differencing: every document once, parts almost even, and a case worked by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from wlb.packing.bins import differenced

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=40).map(lambda lengths: np.array(lengths, np.int64))


@settings(max_examples=examples(15))
@given(LENGTHS, st.integers(1, 6))
def test_parts_differ_by_less_than_the_largest(lengths, parts):
    found = differenced(lengths, parts)
    assert len(found) == parts
    assert sorted(d for part in found for d in part) == [*range(len(lengths))]
    sums = [lengths[part].sum() for part in found]
    assert max(sums) - min(sums) <= lengths.max()


@settings(max_examples=examples(15))
@given(LENGTHS, st.integers(1, 6))
def test_parts_of_equal_size_are_as_many_but_for_one(lengths, parts):
    found = differenced(lengths, parts, equal_size=True)
    assert sorted(d for part in found for d in part) == [*range(len(lengths))]
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_by_hand():
    """8-7 = 1, 6-5 = 1, 4-1 = 3, 3-1 = 2: the sums of 30 are 16 and 14, one more than the best."""
    found = differenced([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in found) == [14, 16]
