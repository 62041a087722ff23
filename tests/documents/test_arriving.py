"""Documents of a stream: each is kept while it waits, and no longer."""

from itertools import chain, repeat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.documents.arriving import ArrivingDocuments
from wlb.documents.segments import Segment
from wlb.errors import UserError


def measured(document: str) -> tuple[int, int]:
    return len(document), ord(document[0]) if document else 0


def stream(lengths: list[int], longest: float = np.inf, letter: str = "x") -> ArrivingDocuments[str]:
    return ArrivingDocuments((letter * length for length in lengths), measured, longest)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=300), st.integers(1, 100), st.sampled_from([np.inf, 20]))
def test_all_come_in_order_and_none_is_kept_that_was_trained(lengths, at_once, longest):
    documents, cursor = stream(lengths, longest), 0
    while cursor < len(documents):
        taken = np.arange(cursor, min(cursor + at_once, len(documents)))
        assert documents[taken].tolist() == lengths[cursor : cursor + len(taken)]
        short = [document for document in taken.tolist() if lengths[document] <= longest]
        assert [documents.kept[document] for document in short] == ["x" * lengths[document] for document in short]
        documents.forget(short)
        assert min(documents.kept, default=len(lengths)) >= cursor + len(taken)
        cursor += len(taken)
    assert documents.lengths.tolist() == lengths
    assert documents.kept == {}


@given(st.integers(0, 200), st.sets(st.integers(0, 199)))
def test_reading_again_keeps_what_waits(taken, waiting):
    lengths = [1 + number % 7 for number in range(200)]
    saved, again = stream(lengths), stream(lengths)
    while len(saved) < 200:
        saved[np.arange(len(saved))]
    again.read_again(taken, saved.digest(taken), [Segment(document, 0, 1) for document in waiting])
    passed_over = {*range(taken)} - waiting
    assert {*again.kept} == {*range(max(64, taken))} - passed_over
    assert len(again) >= taken


def test_a_stream_is_not_judged_by_what_is_read_ahead_nor_by_a_longer_window_before():
    documents = stream([9] * 200 + [3], longest=8)
    assert documents.lengths[-1] == 3
    again = stream([9] * 300, longest=8)
    again.read_again(200, again.digest(200), [Segment(5, 0, 4), Segment(150, 0, 4)])
    again.forget([150])
    assert again.kept == {5: "x" * 9}


def test_a_stream_of_which_all_is_too_long_is_not_read_for_ever():
    with pytest.raises(UserError, match="10,000 documents of the stream in a row are over context_window = 8, and"):
        ArrivingDocuments(repeat("x" * 9), measured, 8)
    read = ArrivingDocuments(chain(["x"], repeat("x" * 9)), measured, 8)
    with pytest.raises(UserError, match="10,000 documents"):
        all(read[np.arange(len(read))].all() for _ in repeat(None))


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match="no documents"):
        stream([])
    with pytest.raises(UserError, match="document 1 of the stream has no tokens"):
        stream([1, 0])
    with pytest.raises(UserError, match="the stream does not begin with the 3 trained documents"):
        stream([1, 1]).read_again(3, 0, [])
    with pytest.raises(UserError, match="the stream does not begin with the 1 trained documents"):
        stream([2, 1]).read_again(1, stream([1, 1]).digest(1), [])
    with pytest.raises(UserError, match="the stream does not begin with the 2 trained documents"):
        stream([1, 1]).read_again(2, stream([1, 1], letter="y").digest(2), [])
