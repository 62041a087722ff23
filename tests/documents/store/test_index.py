"""Lengths read from the index where they are asked for, and the identity of an index."""

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.documents.store.indexes import UINT16, write_index
from tests.limits import examples
from wlb.documents.lengths import read_lengths
from wlb.documents.store import index as index_module
from wlb.documents.store.index import MAGIC
from wlb.documents.store.reader import StoredLengths, TokenStore, TokenStoreWriter
from wlb.errors import UserError


def write_lengths(prefix: Path, lengths: Sequence[int]) -> Path:
    with TokenStoreWriter(prefix, vocab_size=50, overwrite=True) as writer:
        writer.add_documents(np.ones(sum(lengths), np.int64), np.array(lengths))
    return prefix


def test_any_documents_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "_CHUNK", 3)

    @settings(max_examples=examples(60))
    @given(st.lists(st.lists(st.integers(0, 9), max_size=4) | st.tuples(st.integers(0, 9)), min_size=1), st.data())
    def agree(documents, data):
        store = TokenStore.open(write_index(tmp_path / "s", documents))
        expected = np.array([sum(document) for document in documents])
        assert np.array_equal(store.lengths, expected)
        chosen = np.array(data.draw(st.lists(st.integers(0, len(documents) - 1))), np.int64)
        lengths = store.stored_lengths
        assert isinstance(lengths, StoredLengths)
        assert len(lengths) == len(documents)
        assert lengths.tokens == expected.sum()
        assert np.array_equal(lengths[chosen], expected[chosen])
        assert np.array_equal(store.lengths_of(chosen), expected[chosen])
        runs = [store.read(document).tolist() for document in range(len(store))]
        assert [token for run in runs for token in run] == list(range(expected.sum()))

    agree()


def test_an_index_is_not_held_in_memory(tmp_path):
    """As many empty documents, without a sequence, as a sparse file holds: 800 MB of index."""
    documents = 10**8
    with (tmp_path / "s.idx").open("wb") as file:
        file.write(MAGIC + struct.pack("<QBQQ", 1, UINT16, 0, documents + 1))
        file.truncate(34 + 8 * (documents + 1))
    (tmp_path / "s.bin").touch()
    tracemalloc.start()
    try:
        store = TokenStore.open(tmp_path / "s")
        assert store.lengths_of(np.array([0, 5 * 10**7, documents - 1])).tolist() == [0, 0, 0]
        assert store.identity == TokenStore.open(tmp_path / "s").identity
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 10e6


@pytest.fixture
def few_checked(monkeypatch):
    """Opening checks the first block of four documents, the last, and no other."""
    monkeypatch.setattr(index_module, "_BLOCK", 4)
    monkeypatch.setattr(index_module, "_SAMPLED_BLOCKS", 2)


def damage(path: Path, place: int, code: str, value: int) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(code, content, place, value)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("place", "code", "value", "message"),
    [
        (34 + 4 * 20, "<i", 7, "document 20 has 7 tokens of 2 bytes each, and lies at bytes 120 to 126"),
        (34 + 4 * 20, "<i", -3, "document 20 has -3 tokens"),
        (
            34 + 4 * 40 + 8 * 20,
            "<q",
            2,
            "document (19|20) has 3 tokens of 2 bytes each, and lies at bytes (114 to 2;|2)",
        ),
        (34 + 12 * 40 + 8 * 20, "<q", 41, "its documents do not cover its 40 sequences in order"),
    ],
)
def test_damage_that_opening_does_not_meet_is_found_where_it_lies(tmp_path, few_checked, place, code, value, message):
    prefix = write_lengths(tmp_path / "s", [3] * 40)
    damage(tmp_path / "s.idx", place, code, value)
    store = TokenStore.open(prefix)
    assert store.lengths_of(np.array([0, 5, 39])).tolist() == [3, 3, 3]
    for find in (
        lambda: store.lengths_of(np.array([5, 20, 3])),
        lambda: store.lengths,
        lambda: store.read(20),
        store.check_content,
    ):
        with pytest.raises(UserError, match=message):
            find()
    with pytest.raises(UserError, match=message):
        read_lengths(prefix)


def test_a_damaged_sample_is_found_when_it_is_opened(tmp_path, few_checked):
    prefix = write_lengths(tmp_path / "s", [3] * 40)
    damage(tmp_path / "s.idx", 34 + 4 * 40 + 8 * 38, "<q", 2)
    with pytest.raises(UserError, match="document 37 has 3 tokens of 2 bytes each, and lies at bytes 222 to 2"):
        TokenStore.open(prefix)


@pytest.mark.parametrize("whole", [1 << 16, 4])
def test_another_order_of_documents_is_another_identity(tmp_path, monkeypatch, whole):
    """Though there are as many documents and tokens, of all places or of about four."""
    monkeypatch.setattr(index_module, "_IDENTIFIED_WHOLE", whole)
    monkeypatch.setattr(index_module, "_IDENTIFIED", 4)

    def identity(lengths: Sequence[int]) -> str:
        return TokenStore.open(write_index(tmp_path / "s", [[length] for length in lengths])).identity

    lengths = [*range(1, 41)]
    first = identity(lengths)
    assert identity(lengths) == first
    assert identity(lengths[::-1]) != first
    assert identity([lengths[-1], *lengths[1:-1], lengths[0]]) != first
    assert identity([*lengths[:-1], 41]) != first
    assert (identity([2, 1, *lengths[2:]]) != first) == (whole > 4)  # between two places
