"""Documents of a stream: each is kept while it waits, and no longer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.errors import UserError
from wlb.integrations.batches.arriving import ArrivingDocuments


def stream(lengths: list[int], overlong: str = "split") -> ArrivingDocuments[str]:
    return ArrivingDocuments(("x" * length for length in lengths), len, 10, overlong)


@given(st.lists(st.integers(1, 30), min_size=1), st.integers(1, 7), st.sampled_from(["split", "truncate", "drop"]))
def test_all_come_once_and_none_is_kept_that_was_trained(lengths, at_once, overlong):
    documents = stream(lengths, overlong)
    segments = []
    while not documents.epoch_is_over:
        taken = documents.take(at_once)
        assert all(documents[segment.document] == "x" * lengths[segment.document] for segment in taken)
        documents.trained(taken)
        segments += taken
        with pytest.raises(KeyError):
            documents[0]
    kept = {
        "split": sum(lengths),
        "truncate": sum(min(10, n) for n in lengths),
        "drop": sum(n for n in lengths if n <= 10),
    }
    assert sum(segment.length for segment in segments) == kept[overlong]
    assert documents.lengths.tolist() == lengths
    assert documents.state_dict()["overlong"]["tokens_dropped"] == sum(lengths) - kept[overlong]


def test_reading_again_keeps_what_waits():
    lengths = [4, 25, 7, 3]
    documents = stream(lengths)
    taken = documents.take(3)
    stream_state = documents.state_dict()
    again = stream(lengths)
    again.read_again(stream_state, taken[2:])
    again.load_state_dict(stream_state)
    assert again[1] == "x" * 25
    with pytest.raises(KeyError):
        again[0]
    again.trained(taken[2:])
    assert again.take(5) == documents.take(5)
    assert again.epoch_is_over


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match="no documents"):
        stream([])
    with pytest.raises(UserError, match="document 1 of the stream has no tokens"):
        stream([1, 0]).take(2)
    with pytest.raises(UserError, match="document 0 has 11 tokens, over the context window of 10"):
        stream([11], "error").take(1)
    with pytest.raises(
        UserError, match="the first 3 documents of the saved stream are not the first of this one, of which 2"
    ):
        stream([1, 1]).read_again({"documents": 3, "digest": 0}, [])
    begun = stream([1, 1])
    begun.take(1)
    with pytest.raises(UserError, match="open it anew"):
        begun.read_again(begun.state_dict(), [])
    with pytest.raises(UserError, match="the first 1 documents of the saved stream are not"):
        stream([2, 1]).read_again(begun.state_dict(), [])
