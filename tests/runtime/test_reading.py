"""Batches against a token-by-token oracle, over random plans."""

import os
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import in_turn
from tests.limits import HUNG_SECONDS
from tests.training.documents import RandomDocuments
from tests.training.jobs import VOCABULARY, write_store
from wlb.documents.segments import Segment
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.loss import IGNORE_LABEL
from wlb.runtime.reading import labels_of_segments, make_batch, read_batch

STORE = RandomDocuments(np.array([1, 9, 2, 30, 17]), vocab_size=50_000)
MASKED = RandomDocuments(STORE.lengths, STORE.vocab_size, labelled=0.4)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    epoch, index = draw(st.integers(0, 3)), draw(st.integers(0, len(STORE.lengths) - 1))
    start = draw(st.integers(0, int(STORE.lengths[index]) - 1))
    length = draw(st.integers(1, int(STORE.lengths[index]) - start))
    return Segment(epoch * len(STORE.lengths) + index, start, length)


@st.composite
def micro_batches(draw: st.DrawFn) -> MicroBatch:
    chosen = draw(st.lists(segments(), max_size=6))
    if not chosen or draw(st.booleans()):
        return MicroBatch(tuple(chosen), 0.0)
    earlier = draw(st.integers(0, chosen[0].start))
    return MicroBatch(tuple(chosen), 0.0, earlier=earlier, continued=draw(st.booleans()))


MICRO_BATCHES = micro_batches()


@settings(deadline=None)
@given(MICRO_BATCHES, st.sampled_from([STORE, MASKED]))
def test_every_token_has_its_document_position_and_successor(micro_batch: MicroBatch, store: RandomDocuments) -> None:
    expected = []
    for number, (document, start, length) in enumerate(micro_batch.segments):
        earlier = 0 if number else micro_batch.earlier
        index = document % len(STORE.lengths)
        whole = STORE.read(index).tolist()
        mask = store.loss_mask(index, 0, len(whole))
        labels = [token if mask is None or mask[i] else IGNORE_LABEL for i, token in enumerate(whole)]
        labels = [*labels[1:], IGNORE_LABEL]
        expected += [(whole[start + i], labels[start + i], earlier + i) for i in range(length)]
    batch = make_batch(micro_batch, store)
    if expected:
        columns = (batch.tokens.tolist(), batch.labels.tolist(), batch.position_ids.tolist())
        assert list(zip(*columns, strict=True)) == expected
        assert batch.segment_lengths == tuple(micro_batch.lengths)
        (document, start, length), earlier = micro_batch.segments[0], micro_batch.earlier
        assert batch.slice_of == ((document, start - earlier, earlier, length) if micro_batch.is_slice else None)
    assert {tensor.dtype for tensor in (batch.tokens, batch.labels, batch.position_ids)} == {torch.int64}


def test_a_store_at_a_url_is_read_many_documents_at_once() -> None:
    others = threading.Barrier(8)

    class Remote(RandomDocuments):
        is_remote = True

        def read(self, document, start=0, length=None):
            others.wait(HUNG_SECONDS)  # for answers that come only together
            return super().read(document, start, length)

        def loss_mask(self, document, start, length):
            others.wait(HUNG_SECONDS)
            return super().loss_mask(document, start, length)

    lengths = np.arange(1, 17)
    micro_batch = MicroBatch(tuple(Segment(index, 0, length) for index, length in enumerate(lengths.tolist())), 0.0)
    local, remote = (kind(lengths, 50_000, labelled=0.4) for kind in (RandomDocuments, Remote))
    expected, batch = make_batch(micro_batch, local), make_batch(micro_batch, remote)
    assert torch.equal(batch.tokens, expected.tokens)
    assert torch.equal(batch.labels, expected.labels)
    plan = StepPlan(0, ((micro_batch,),))
    segments = [*plan.segments]
    assert labels_of_segments(segments, remote).tolist() == labels_of_segments(segments, local).tolist()


def test_a_micro_batch_without_segments_is_one_unlabelled_token() -> None:
    batch = make_batch(MicroBatch((), 0.0), STORE)
    assert batch.segment_lengths == (1,)
    assert len(batch.tokens) == len(batch.position_ids) == 1
    assert batch.labels.tolist() == [IGNORE_LABEL]


@settings(deadline=None)
@given(
    st.lists(st.lists(MICRO_BATCHES, min_size=2, max_size=2), min_size=1, max_size=3), st.sampled_from([STORE, MASKED])
)
def test_labelled_tokens_are_known_before_the_tokens(ranks: list[list[MicroBatch]], store: RandomDocuments) -> None:
    whole = [[replace(one, earlier=0, continued=False) for one in rank] for rank in ranks]  # slices come all together
    plan = StepPlan(0, tuple(map(tuple, whole)))
    batches = [make_batch(micro_batch, store) for micro_batch in plan.micro_batches]
    counted = sum(int((batch.labels != IGNORE_LABEL).sum()) for batch in batches)
    assert labels_of_segments([*plan.segments], store).sum() == counted


def zero(path: Path) -> None:
    """Overwrite a file in place, some time after it was written."""
    written = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(written.st_size))
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns + 1))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_file(path: Path) -> None:
    """Put another file of the same size in its place."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(0, 0))
    os.replace(other, path)


@in_turn(
    ("kind", "ending", "change"),
    product(["store", "shards", "mixture"], [".bin", ".idx"], [zero, truncate, replace_file, Path.unlink]),
)
def test_nothing_is_read_of_a_store_that_has_changed(tmp_path_factory, kind, ending, change):
    tmp_path = tmp_path_factory.mktemp("changed")
    write_store(tmp_path / "a", documents=20)
    write_store(tmp_path / "b", documents=20)
    sources: dict[str, list[Any]] = {
        "store": [tmp_path / "b"],
        "shards": [[tmp_path / "a", tmp_path / "b"]],
        "mixture": [tmp_path / "a", tmp_path / "b"],
    }
    store = TokenStore.open(*sources[kind])

    def micro_batch(document: int) -> MicroBatch:
        return MicroBatch((Segment(document + len(store), 0, int(store.lengths_of(np.array([document]))[0])),), 0.0)

    first, last = micro_batch(0), micro_batch(len(store) - 1)
    for of_file in (first, last):
        read_batch(of_file, store, VOCABULARY)
    changed = (tmp_path / "b").with_suffix(ending)
    change(changed)
    with pytest.raises(UserError, match=rf"{changed} changed while it was in use: it had .*, now it .*; put back"):
        read_batch(last, store, VOCABULARY)
    if kind != "store":
        read_batch(first, store, VOCABULARY)  # the other file is as it was


def test_a_store_that_changes_while_it_is_read_is_noticed(tmp_path, monkeypatch):
    store = write_store(tmp_path / "store", documents=20)
    read = store.read

    def read_late(*place: int) -> Any:
        zero(tmp_path / "store.bin")
        return read(*place)

    monkeypatch.setattr(store, "read", read_late)
    with pytest.raises(UserError, match=r"store\.bin changed while it was in use"):
        read_batch(MicroBatch((Segment(0, 0, 1),), 0.0), store, VOCABULARY)
