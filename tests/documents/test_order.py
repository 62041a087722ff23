"""Every epoch visits every document of every store once; a mixture keeps the shares; all of it can be continued."""

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.limits import examples
from wlb.documents.order import DocumentStream
from wlb.documents.permutation import Permutation
from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.job.config import DataConfig

WINDOW = 10
some_lengths = st.lists(st.integers(0, 35), min_size=1, max_size=40).filter(any)


def stream_of(lengths: list[int], **settings: Any) -> DocumentStream:
    config = DataConfig.model_validate({"store": "unused", "context_window": WINDOW, **settings})
    return DocumentStream(np.array(lengths, dtype=np.int64), config)


def taken_from(stream: DocumentStream, documents: int) -> list[Segment]:
    return [Segment(*row) for row in stream.take(documents).tolist()]


def read_epoch(stream: DocumentStream, chunk: int) -> list[Segment]:
    segments = []
    while not stream.epoch_is_over:
        segments += taken_from(stream, chunk)
    return segments


@settings(deadline=None)
@given(some_lengths, st.integers(1, 7), st.integers(0, 3), st.booleans())
def test_an_epoch_holds_every_token_once(lengths, chunk, seed, shuffle):
    stream = stream_of(lengths, seed=seed, shuffle=shuffle)
    for epoch in range(2):
        tokens = [
            (document, start + offset)
            for document, start, length in read_epoch(stream, chunk)
            for offset in range(length)
        ]
        first = epoch * len(lengths)
        assert sorted(tokens) == [(first + i, offset) for i, length in enumerate(lengths) for offset in range(length)]
        stream.next_epoch()


@settings(deadline=None)
@given(some_lengths, st.integers(1, 7), st.integers(0, 40), st.integers(0, 2))
def test_continues_from_its_state(lengths, chunk, taken, epochs):
    stream, copy = stream_of(lengths), stream_of(lengths)
    stream.begin(epochs)
    stream.take(taken)
    copy.load_state_dict(stream.state_dict())
    assert read_epoch(copy, chunk) == read_epoch(stream, chunk)


@settings(deadline=None)
@given(some_lengths, st.integers(0, 40), st.booleans())
def test_another_order_begins_with_the_next_epoch(lengths, taken, shuffle):
    stream, changed, fresh = (
        stream_of(lengths),
        stream_of(lengths, seed=8, shuffle=shuffle),
        stream_of(lengths, seed=8, shuffle=shuffle),
    )
    stream.take(taken)
    changed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert read_epoch(changed, 3) == read_epoch(stream, 3)
    changed.next_epoch()
    fresh.begin(1)
    assert read_epoch(changed, 3) == read_epoch(fresh, 3)


def test_a_position_in_a_late_epoch_is_as_close_as_any():
    count = 1000
    stream = stream_of([1] * count, seed=3)
    state = stream.state_dict()
    state["stores"][0] |= {"epoch": 10_000, "cursor": count - 2}
    stream.load_state_dict(state)
    expected = Permutation(count, 3, 10_000, 0).between(count - 2, count) + 10_000 * count
    assert [segment.document for segment in taken_from(stream, 5)] == expected.tolist()
    assert stream.epoch_is_over


def test_epochs_seeds_and_stores_differ_in_order():
    lengths = [1] * 50
    stream, other = stream_of(lengths), stream_of(lengths, seed=1)
    first = taken_from(stream, 50)
    assert taken_from(other, 50) != first
    stream.next_epoch()
    assert [s.document - 50 for s in taken_from(stream, 50)] != [s.document for s in first]
    mixed = [segment.document for segment in taken_from(mixture_of([(lengths, 1.0)] * 2), 100)]
    assert [d for d in mixed if d < 50] != [d - 50 for d in mixed if d >= 50]


def test_refuses_data_without_anything_to_train(monkeypatch):
    with pytest.raises(UserError, match=r"document 1 has 11 tokens, over context_window = 10"):
        stream_of([3, 11], overlong="error")
    with pytest.raises(UserError, match=r"nothing to train on .* 2 documents, all empty or dropped as longer than"):
        stream_of([0, 11], overlong="drop")
    with pytest.raises(UserError, match=r"nothing to train on .* 2 documents, all empty$"):
        stream_of([0, 0])
    with pytest.raises(UserError, match="nothing to train on in store-1"):
        mixture_of([([3], 1.0), ([0], 1.0)])
    monkeypatch.setattr("wlb.documents.order._CHECKED", 2)
    with pytest.raises(UserError, match=r"document 6 has 12 tokens, over context_window = 10"):
        stream_of([3, 0, 9, 1, 5, 5, 12, 40], overlong="error")
    assert taken_from(stream_of([0, 0, 0, 11, 0, 4], overlong="drop"), 6) == [Segment(5, 0, 4)]


