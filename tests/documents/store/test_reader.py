"""Many stores as one, shards or a mixture: counted through, opened a few at a time, refused where they differ."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.documents.store.indexes import write_index
from tests.limits import examples
from wlb.documents.lengths import read_lengths
from wlb.documents.order import DataConfig
from wlb.documents.store import reader as reader_module
from wlb.documents.store.files import names_store, store_prefixes
from wlb.documents.store.reader import StoredLengths, TokenStore, TokenStoreWriter, stored_vocab_size
from wlb.errors import UserError


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 50, **details: Any) -> Path:
    prefix.parent.mkdir(exist_ok=True)
    with TokenStoreWriter(prefix, vocab_size=vocab_size, overwrite=True) as writer:
        writer.details |= details
        for tokens in documents:
            writer.add(tokens)
    return prefix


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """As datatrove leaves it: a store of each task, without sidecars, and one task had no document."""
    (tmp_path / "corpus").mkdir()
    for number, documents in ((2, [[3], [1]]), (9, []), (10, [[2], [], [1, 3]])):
        write_index(tmp_path / f"corpus/{number}_tokens", documents)
    return tmp_path / "corpus"


def every_document(store: TokenStore) -> list[list[int]]:
    return [store.read(document).tolist() for document in range(len(store))]


def test_a_directory_a_glob_and_a_list_are_one_store(corpus):
    tokens = [[0, 1, 2], [3], [0, 1], [], [2, 3, 4, 5]]
    expected = [len(document) for document in tokens]
    files = [corpus / "2_tokens.idx", corpus / "9_tokens", corpus / "10_tokens"]
    sources: list[Any] = [corpus, str(corpus), corpus / "*.idx", corpus / "*_tokens", f"{corpus}/../**/*.idx"]
    sources += [files, [*reversed(files)], [str(corpus / "?_tokens.idx"), files[2]]]
    identities = set()
    for source in sources:
        store = TokenStore.open(source)
        identities.add(store.identity)
        assert every_document(store) == tokens
        assert store.lengths.tolist() == expected
        assert (len(store), store.tokens, store.vocab_size, store.tokenizer) == (5, 10, None, None)
        assert read_lengths(source).tolist() == expected
    assert len(identities) == 1
    store.check_content()


def test_names_that_are_no_store_are_refused(corpus, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, message in (
        (tmp_path / "empty", "is a directory; name a token store in it, or '.*' for all below it"),
        (corpus / "x*.idx", "no token store matches .*; make one with wlb prepare"),
        ([corpus, corpus / "2_tokens"], "a token store is named twice, as .*2_tokens and as .*2_tokens; name it once"),
        ([corpus / "2_tokens", corpus / "3_tokens"], "3_tokens.idx does not exist"),
        ([corpus / "9_tokens", write_index(tmp_path / "none", [])], "9_tokens.idx and 1 more holds no documents"),
    ):
        with pytest.raises(UserError, match=message):
            TokenStore.open(source)
        assert names_store(source) == ("holds" in message)
    for value in ([], 3, ["a", 3], [["a"]]):
        with pytest.raises(ValueError, match=r"store\n.*must be the path of a token store, or a list of such paths"):
            DataConfig(store=value)
    for link in (os.symlink, os.link):
        link(corpus / "2_tokens.idx", corpus / "other.idx")
        with pytest.raises(
            UserError, match=r"a token store is named twice, as .*2_tokens and as .*other; name it once"
        ):
            store_prefixes(corpus)
        (corpus / "other.idx").unlink()
    (tmp_path / "link").symlink_to(corpus)
    for other in (tmp_path / "link" / "2_tokens", tmp_path / "empty/../corpus/2_tokens"):
        with pytest.raises(UserError, match=f"named twice, as .*2_tokens and as {other}; name it once"):
            TokenStore.open(corpus / "2_tokens", other)


def test_shards_must_be_alike(tmp_path):
    def tokenizer(name: str) -> dict[str, str]:
        return {"kind": "huggingface", "name": name, "sha256": name}

    write(tmp_path / "a/1", [[1]], tokenizer=tokenizer("x"))
    write_index(tmp_path / "a/2", [[1]])  # does not say what made it
    assert TokenStore.open(tmp_path / "a").vocab_size is None
    assert TokenStore.open(tmp_path / "a").tokenizer == tokenizer("x")
    for other, message in (
        (write(tmp_path / "b", [[1]], tokenizer=tokenizer("y")), "the tokenizer .*'y'.*, .*a/1 .*'x'"),
        (
            write(tmp_path / "c", [[1]], 51),
            "c has a vocabulary of 51, but .*a/1 has 50; prepare all with the same tokenizer",
        ),
    ):
        with pytest.raises(UserError, match=f".*{message}"):
            TokenStore.open([tmp_path / "a", other])
    assert stored_vocab_size([tmp_path / "a/1", tmp_path / "a/2"]) == 50


def test_any_documents_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "_OPEN_SHARDS", 2)
    folder = tmp_path / "corpus"

    @settings(max_examples=examples(40))
    @given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=2, max_size=5).filter(any), st.data())
    def agree(shards, data):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for number, lengths in enumerate(shards):
            write_index(folder / f"s{number}", [[length] for length in lengths])
        expected = np.array([length for lengths in shards for length in lengths])
        store = TokenStore.open(folder)
        chosen = np.array(data.draw(st.lists(st.integers(0, len(expected) - 1))), np.int64)
        for lengths in (store.stored_lengths, pickle.loads(pickle.dumps(store)).stored_lengths):
            assert isinstance(lengths, StoredLengths)
            assert len(lengths) == len(store) == len(expected)
            assert np.array_equal(lengths[chosen], expected[chosen])
            assert lengths.tokens == expected.sum()
        assert np.array_equal(store.lengths_of(chosen), expected[chosen])
        assert [len(document) for document in every_document(store)] == expected.tolist()
        if expected.max() > 1:
            store.check_labels()

    agree()


def test_a_shard_with_other_documents_is_another_store_though_size_and_time_are_those_of_the_old(corpus):
    write_index(corpus / "10_tokens", [[2], [1, 3]])
    before, times = TokenStore.open(corpus), os.stat(corpus / "10_tokens.idx")
    write_index(corpus / "10_tokens", [[3], [2, 1]])
    os.utime(corpus / "10_tokens.idx", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert os.stat(corpus / "10_tokens.idx").st_size == times.st_size
    after = TokenStore.open(corpus)
    assert after.identity != before.identity
    assert after.lengths.tolist() == [3, 1, 3, 3]
    assert len([*corpus.iterdir()]) == 6  # nothing is kept beside the shards


def test_a_shard_that_changes_while_it_is_used_is_refused(corpus, monkeypatch):
    monkeypatch.setattr(reader_module, "_OPEN_SHARDS", 1)
    store = TokenStore.open(corpus)
    assert store.read(0).tolist() == [0, 1, 2]  # which leaves this shard open, and no other
    write_index(corpus / "2_tokens", [[4]])
    with pytest.raises(
        UserError, match=r"2_tokens\.idx changed while it was in use: it had 82 bytes of .*, now it has 62 bytes of .*"
    ):
        store.check_unchanged(np.array([4, 1]))
    store.check_unchanged(np.array([2, 4]))
    os.truncate(corpus / "10_tokens.bin", 2)
    for use in (store.check_unchanged, store.lengths_of):
        with pytest.raises(UserError, match=r"10_tokens\.bin changed while it was in use: it had 12 bytes"):
            use(np.array([2]))
    with pytest.raises(UserError, match=r"10_tokens\.bin has 2 bytes, but its index asks for 12"):
        TokenStore.open(corpus)


def test_an_index_cut_short_is_refused_before_it_is_read(corpus):
    """Reading a mapped file beyond its end kills the process."""
    store = TokenStore.open(corpus)
    lengths = store.lengths_of(np.array([2]))
    os.truncate(corpus / "10_tokens.bin", 2)
    assert store.lengths_of(np.array([2])) == lengths
    os.truncate(corpus / "10_tokens.idx", 4)
    with pytest.raises(UserError, match=r"10_tokens\.idx changed while it was in use"):
        store.lengths_of(np.array([2]))


def test_few_shards_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "_OPEN_SHARDS", 3)
    for number in range(40):
        write_index(tmp_path / f"s{number}", [[5]] * 4)
    store = TokenStore.open(tmp_path)
    handles = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    assert (store.lengths_of(np.arange(160)) == 5).all()
    assert len(every_document(store)) == 160
    if handles:
        assert len(os.listdir("/proc/self/fd")) <= handles + 2 * 3


def test_masks_of_some_shards(tmp_path):
    write(tmp_path / "a/1", [[1]])
    with TokenStoreWriter(tmp_path / "a/2", vocab_size=50, masked=True) as writer:
        writer.add([1, 2, 3], np.array([False, False, False]))
    store = TokenStore.open(tmp_path / "a")
    with pytest.raises(UserError, match="so there is nothing to learn"):
        store.check_labels()
    with TokenStoreWriter(tmp_path / "a/3", vocab_size=50, masked=True) as writer:
        writer.add([1, 2, 3], np.array([False, False, True]))
    store = TokenStore.open(tmp_path / "a")
    store.check_labels()
    assert store.loss_mask(0, 0, 1) is None
    mask = store.loss_mask(2, 0, 3)
    assert mask is not None
    assert mask.tolist() == [False, False, True]


def test_a_mixture_of_sharded_stores(corpus, tmp_path):
    other = [write_index(tmp_path / f"other{number}", [[number]]) for number in (1, 2)]
    mixture = TokenStore.open(corpus, tmp_path / "other*")
    assert len(mixture) == 7
    assert mixture.lengths_of(np.array([6, 0, 4, 5])).tolist() == [2, 3, 4, 1]
    with pytest.raises(UserError, match=r"a token store is named twice, as .*other1 and as .*other1"):
        TokenStore.open(other[0], tmp_path / "other*")


def test_documents_are_counted_through_the_stores(tmp_path):
    prefixes = [write(tmp_path / "a", [[1, 2, 3], [4]]), write(tmp_path / "b", [[5, 6]])]
    mixture = TokenStore.open(*prefixes)
    assert mixture.lengths_of(np.array([2, 0, 1, 2])).tolist() == [2, 3, 1, 2]
    of_stores = mixture.stored_lengths
    assert isinstance(of_stores, list)
    assert [of_store[np.arange(len(of_store))].tolist() for of_store in of_stores] == [[3, 1], [2]]
    assert [mixture.read(document).tolist() for document in range(len(mixture))] == [[1, 2, 3], [4], [5, 6]]
    assert mixture.read(0, 1, 2).tolist() == [2, 3]
    ids = np.array([0, 2, 3 + 1, 300 + 2])  # of epochs 0, 0, 1 and 100
    assert mixture.tokens_by_store(ids, np.array([1, 10, 100, 1000])) == (101, 1010)
    assert mixture.vocab_size == 50
    assert mixture.identity != TokenStore.open(*reversed(prefixes)).identity
    with pytest.raises(UserError, match="document 3 is not in"):
        mixture.read(3)
