"""Whole runs of ``prepare_store``: every document is in the store or in the counts, and a kill leaves no store."""

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.documents.prepare.corpora import write_corpus
from tests.limits import examples
from tests.training.processes import is_running, wait_until
from wlb.documents.prepare import prepare_store, text_lengths, train_tokenizer
from wlb.documents.prepare.chat import ChatFormat
from wlb.documents.prepare.sources import CorpusShard, FileCorpus
from wlb.documents.prepare.tokenization import BytesTokenizer, load_tokenizer
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError

STORE = (".bin", ".idx", ".json")


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return FileCorpus([path])


def contents(prefix):
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in STORE]


@pytest.fixture(scope="module")
def words():
    random_words = random.Random(0)
    return ["".join(random_words.choices("abcdefgh ", k=random_words.randint(1, 2000))) for _ in range(4000)]


def test_documents_in_are_documents_out_and_rejects(tmp_path):
    lines = st.one_of(
        st.text(max_size=20).map(lambda text: json.dumps({"text": text})),
        st.sampled_from(["", "{", '{"other": 1}', '{"text": 1}', '{"text": "\\ud800"}', "[]"]),
    )

    @settings(max_examples=examples(20))
    @given(st.lists(lines, max_size=20))
    def balanced(lines):
        good = [json.dumps({"text": "kept"}), *lines]
        (tmp_path / "d.jsonl").write_bytes("".join(line + "\n" for line in good).encode())
        corpus = FileCorpus([tmp_path / "d.jsonl"])
        report = prepare_store(corpus, tmp_path / "s", BytesTokenizer(), overwrite=True)
        texts = []
        for line in good:
            try:
                text = json.loads(line)["text"]
                texts += [text.encode()] * bool(text)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        store = TokenStore.open(tmp_path / "s")
        assert [store.read(i).tolist() for i in range(len(store))] == [[*text, 256] for text in texts]
        assert report.documents_in == len(good) == report.documents_out + sum(report.rejects.values())
        assert report.documents_out == len(store) == store.sidecar["documents_out"]
        assert report.rejects == store.sidecar["rejects"]
        assert report.tokens == store.tokens

    balanced()


def test_any_number_of_workers_writes_the_same_bytes(tmp_path, words):
    # Three batches, so that there is an order to lose.
    corpus = write_lines(tmp_path / "d.jsonl", words[:2500])
    assert len(list(corpus.batches())) == 3
    tokenizer = train_tokenizer(write_lines(tmp_path / "t.jsonl", words[:50]), 400)
    for workers in (1, 2):
        prepare_store(corpus, tmp_path / f"w{workers}", tokenizer, workers=workers)
    assert contents(tmp_path / "w1") == contents(tmp_path / "w2")
    store = TokenStore.open(tmp_path / "w1")
    assert len(store) == 2500
    for document in (0, 1, 2499):
        assert store.read(document).tolist() == [*tokenizer.encode(words[document]).tolist(), tokenizer.end_token]


def test_a_trained_tokenizer_lies_beside_the_store_and_loads(tmp_path, words):
    corpus = write_lines(tmp_path / "d.jsonl", words[:100])
    tokenizer = train_tokenizer(corpus, 300)
    report = prepare_store(corpus, tmp_path / "s", tokenizer, save_tokenizer=True)
    saved = tmp_path / "s.tokenizer.json"
    assert str(saved) in report.files
    assert str(tmp_path) not in (tmp_path / "s.json").read_text()
    assert (
        load_tokenizer(str(saved)).identity["sha256"] == TokenStore.open(tmp_path / "s").sidecar["tokenizer"]["sha256"]
    )
    prepare_store(corpus, tmp_path / "s", BytesTokenizer(), overwrite=True)
    assert not saved.exists()


