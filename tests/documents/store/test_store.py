"""The store against the real Megatron-Core reader and writer, and against damaged files."""

import errno
import hashlib
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import in_turn
from tests.limits import examples
from wlb.documents.store import reader
from wlb.documents.store.index import MAGIC, read_index
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.documents.store.writer import token_type
from wlb.errors import UserError

VOCAB = 300
documents_of = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=12), min_size=1, max_size=12)


def write(prefix, documents, vocab_size=VOCAB, **options):
    with TokenStoreWriter(prefix, vocab_size=vocab_size, **options) as writer:
        for document in documents:
            writer.add(document)
    return prefix


@pytest.fixture(scope="module")
def megatron():
    return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def test_megatron_reads_what_we_write(tmp_path, megatron):
    @settings(max_examples=examples(15))
    @given(documents_of, st.sampled_from([VOCAB, 65499, 65500, 200_000]))
    def agree(documents, vocab_size):
        # A memory map cannot be made of an empty file, so Megatron does not open a store of no tokens.
        documents = [[vocab_size - 1], *documents]
        write(tmp_path / "ours", documents, vocab_size, overwrite=True)
        theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
        assert [theirs[i].tolist() for i in range(len(theirs))] == documents
        assert theirs.document_indices.tolist() == list(range(len(documents) + 1))
        assert theirs.index.dtype == megatron.DType.optimal_dtype(vocab_size)

    agree()


def test_we_read_what_megatron_writes(tmp_path, megatron):
    import torch

    @settings(max_examples=examples(15))
    @given(
        st.lists(st.lists(documents_of.map(lambda d: d[0]), max_size=3), min_size=1, max_size=8),
        st.sampled_from([np.uint16, np.int32, np.int64]),
    )
    def agree(documents, dtype):
        # Each document is a list of sequences, possibly none, possibly empty ones.
        prefix = str(tmp_path / "theirs")
        builder = megatron.IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
        for sequences in documents:
            for sequence in sequences:
                builder.add_item(torch.tensor(sequence, dtype=torch.int64))
            builder.end_document()
        builder.finalize(prefix + ".idx")
        store = TokenStore.open(prefix)
        joined = [[token for sequence in sequences for token in sequence] for sequences in documents]
        assert [store.read(i).tolist() for i in range(len(store))] == joined
        assert store.lengths.tolist() == [len(document) for document in joined]
        assert store.read(0).dtype == dtype
        assert store.vocab_size is None
        assert store.tokenizer is None

    agree()


def test_every_slice_of_every_document(tmp_path):
    documents = [[1, 2, 3], [], [4], [5, 6, 7, 8]]
    store = TokenStore.open(write(tmp_path / "s", documents))
    assert len(store) == 4
    assert store.tokens == 8
    for i, document in enumerate(documents):
        for start in range(len(document) + 1):
            assert store.read(i, start).tolist() == document[start:]
            for length in range(len(document) - start + 1):
                assert store.read(i, start, length).tolist() == document[start : start + length]


def test_reads_are_read_only_views_of_the_file(tmp_path):
    store = TokenStore.open(write(tmp_path / "s", [[1, 2], [3, 4]]))
    view = store.read(1)
    assert np.shares_memory(view, store.read(1, 1))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 9


@in_turn("range_", [(2,), (-1,), (0, 4), (0, -1), (0, 0, 4), (0, 2, 2), (0, 0, -1), (0, -1, 1)])
def test_reads_out_of_range_are_refused(tmp_path, range_):
    store = TokenStore.open(write(tmp_path / "s", [[1, 2, 3], [4]], overwrite=True))
    with pytest.raises(UserError, match=r"document \d+ of .*has 3|holds 2 documents"):
        store.read(*range_)


@pytest.mark.parametrize("tokens", [[1.7, 2.9], [1.0, float("nan")], [True]])
def test_tokens_are_whole_numbers(tmp_path, tokens):
    with (
        pytest.raises(UserError, match=r"tokens are of type (float64|bool); give whole numbers"),
        TokenStoreWriter(tmp_path / "w", vocab_size=VOCAB) as writer,
    ):
        writer.add(tokens)


