"""Shards, in any number and order and through kills, make the store that one process makes."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

import wlb.documents.prepare.sources as prepare_sources
from tests.cases import in_turn
from tests.documents.prepare.test_prepare import contents
from tests.documents.prepare.test_sources import compressed
from tests.programs import forked
from tests.training.processes import wait_until
from wlb.documents.prepare import prepare_parts, prepare_store, train_tokenizer
from wlb.documents.prepare.chat import ChatFormat
from wlb.documents.prepare.parts import TaskShard
from wlb.documents.prepare.sources import FileCorpus
from wlb.documents.prepare.tokenization import BytesTokenizer
from wlb.errors import UserError


def write_corpus(directory: Path) -> FileCorpus:
    """Of every kind of file, in tasks of about 2,000 bytes, some of them without documents."""
    directory.mkdir()
    lines = "".join(json.dumps({"text": f"{i} " * (i % 90)}) + "\n" for i in range(200)).encode()
    (directory / "a.jsonl").write_bytes(lines + b'{oops\n{"text": "' + b"x" * 5000 + b'"}\n')
    compressed(directory / "b.jsonl.gz", lines)
    table = arrow.table({"text": [f"cell {i} " * 20 for i in range(100)]})
    parquet.write_table(table, directory / "c.parquet", row_group_size=30, compression="none")
    for i in range(30):
        (directory / f"d{i}.txt").write_text(f"text {i} " * 40 * (i % 3))
    (directory / "e.png").write_bytes(b"")
    return FileCorpus([directory])


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_sources, "_TASK_BYTES", (2000, 2000))
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def alone(tmp_path, corpus):
    prepare_store(corpus, tmp_path / "alone", BytesTokenizer())
    return contents(tmp_path / "alone")


def finish(corpus: FileCorpus, prefix: Path, shard: TaskShard, **options: Any) -> bool:
    """One shard, as the command does it: whether it has made the store."""
    merges = prepare_parts(corpus, prefix, BytesTokenizer(), shard=shard, **options).claim_merging(shard)
    if merges:
        prepare_store(corpus, prefix, BytesTokenizer())
    return merges


def test_shards_in_any_order_make_the_same_bytes(tmp_path, corpus, alone):
    assert 20 < len(list(corpus.tasks())) < 100
    prepare_store(corpus, tmp_path / "workers", BytesTokenizer(), workers=2)
    assert contents(tmp_path / "workers") == alone
    for count, order in ((1, (1,)), (3, (3, 1, 2)), (100, range(1, 101))):
        prefix = tmp_path / f"new-{count}" / "s"
        # Shards that come after the store was made, without tasks of their own, find nothing to do.
        assert sum(finish(corpus, prefix, TaskShard(i, count), workers=2 if i == 3 else 1) for i in order) == 1
        assert contents(prefix) == alone
        assert sorted(path.name for path in prefix.parent.iterdir()) == ["s.bin", "s.idx", "s.json"]


def test_shards_at_the_same_time_make_one_store(tmp_path, corpus, alone):
    prefix = tmp_path / "s"
    with ThreadPoolExecutor(8) as threads:
        made = threads.map(lambda i: finish(corpus, prefix, TaskShard(i, 8)), range(1, 9))
    assert sum(made) == 1
    assert contents(prefix) == alone


def test_parts_among_the_sources_are_not_counted(tmp_path, corpus, alone):
    made = [finish(FileCorpus([tmp_path / "corpus"]), tmp_path / "corpus" / "s", TaskShard(i, 2)) for i in (1, 2)]
    assert made == [False, True]
    assert contents(tmp_path / "corpus" / "s") == alone


def test_rejects_and_masks_go_through_parts(tmp_path, corpus):
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    lines = [json.dumps({"messages": said if i % 3 else []}) for i in range(100)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    chats = FileCorpus([tmp_path / "chats.jsonl"], "messages", chat=True)
    arguments: dict[str, Any] = {"tokenizer": train_tokenizer(corpus, 300), "chat": ChatFormat()}
    reports = [prepare_store(chats, tmp_path / "alone", **arguments, save_tokenizer=True)]
    prepare_parts(chats, tmp_path / "parts", **arguments, shard=TaskShard(2, 2))
    reports.append(prepare_store(chats, tmp_path / "parts", **arguments, save_tokenizer=True))
    assert reports[0].labelled_tokens
    assert reports[0].rejects == reports[1].rejects == {"not_messages": 34}
    for suffix in (".bin", ".idx", ".json", ".mask", ".tokenizer.json"):
        files = [(tmp_path / (name + suffix)).read_bytes() for name in ("alone", "parts")]
        assert files[0] == files[1]


def test_after_kill_9_only_what_is_missing_is_done(tmp_path):
    for name in "abde":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": name * i}) + "\n" for i in range(99)))
    pipe, prefix, directory = tmp_path / "c.jsonl", tmp_path / "s", tmp_path / "s.parts"
    os.mkfifo(pipe)  # which holds its task up until the kill
    sources = [tmp_path / f"{name}.jsonl" for name in "abcde"]

    def done() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in directory.glob("0??????")}

    with forked("-m", "wlb", "prepare", *sources, "--out", prefix, "--shard", "1/1") as program:
        wait_until(lambda: len(done()) == 2 and len([*directory.iterdir()]) == 4)
        program.send_signal(signal.SIGKILL)
        program.wait()
    before, since = done(), pipe.stat().st_mtime_ns
    pipe.unlink()
    pipe.touch()
    os.utime(pipe, ns=(since, since))
    corpus, progress = FileCorpus(sources), list[int]()
    prepare_parts(corpus, prefix, BytesTokenizer(), on_progress=progress.append)
    assert before.items() < done().items()
    size = (tmp_path / "a.jsonl").stat().st_size
    assert progress == [2 * size, 0, size, size]
    prepare_store(corpus, prefix, BytesTokenizer())
    prepare_store(corpus, tmp_path / "at-once", BytesTokenizer())
    assert contents(prefix) == contents(tmp_path / "at-once")
    assert not directory.exists()


def test_a_merge_that_was_killed_is_taken_up_by_its_shard_or_without_one(tmp_path, corpus, alone):
    prefix, (first, second) = tmp_path / "s", (TaskShard(i, 2) for i in (1, 2))
    for shard in (first, second):
        parts = prepare_parts(corpus, prefix, BytesTokenizer(), shard=shard)
        assert parts.claim_merging(shard) == (shard == second)
    assert not parts.claim_merging(first)
    assert parts.claim_merging(second)
    prepare_store(corpus, prefix, BytesTokenizer())
    assert contents(prefix) == alone
    assert not parts.claim_merging(second)


def test_parts_of_other_arguments_are_refused(tmp_path, corpus):
    prefix = tmp_path / "s"
    parts = prepare_parts(corpus, prefix, BytesTokenizer(), shard=TaskShard(1, 2))
    made = sorted(parts.directory.iterdir())

    def refused(corpus, message, **options):
        for prepare in (prepare_parts, prepare_store):
            with pytest.raises(UserError, match=message) as caught:
                prepare(corpus, prefix, **{"tokenizer": BytesTokenizer(), **options})
            assert "remove" in str(caught.value)
            assert "\n" not in str(caught.value)

    directory = tmp_path / "corpus"
    refused(
        corpus,
        r'begun with tokenizer \{"kind": "bytes".*not \{"kind": "huggingface"',
        tokenizer=train_tokenizer(corpus, 300),
    )
    refused(corpus, "begun with chat null, not", chat=ChatFormat())
    refused(FileCorpus([directory], "body"), 'begun with source .*"text_field": "text".*"text_field": "body"')
    refused(FileCorpus([directory / "a.jsonl"]), 'begun with source .*"files": 33')
    (directory / "a.jsonl").rename(directory / "f.jsonl")
    refused(FileCorpus([directory]), r"b.jsonl.gz is in the place of .*a.jsonl \(1 of ")
    (directory / "f.jsonl").rename(directory / "a.jsonl")
    (directory / "d9.txt").write_text("x")
    refused(FileCorpus([directory]), r"d9.txt has changed since .*s\.parts was begun")
    assert sorted(parts.directory.iterdir()) == made


def test_damaged_parts_and_foreign_directories_are_one_line(tmp_path, corpus):
    prefix = tmp_path / "s"
    parts = prepare_parts(corpus, prefix, BytesTokenizer())
    whole = parts.path(1).read_bytes()
    for damaged in (whole[:-5], whole[:-300], b"", b"{}\n", b"\x00" * 100, whole.replace(b'"tokens"', b'"taken"')):
        parts.path(1).write_bytes(damaged)
        with pytest.raises(UserError, match=r"0000001 is damaged; remove it and run the command again$"):
            prepare_store(corpus, prefix, BytesTokenizer())
        assert not prefix.with_name("s.bin").exists()
    parts.path(1).unlink()
    prepare_store(corpus, prefix, BytesTokenizer())
    (tmp_path / "t.parts").mkdir()
    (tmp_path / "t.parts" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"t\.parts .*remove it or choose another --out"):
        prepare_store(corpus, tmp_path / "t", BytesTokenizer())
    assert [path.name for path in (tmp_path / "t.parts").iterdir()] == ["mine.txt"]


def array(this: int, count: int, least: int, most: int, step: int = 1) -> dict[str, str]:
    names = ("ID", "COUNT", "MIN", "MAX", "STEP")
    return {f"SLURM_ARRAY_TASK_{n}": str(v) for n, v in zip(names, (this, count, least, most, step), strict=True)}


@in_turn(
    ("text", "environment", "expected"),
    [
        ("1/1", {}, "1/1"),
        ("3/100", {}, "3/100"),
        ("slurm", array(0, 10, 0, 9), "1/10"),
        ("slurm", array(10, 10, 1, 10), "10/10"),
        ("slurm", array(8, 5, 0, 16, 4), "3/5"),
        ("slurm", array(5, 1, 5, 5), "1/1"),
        ("slurm", array(7, 2, 3, 7), "cannot number 2 tasks from 3 to 7, of which this is 7; give an array A-B"),
        ("slurm", array(11, 10, 1, 10), "cannot number 10 tasks from 1 to 10, of which this is 11"),
        ("slurm", array(3, 5, 0, 16, 4), "cannot number 5 tasks from 0 to 16, of which this is 3"),
        ("slurm", array(1, 1, 1, 1, 0), "needs a SLURM job array"),
        ("slurm", array(1, 0, 1, 0), "cannot number 0 tasks"),
        ("slurm", {}, r"needs a SLURM job array \(sbatch --array\)"),
        *((text, {}, f"--shard {text} is neither slurm nor I/N") for text in ("0/3", "4/3", "3", "a/b", "-1/3", "1/0")),
    ],
)
def test_shards_are_named(text, environment, expected):
    if "/" in expected and " " not in expected:
        assert str(TaskShard.parse(text, environment)) == expected
    else:
        with pytest.raises(UserError, match=expected):
            TaskShard.parse(text, environment)


def test_shards_of_one_corpus_have_every_task_once():
    for tasks, count in ((0, 3), (1, 3), (10, 3), (10, 10), (7, 100)):
        chosen = [number for i in range(count) for number in TaskShard(i + 1, count).chosen(tasks)]
        assert sorted(chosen) == list(range(tasks))