def test_what_the_policy_did_is_counted_over_epochs_and_continued():
    stream = stream_of([0, 3, 11, 25], overlong="split")
    read_epoch(stream, 3)
    stream.next_epoch()
    copy = stream_of([0, 3, 11, 25], overlong="split")
    copy.load_state_dict(stream.state_dict())
    read_epoch(copy, 3)
    assert copy.state_dict()["overlong"] == {"documents": 4, "pieces": 10, "tokens_dropped": 0}


some_stores = st.lists(st.tuples(some_lengths, st.sampled_from([0.1, 1.0, 2.5])), min_size=1, max_size=4)


def mixture_of(stores: list[tuple[list[int], float]], **more: Any) -> DocumentStream:
    mixture = [{"store": f"store-{number}", "weight": weight} for number, (_, weight) in enumerate(stores)]
    config = DataConfig.model_validate({"mixture": mixture, "context_window": WINDOW, **more})
    return DocumentStream([np.array(lengths, dtype=np.int64) for lengths, _ in stores], config)


@settings(deadline=None, max_examples=examples(15))
@given(some_stores, st.integers(1, 9))
def test_every_store_trains_each_of_its_tokens_once_in_each_of_its_epochs(stores, chunk):
    stream = mixture_of(stores)
    segments = []
    for _ in range(3):
        while not stream.epoch_is_over:
            segments += taken_from(stream, chunk)
        stream.next_epoch()
    pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for segment in sorted(segments):
        pieces[segment.document].append((segment.start, segment.start + segment.length))
    assert all(stop <= start for own in pieces.values() for (_, stop), (start, _) in pairwise(own))
    total = sum(len(lengths) for lengths, _ in stores)
    first = 0
    for (lengths, _), state in zip(stores, stream.state_dict()["stores"], strict=True):
        finished = state["epoch"] + (state["cursor"] == len(lengths))
        assert finished >= 3
        for epoch in range(finished):
            for document, length in enumerate(lengths, epoch * total + first):
                edges = [0, *(edge for piece in pieces[document] for edge in piece), length]
                assert edges[::2] == edges[1::2]
        first += len(lengths)


@settings(deadline=None, max_examples=examples(25))
@given(some_stores)
def test_shares_of_tokens_follow_the_weights_after_every_document(stores):
    stream = mixture_of(stores)
    total = sum(len(lengths) for lengths, _ in stores)
    ends = np.cumsum([len(lengths) for lengths, _ in stores])
    taken = np.zeros(len(stores))
    weights = np.array([weight for _, weight in stores])
    longest = max(max(lengths) for lengths, _ in stores)
    while not stream.epoch_is_over:
        for document, _, length in stream.take(1):
            taken[np.searchsorted(ends, document % total, side="right")] += length
        progress = taken / weights
        assert progress.max() - progress.min() <= longest / weights.min() * (1 + 1e-12)  # quotients are rounded


@settings(deadline=None, max_examples=examples(25))
@given(some_stores, st.integers(0, 60), st.integers(0, 2))
def test_a_mixture_continues_from_its_state(stores, taken, rounds):
    stream, copy = mixture_of(stores), mixture_of(stores)
    for _ in range(rounds):
        stream.take(7)
        stream.next_epoch()
    stream.take(taken)
    copy.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert taken_from(copy, 1000) == taken_from(stream, 1000)
    assert copy.state_dict() == stream.state_dict()


def test_changed_weights_count_from_where_they_change():
    lengths = [5] * 1000
    before, after = mixture_of([(lengths, 1.0), (lengths, 1.0)]), mixture_of([(lengths, 3.0), (lengths, 1.0)])
    before.take(400)
    after.load_state_dict(before.state_dict())
    assert Counter(segment.document // 1000 for segment in taken_from(after, 400)) == {0: 300, 1: 100}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, r"data\.store is missing"),
        ({"store": "a", "mixture": [{"store": "b", "weight": 1}]}, "leave one out"),
        ({"mixture": [{"store": "b", "weight": 0}]}, "greater than 0"),
    ],
)
def test_mistakes_are_refused(data, problem):
    with pytest.raises(ValidationError, match=problem):
        DataConfig.model_validate(data)
