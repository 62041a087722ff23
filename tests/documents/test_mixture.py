"""A mixture keeps every store's share, trains each document once in every epoch of its store, and can be continued."""

from __future__ import annotations

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
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.config import DataConfig

WINDOW = 10
some_lengths = st.lists(st.integers(0, 35), min_size=1, max_size=30).filter(any)
some_stores = st.lists(st.tuples(some_lengths, st.sampled_from([0.1, 1.0, 2.5])), min_size=1, max_size=4)


def mixture_of(stores: list[tuple[list[int], float]], **more: Any) -> DocumentStream:
    mixture = [{"store": f"store-{number}", "weight": weight} for number, (_, weight) in enumerate(stores)]
    config = DataConfig.model_validate({"mixture": mixture, "context_window": WINDOW, **more})
    return DocumentStream([np.array(lengths, dtype=np.int64) for lengths, _ in stores], config)


@settings(deadline=None, max_examples=examples(25))
@given(some_stores, st.integers(1, 9))
def test_every_store_trains_each_of_its_tokens_once_in_each_of_its_epochs(stores, chunk):
    stream = mixture_of(stores)
    segments = []
    for _ in range(3):
        while not stream.epoch_is_over:
            segments += stream.take(chunk)
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
def test_continues_from_its_state(stores, taken, rounds):
    stream, copy = mixture_of(stores), mixture_of(stores)
    for _ in range(rounds):
        stream.take(7)
        stream.next_epoch()
    stream.take(taken)
    copy.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert copy.take(1000) == stream.take(1000)
    assert copy.state_dict() == stream.state_dict()


def test_changed_weights_count_from_where_they_change():
    lengths = [5] * 1000
    before, after = mixture_of([(lengths, 1.0), (lengths, 1.0)]), mixture_of([(lengths, 3.0), (lengths, 1.0)])
    before.take(400)
    after.load_state_dict(before.state_dict())
    assert Counter(segment.document // 1000 for segment in after.take(400)) == {0: 300, 1: 100}


@settings(deadline=None, max_examples=examples(25))
@given(some_stores, some_stores, st.integers(0, 60))
def test_ids_stay_unique_over_changes_of_the_mixture(stores, others, taken):
    stream, changed = mixture_of(stores), mixture_of(others)
    used = {segment.document for segment in stream.take(taken)}
    stream.next_epoch()
    used |= {segment.document for segment in stream.take(taken)}
    changed.begin_after(json.loads(json.dumps(stream.state_dict())))
    assert not used & {segment.document for segment in changed.take(taken + 1)}


def test_what_the_policy_did_is_counted_over_all_stores():
    stream = mixture_of([([3, 11], 1.0), ([25], 1.0)], overlong="truncate")
    while not stream.epoch_is_over:
        stream.take(1)
    report = stream.state_dict()["overlong"]
    assert report["documents"] >= 2


def test_stores_of_one_size_have_orders_of_their_own():
    stream = mixture_of([([1] * 50, 1.0), ([1] * 50, 1.0)])
    documents = [segment.document for segment in stream.take(100)]
    assert [d for d in documents if d < 50] != [d - 50 for d in documents if d >= 50]


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


@pytest.mark.parametrize("other", ["corpus", "./corpus", "folder/../corpus", "link/corpus", "{}/corpus", "alias"])
def test_a_store_in_two_spellings_is_one_store(tmp_path, monkeypatch, other):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.idx").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "alias.idx").symlink_to("corpus.idx")
    other = other.format(tmp_path)
    stores = ["folder/part", "corpus", other]
    with pytest.raises(UserError, match=f"named twice, as corpus and as {other}; name it once"):
        TokenStore.open(*stores)
    stores[2] = "folder/corpus"
    with pytest.raises(UserError, match=r"folder/part\.idx does not exist"):
        TokenStore.open(*stores)


def test_a_store_without_anything_to_train_is_named():
    with pytest.raises(UserError, match="nothing to train on in token store store-1"):
        mixture_of([([3], 1.0), ([0], 1.0)])