def test_a_corpus_without_documents_makes_no_store(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": ""}\n{\n{\n')
    with pytest.raises(UserError, match="3 documents read, none can be stored: 2 bad json, 1 empty; name other files"):
        prepare_store(FileCorpus([tmp_path / "d.jsonl"]), tmp_path / "s", BytesTokenizer())
    (tmp_path / "d.jsonl").write_text('3\n{"content": "a", "id": 1}\n')
    with pytest.raises(
        UserError,
        match="1 missing field, 1 not text; the first entry without the field 'text' has: content, id; choose one",
    ):
        prepare_store(FileCorpus([tmp_path / "d.jsonl"]), tmp_path / "s", BytesTokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]


def test_lengths_are_counted_as_they_would_be_stored(tmp_path, capsys):
    texts = ["one", "two\nlines", "drei ü", 'f"our,']
    entries = [{"text": text} for text in texts]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    pq.write_table(pa.Table.from_pylist(entries), tmp_path / "d.parquet")
    (tmp_path / "files").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "files" / f"{number}.txt").write_text(text)
    for name, unit in (
        ("d.jsonl", "line"),
        ("d.parquet", "row"),
        ("files", "file"),
    ):
        said, counted = text_lengths(FileCorpus([tmp_path / name]), BytesTokenizer())
        assert said == f"{tmp_path / name} (one document per {unit})"
        prepare_store(FileCorpus([tmp_path / name]), tmp_path / "s", BytesTokenizer(), overwrite=True)
        assert counted.tolist() == TokenStore.open(tmp_path / "s").lengths.tolist()
        assert counted.tolist() == [len(text.encode()) + 1 for text in texts]
    assert capsys.readouterr().err == ""
    chats = [[{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}] for n in (1, 20)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    conversations = FileCorpus([tmp_path / "d.jsonl"], "messages", chat=True)
    prepare_store(conversations, tmp_path / "s", BytesTokenizer(), chat=ChatFormat(), overwrite=True)
    _, counted = text_lengths(conversations, BytesTokenizer(), ChatFormat())
    assert counted.tolist() == TokenStore.open(tmp_path / "s").lengths.tolist()


def test_what_is_left_out_of_lengths_is_told(tmp_path, capsys):
    (tmp_path / "c.png").touch()
    corpus = write_lines(tmp_path / "d.jsonl", ["kept", ""])
    assert text_lengths(corpus, BytesTokenizer())[1].tolist() == [5]
    assert capsys.readouterr().err == f"wlb: note: {corpus.name}: left out 1 empty\n"
    corpus = FileCorpus([tmp_path])
    assert text_lengths(corpus, BytesTokenizer())[1].tolist() == [5]
    assert capsys.readouterr().err == f"wlb: note: {corpus.name}: left out 1 empty, 1 file of other kinds\n"
    source, many = text_lengths(write_lines(tmp_path / "d.jsonl", ["a"] * 50_000), BytesTokenizer())
    assert 20_000 <= len(many) < 30_000
    assert source == f"the beginning of {tmp_path / 'd.jsonl'} (one document per line)"
    assert f"counted only the first {len(many):,} documents of {tmp_path / 'd.jsonl'}" in capsys.readouterr().err
    with pytest.raises(UserError, match="the sources contain no documents"):
        text_lengths(write_lines(tmp_path / "d.jsonl", []), BytesTokenizer())


def test_a_source_damaged_in_the_middle_makes_no_store(tmp_path, words):
    whole = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in words).encode())
    (tmp_path / "d.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"d\.jsonl\.gz is damaged"):
        prepare_store(FileCorpus([tmp_path / "d.jsonl.gz"]), tmp_path / "s", BytesTokenizer(), workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl.gz"]


@pytest.mark.parametrize("replacing", [False, True])
def test_kill_9_leaves_nothing_that_reads_as_a_store(tmp_path, words, replacing):
    prefix, source = tmp_path / "s", tmp_path / "d.jsonl"
    write_lines(source, words * 25)
    before = None
    if replacing:
        prepare_store(write_lines(tmp_path / "old.jsonl", ["old"]), prefix, BytesTokenizer())
        before = contents(prefix)
    options = ["--out", str(prefix), "--workers", "2", "--overwrite"]
    command = [sys.executable, "-m", "wlb", "prepare", str(source), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        part = tmp_path / "s.bin.part"
        wait_until(lambda: part.exists() and part.stat().st_size > 0)
        workers = children(process.pid)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
    if before is None:
        with pytest.raises(UserError, match="does not exist"):
            TokenStore.open(prefix)
    else:
        assert contents(prefix) == before
    # Nothing is left running either, and the next run is not hindered.
    wait_until(lambda: not any(is_running(worker) for worker in workers))
    assert workers
    prepare_store(write_lines(source, words[:100]), prefix, BytesTokenizer(), overwrite=True)
    assert TokenStore.open(prefix).tokens == sum(len(text) + 1 for text in words[:100])


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("step", range(1, 9))
def test_a_crash_at_any_step_of_the_commit_leaves_a_whole_store_or_none(tmp_path, monkeypatch, step):
    """Renaming and flushing stop at the given call, as if the machine had."""
    prefix = tmp_path / "s"
    # As many tokens and documents, differently divided: an old index would fit the new tokens.
    before, after = ["ab", "cdef"], ["abcd", "ef"]
    old, new = (write_lines(tmp_path / f"{texts[0]}.jsonl", texts) for texts in (before, after))
    prepare_store(old, prefix, BytesTokenizer())
    calls = 0

    class Crash(BaseException):
        pass

    def crashing(function):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls >= step:
                raise Crash
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(os, "fsync", crashing(os.fsync))
    monkeypatch.setattr(os, "replace", crashing(os.replace))
    with contextlib.suppress(Crash):
        prepare_store(new, prefix, BytesTokenizer(), overwrite=True)
    monkeypatch.undo()
    try:
        store = TokenStore.open(prefix)
        texts = [bytes(store.read(i)[:-1].tolist()).decode() for i in range(2)]
    except UserError as error:
        assert "does not exist" in str(error)  # noqa: PT017  (either outcome is right, a mixture is not)
    else:
        assert texts in (before, after)


MEMORY_PROGRAM = """
import resource, sys
from pathlib import Path
from wlb.documents.prepare import prepare_store
from wlb.documents.prepare.sources import FileCorpus
from wlb.documents.prepare.tokenization import BytesTokenizer
prepare_store(FileCorpus([Path(sys.argv[1])]), Path(sys.argv[2]), BytesTokenizer())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    peaks = []
    for times in (1, 8):
        source = tmp_path / f"{times}.jsonl"
        with source.open("w") as file:
            # 50,000 documents of 100 bytes, 5 MB, and eight times as many.
            for _ in range(times):
                file.write((json.dumps({"text": "x" * 100}) + "\n") * 50_000)
        command = [sys.executable, "-c", MEMORY_PROGRAM, str(source), str(tmp_path / f"s{times}")]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(result.stdout) / 1024)
    # 35 MB more corpus and 350,000 more documents of 12 bytes; noise of the allocator is a few MiB.
    assert peaks[1] - peaks[0] < 6, peaks


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


def test_shards_are_the_store_in_order(tmp_path, corpus):
    prepare_store(corpus, tmp_path / "alone", BytesTokenizer())
    alone = TokenStore.open(tmp_path / "alone")
    for count in (1, 3, 11):
        shards = [CorpusShard(number, count) for number in range(1, count + 1)]
        reports = [
            prepare_store(
                corpus, tmp_path / f"s{count}", BytesTokenizer(), shard=shard, workers=1 + (shard.number == 3)
            )
            for shard in reversed(shards)
        ]
        store = TokenStore.open(tmp_path / f"s{count}-*-of-{count}")
        assert sum(report.documents_out for report in reports) == len(store)
        assert np.array_equal(store.lengths, alone.lengths)
        tokens = b"".join((tmp_path / f"s{count}-{index}-of-{count}.bin").read_bytes() for index in range(1, count + 1))
        assert tokens == (tmp_path / "alone.bin").read_bytes()


def test_a_shard_is_made_whole_or_not_at_all_and_once(tmp_path, corpus):
    prefix, shard = tmp_path / "s", CorpusShard(2, 3)
    prepare_store(corpus, prefix, BytesTokenizer(), shard=shard)
    assert sorted(path.name for path in tmp_path.glob("s*")) == ["s-2-of-3.bin", "s-2-of-3.idx", "s-2-of-3.json"]
    assert json.loads((tmp_path / "s-2-of-3.json").read_text())["shard"] == "2/3"
    with pytest.raises(UserError, match=r"s-2-of-3\.bin exists; choose another --out or pass --overwrite"):
        prepare_store(corpus, prefix, BytesTokenizer(), shard=shard)
    with pytest.raises(
        UserError, match=r"s-2-of-3\.idx belongs to another number of shards than 4; remove those shards, or"
    ):
        prepare_store(corpus, prefix, BytesTokenizer(), shard=CorpusShard(1, 4))


def test_shards_without_documents_are_empty(tmp_path, capsys):
    (tmp_path / "d.txt").write_text("one")
    (tmp_path / "bad.jsonl").write_text("{")
    for number in (1, 2):
        report = prepare_store(
            FileCorpus([tmp_path / "d.txt"]), tmp_path / "s", BytesTokenizer(), shard=CorpusShard(number, 2)
        )
        assert report.documents_out == 2 - number
    assert TokenStore.open(tmp_path / "s-*").lengths.tolist() == [4]
    with pytest.raises(UserError, match=r"s-2-of-2\.idx holds no documents"):
        TokenStore.open(tmp_path / "s-2-of-2")
    bad = prepare_store(FileCorpus([tmp_path / "bad.jsonl"]), tmp_path / "t", BytesTokenizer(), shard=CorpusShard(1, 1))
    assert (bad.documents_out, bad.rejects) == (0, {"bad_json": 1})
    assert capsys.readouterr().err.count("has no documents; its store is empty, and a glob skips it") == 2


def test_shards_are_named():
    for text in ("1/1", "3/100"):
        assert str(CorpusShard.parse(text)) == text
    for text in ("0/3", "4/3", "3", "a/b", "-1/3", "1/0", "slurm"):
        with pytest.raises(UserError, match=f"--shard {text} is not I/N with I from 1 to N"):
            CorpusShard.parse(text)