def test_tokens_outside_the_vocabulary(tmp_path):
    for bad in (VOCAB, -1):
        with (
            pytest.raises(UserError, match=f"token {bad} is outside"),
            TokenStoreWriter(tmp_path / "w", vocab_size=VOCAB) as writer,
        ):
            writer.add([1, bad])
        assert list(tmp_path.iterdir()) == []
    prefix = write(tmp_path / "s", [[1], [2, 299]])
    np.array([1, 2, 301], np.uint16).tofile(tmp_path / "s.bin")
    store = TokenStore.open(prefix)
    assert store.read(1, 0, 1).tolist() == [2]
    with pytest.raises(UserError, match=r"document 1 of .* holds token 301, outside the vocabulary of 300"):
        store.read(1)
    signed = write(tmp_path / "signed", [[1]], vocab_size=100_000)
    np.array([-5], np.int32).tofile(tmp_path / "signed.bin")
    with pytest.raises(UserError, match="holds token -5, outside the vocabulary"):
        TokenStore.open(signed).read(0)


# Damaged files


def damaged_index_is_refused_or_consistent(prefix):
    """Open and read everything; whatever opens must cover the token file exactly."""
    try:
        store = TokenStore.open(prefix)
        tokens = np.concatenate([store.read(i) for i in range(len(store))])
    except UserError:
        return
    assert (store.lengths >= 0).all()
    assert tokens.tobytes() == prefix.with_name(prefix.name + ".bin").read_bytes()


@pytest.mark.parametrize("sidecar", [True, False])
def test_any_damage_to_the_index(tmp_path, sidecar):
    prefix = write(tmp_path / "s", [[1, 2, 3], [], [4], [5, 6, 7, 8]])
    if not sidecar:
        (tmp_path / "s.json").unlink()
    path = tmp_path / "s.idx"
    whole = path.read_bytes()

    for position in range(len(whole)):
        for flip in (1, 8, 128, 255):
            changed = bytearray(whole)
            changed[position] ^= flip
            path.write_bytes(changed)
            damaged_index_is_refused_or_consistent(prefix)
        path.write_bytes(whole[:position])
        with pytest.raises(UserError):
            TokenStore.open(prefix)

    @settings(max_examples=examples(100))
    @given(st.integers(0, len(whole)), st.integers(0, 16), st.binary(max_size=24))
    def splice(position, removed, inserted):
        path.write_bytes(whole[:position] + inserted + whole[position + removed :])
        damaged_index_is_refused_or_consistent(prefix)

    splice()


@settings(max_examples=examples(100))
@given(
    st.integers(0, 9),
    st.sampled_from([0, 1, 2, 3, 2**31, 2**62, 2**64 - 1]),
    st.sampled_from([0, 1, 2, 3, 2**31, 2**62, 2**64 - 1]),
    st.binary(max_size=80),
)
def test_any_counts_in_the_header(tmp_path_factory, code, sequences, starts, rest):
    path = tmp_path_factory.getbasetemp() / "header.idx"
    counts = sequences.to_bytes(8, "little") + starts.to_bytes(8, "little")
    path.write_bytes(MAGIC + (1).to_bytes(8, "little") + bytes([code]) + counts + rest)
    try:
        index = read_index(path)
    except UserError:
        return
    assert index.documents == starts - 1


def test_float_stores_are_refused(tmp_path, megatron):
    import torch

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "f.bin"), dtype=np.float32)
    builder.add_item(torch.tensor([1.0]))
    builder.end_document()
    builder.finalize(str(tmp_path / "f.idx"))
    with pytest.raises(UserError, match=r"has values of type code 7; make .* whose codes are 1, 2"):
        TokenStore.open(tmp_path / "f")


@pytest.mark.parametrize("change", [b"", b"1", b"123456789012345678"])
def test_token_file_of_another_size(tmp_path, change):
    prefix = write(tmp_path / "s", [[1, 2, 3]])
    (tmp_path / "s.bin").write_bytes(change)
    with pytest.raises(UserError, match=r"s\.bin has \d+ bytes, but its index asks for 6"):
        TokenStore.open(prefix)


