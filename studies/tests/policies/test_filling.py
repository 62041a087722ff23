"""Bins: every document once, none over its capacity, and cases worked by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from wlb_studies.policies.filling import (
    best_fit,
    even_bins,
    first_fit,
    in_order,
    lightest,
    power_of_two,
    split_evenly,
)

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=40).map(lambda lengths: np.array(lengths, np.int64))


@settings(max_examples=examples(15))
@given(LENGTHS)
def test_bins_hold_every_document_once_and_keep_to_their_capacity(lengths):
    documents = np.argsort(-lengths, kind="stable").tolist()
    for bins in (packed(documents, lengths, 100) for packed in (in_order, first_fit, best_fit)):
        assert sorted(d for members in bins for d in members) == sorted(documents)
        assert all(lengths[members].sum() <= 100 for members in bins)
    members, left_over = lightest(documents, lengths, 3, lengths, 150)
    assert sorted([*left_over, *(d for bin_ in members for d in bin_)]) == sorted(documents)
    assert all(lengths[bin_].sum() <= 150 for bin_ in members)


def test_best_fit_by_hand():
    assert best_fit([0, 1, 2], np.array([5, 4, 3]), 8) == [[0, 2], [1]]


def test_first_fit_by_hand():
    assert first_fit([0, 1, 2, 3], np.array([5, 4, 3, 4]), 8) == [[0, 2], [1, 3]]


def test_even_bins_are_a_multiple_and_hold_all():
    """Three of 5 do not fit two bins of 8, so there are four."""
    assert even_bins(np.array([5, 5, 5]), np.ones(3), 8, multiple=2) == [[0], [1], [2], []]


def test_even_runs_by_hand():
    assert split_evenly([0, 1, 2, 3], np.array([4, 3, 2, 1]), 2) == [[0], [1, 2, 3]]


def test_powers_of_two():
    assert [power_of_two(count) for count in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]