@pytest.mark.parametrize(("missing", "message"), [(".bin", "only its index"), (".idx", "index .* does not exist")])
def test_missing_files(tmp_path, missing, message):
    prefix = write(tmp_path / "s", [[1, 2, 3]])
    (tmp_path / f"s{missing}").unlink()
    with pytest.raises(UserError, match=message):
        TokenStore.open(prefix)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not what wlb prepare writes"),
        ('{"format": "wlb-token-store/9"}', "is not what wlb prepare writes"),
        ('{"format": "wlb-token-store/1"}', "belong to different stores"),
        ("[1, 2]", "is not what wlb prepare writes .*; move it elsewhere, or prepare the store again"),
        (" " * (2 << 20), "is not what wlb prepare writes"),
        ({"documents": 5}, "says documents = 5, but the index says 1"),
        ({"token_type": "int32"}, "belong to different stores"),
    ],
)
def test_damaged_sidecar(tmp_path, content, message):
    prefix = write(tmp_path / "s", [[1, 2, 3]])
    path = tmp_path / "s.json"
    text = content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content)
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        TokenStore.open(prefix)


# Writing


def test_batches_and_single_documents_agree(tmp_path):
    write(tmp_path / "a", [[1, 2], [], [3]])
    with TokenStoreWriter(tmp_path / "b", vocab_size=VOCAB) as writer:
        writer.add_documents(np.array([1, 2, 3]), np.array([2, 0, 1]))
    assert (tmp_path / "a.idx").read_bytes() == (tmp_path / "b.idx").read_bytes()
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_the_index_is_laid_out_as_its_module_says(tmp_path):
    lengths = np.random.default_rng(0).integers(0, 5, 1000)
    with TokenStoreWriter(tmp_path / "s", vocab_size=VOCAB) as writer:
        for part in np.split(lengths, [0, 7, 500]):
            writer.add_documents(np.ones(part.sum(), np.int64), part)
    index = (tmp_path / "s.idx").read_bytes()
    ends = np.cumsum(lengths)
    expected = lengths.astype("<i4").tobytes() + ((ends - lengths) * 2).astype("<i8").tobytes()
    assert index[34:] == expected + np.arange(1001, dtype="<i8").tobytes()


def test_an_existing_store_is_kept_unless_asked(tmp_path):
    write(tmp_path / "s", [[1]])
    with pytest.raises(UserError, match=r"s\.bin exists; .* --overwrite"):
        write(tmp_path / "s", [[2]])
    assert TokenStore.open(tmp_path / "s").read(0).tolist() == [1]
    write(tmp_path / "s", [[2]], overwrite=True)
    assert TokenStore.open(tmp_path / "s").read(0).tolist() == [2]


def test_two_writers_of_one_store_do_not_mix(tmp_path):
    with TokenStoreWriter(tmp_path / "s", vocab_size=VOCAB) as writer:
        writer.add([1])
        with pytest.raises(UserError, match="another process is writing"):
            write(tmp_path / "s", [[2]])
    assert TokenStore.open(tmp_path / "s").read(0).tolist() == [1]


def test_parts_of_a_killed_run_are_written_over(tmp_path):
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        (tmp_path / f"s{suffix}.part").write_bytes(b"x" * 1000)
    assert TokenStore.open(write(tmp_path / "s", [[1, 2]])).tokens == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.bin", "s.idx", "s.json"]


def test_the_directory_is_made_or_refused_in_one_clear_line(tmp_path):
    assert TokenStore.open(write(tmp_path / "new" / "one" / "s", [[1]])).tokens == 1
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is not a directory, so the store .*file/s cannot be made"):
        write(tmp_path / "file" / "s", [[1]])


def test_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"token store .* cannot be written: No space left on device"):
        write(tmp_path / "s", [[1]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("vocab_size", "name"), [(1, "uint16"), (65499, "uint16"), (65500, "int32")])
def test_token_type_follows_the_vocabulary(vocab_size, name):
    assert token_type(vocab_size).name == name


def test_identity_changes_when_tokens_do_and_lengths_do_not(tmp_path):
    first, second, again = (
        TokenStore.open(write(tmp_path / name, documents))
        for name, documents in (("a", [[1, 2], [3]]), ("b", [[1, 2], [4]]), ("c", [[1, 2], [3]]))
    )
    assert first.sidecar["content_sha256"] == hashlib.sha256((tmp_path / "a.bin").read_bytes()).hexdigest()
    assert first.identity == again.identity != second.identity
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.json").unlink()  # as a store of Megatron-Core
    first, second, again = (TokenStore.open(tmp_path / name) for name in ("a", "b", "c"))
    assert first.identity == again.identity != second.identity


def test_identity_has_a_sample_of_the_tokens_and_of_the_mask(tmp_path):
    """Tokens overwritten in place, whatever the sidecar says of them."""
    size = 10**5
    with TokenStoreWriter(tmp_path / "s", vocab_size=2, masked=True) as writer:
        writer.add(np.zeros(size, np.int64), np.zeros(size, np.bool_))
    opened = [TokenStore.open(tmp_path / "s").identity]
    for ending, itemsize in ((".bin", 2), (".mask", 1)):
        with (tmp_path / f"s{ending}").open("r+b") as file:
            for place in (0, size // 3, size - 1):
                file.seek(place * itemsize)
                file.write(b"\1")
                file.flush()
                opened.append(TokenStore.open(tmp_path / "s").identity)
    assert len(set(opened)) == 7


def test_a_mask_belongs_to_its_store(tmp_path):
    def masked(mask: list[bool]) -> TokenStore:
        with TokenStoreWriter(tmp_path / "s", vocab_size=50, masked=True, overwrite=True) as writer:
            writer.add([1, 2, 3], mask)
            writer.add([4, 5])  # all labels
        return TokenStore.open(tmp_path / "s")

    store = masked([False, True, False])
    for place, expected in {(0, 0, 3): [False, True, False], (1, 0, 2): [True] * 2, (0, 1, 1): [True]}.items():
        np.testing.assert_array_equal(store.loss_mask(*place), expected)
    assert store.sidecar["labelled_tokens"] == 3
    assert masked([True, True, False]).identity != store.identity
    (tmp_path / "s.mask").write_bytes(bytes([1, 0, 1, 1, 2]))
    store = TokenStore.open(tmp_path / "s")
    np.testing.assert_array_equal(store.loss_mask(0, 0, 3), [True, False, True])
    with pytest.raises(UserError, match=r"s\.mask has the byte 2 in document 1; write 1 for labels and 0 for others"):
        store.loss_mask(1, 0, 2)
    (tmp_path / "s.mask").write_bytes(b"\1" * 4)
    with pytest.raises(UserError, match=r"s\.mask has 4 bytes, but its index asks for 5"):
        TokenStore.open(tmp_path / "s")
    (tmp_path / "s.mask").unlink()
    with pytest.raises(UserError, match=r"s\.mask does not exist, and the store was written with one"):
        TokenStore.open(tmp_path / "s")
    write(tmp_path / "s", [[1, 2]], overwrite=True)
    assert not (tmp_path / "s.mask").exists()
    assert TokenStore.open(tmp_path / "s").loss_mask(0, 0, 2) is None


def test_a_store_without_a_label_to_learn_is_found(tmp_path, monkeypatch):
    def stored(name: str, documents: list[list[bool]], masked: bool = True) -> TokenStore:
        with TokenStoreWriter(tmp_path / name, vocab_size=50, masked=masked) as writer:
            for mask in documents:
                writer.add([1] * len(mask), mask if masked else None)
        return TokenStore.open(tmp_path / name)

    monkeypatch.setattr(reader, "_CHUNK", 2)
    nothing = [False] * 3
    for learnt in ([True], [], [False, True], nothing):
        labels = [nothing, [True], learnt, [True, False], []]  # nothing predicts the first token of a document
        store = stored(f"masked {len(learnt)} {any(learnt)}", labels)
        if any(learnt[1:]):
            store.check_labels()
        else:
            with pytest.raises(UserError, match=r"token store .* has no labels \(PREFIX\.mask\) .* nothing to learn"):
                store.check_labels()
    stored("whole", [[True], [True, True]], masked=False).check_labels()
    with pytest.raises(UserError, match="or only documents of one token"):
        stored("short", [[True]] * 4, masked=False).check_labels()
