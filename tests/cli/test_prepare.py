from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from wlb.documents.store.reader import TokenStore, TokenStoreWriter


@pytest.fixture
def corpus(tmp_path):
    directory = tmp_path / "corpus"
    directory.mkdir()
    (directory / "a.txt").write_text("hello")
    (directory / "b.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n{oops\n')
    (directory / "c.png").write_bytes(b"\x89PNG")
    return directory


def test_json_result_and_store(wlb, tmp_path, corpus):
    status, out, err = wlb("prepare", corpus, "--out", tmp_path / "s", "--json")
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert result == {
        "documents_in": 4,
        "documents_out": 2,
        "rejects": {"bad_json": 1, "missing_field": 1},
        "skipped_files": 1,
        "tokens": 10,
        "text_bytes": 8,
        "vocab_size": 257,
        "end_token": 256,
        "files": [str(tmp_path / f"s{suffix}") for suffix in (".bin", ".json", ".idx")],
    }
    store = TokenStore.open(tmp_path / "s")
    assert [store.read(i).tolist() for i in range(2)] == [[*b"hello", 256], [*b"one", 256]]


def test_table_names_rejects_and_skipped_files(wlb, tmp_path, corpus):
    status, out, _ = wlb("prepare", corpus, "--out", tmp_path / "s", "--text-field", "body")
    assert status == 0
    assert out.startswith(
        f"read {corpus} (one document per file or line): 2 documents, 10 tokens; median 4, longest 6; "
        "documents up to 6 hold 95% of all tokens\n"
    )
    assert f"Token store {tmp_path / 's'}" in " ".join(out.split())  # the path is not broken
    assert "the first entry without field 'body' has text; choose one with --text-field" in out
    for words in (
        "rejected: bad json",
        "rejected: missing field",
        "skipped 1 file of",
        "vocabulary 257, end token 256",
    ):
        assert words in out


def test_parquet_has_a_document_in_each_row(wlb, tmp_path):
    parquet.write_table(arrow.table({"text": ["one", "two\nlines"], "body": ["x", "y"]}), tmp_path / "d.parquet")
    for options, expected in (((), [b"one", b"two\nlines"]), (("--text-field", "body"), [b"x", b"y"])):
        status, out, _ = wlb("prepare", tmp_path / "d.parquet", "--out", tmp_path / "s", "--overwrite", *options)
        assert status == 0
        assert out.startswith(f"read {tmp_path / 'd.parquet'} (one document per row): 2 documents, ")
        store = TokenStore.open(tmp_path / "s")
        assert [bytes(store.read(i)[:-1].tolist()) for i in range(len(store))] == expected


def test_a_text_file_is_one_document_or_one_per_line(wlb, tmp_path):
    (tmp_path / "d.txt").write_text("one\ntwo\n")
    status, _, err = wlb("prepare", tmp_path / "d.txt", "--out", tmp_path / "s")
    assert (status, "d.txt has several lines; give --documents lines" in err) == (2, True)
    for given, count in ((["--documents", "lines"], 2), (["--documents", "files"], 1)):
        status, out, _ = wlb("prepare", tmp_path / "d.txt", "--out", tmp_path / "s", "--overwrite", "--json", *given)
        assert (status, json.loads(out)["documents_out"]) == (0, count)


def test_a_trained_tokenizer_can_be_used_again(wlb, tmp_path, corpus):
    status, out, _ = wlb("prepare", corpus, "--out", tmp_path / "s", "--train-bpe", 260, "--json")
    assert status == 0
    saved = tmp_path / "s.tokenizer.json"
    assert str(saved) in json.loads(out)["files"]
    assert wlb("prepare", corpus, "--out", tmp_path / "t", "--tokenizer", saved)[0] == 0
    assert (tmp_path / "s.bin").read_bytes() == (tmp_path / "t.bin").read_bytes()


def test_stdlib(wlb, tmp_path):
    status, out, _ = wlb("prepare", "--stdlib", "--out", tmp_path / "s", "--json")
    result = json.loads(out)
    assert status == 0
    # One byte is one token, and every document has its end token.
    assert result["tokens"] == result["text_bytes"] + result["documents_out"]
    assert TokenStore.open(tmp_path / "s").tokens == result["tokens"] > 5_000_000


def test_shards_are_stores_that_a_glob_checks(wlb, tmp_path, corpus):
    with (corpus / "b.jsonl").open("a") as file:
        file.write('{"text": "three"}\n')
    command = ("prepare", corpus, "--out", tmp_path / "s", "--shard")
    status, out, _ = wlb(*command, "2/2")
    assert status == 0
    assert f"Token store {tmp_path / 's-2-of-2'}" in out
    status, out, err = wlb(*command, "1/2", "--json")
    assert (status, err) == (0, "")
    assert [Path(file).name for file in json.loads(out)["files"]] == ["s-1-of-2.bin", "s-1-of-2.json", "s-1-of-2.idx"]
    assert "s-1-of-2.bin exists; choose another --out" in wlb(*command, "1/2")[2]
    alone = json.loads(wlb("prepare", corpus, "--out", tmp_path / "alone", "--json")[1])
    whole = json.loads(wlb("prepare", "--check", tmp_path / "s-*-of-2", "--json")[1])
    assert (whole["documents"], whole["tokens"]) == (alone["documents_out"], alone["tokens"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "{tmp}/s"], "name files or directories to prepare, or else --stdlib"),
        (["{tmp}/corpus", "--stdlib", "--out", "{tmp}/s"], "not both"),
        (["{tmp}/corpus"], "--out"),
        (["{tmp}/nothing", "--out", "{tmp}/new/s"], "nothing does not exist"),
        (["{tmp}/corpus", "--out", "{tmp}/old.json/s"], "old.json is no directory that can be written"),
        (["{tmp}/corpus", "--out", "{tmp}/corpus"], "corpus is a directory; name the store in it"),
        (["{tmp}/corpus", "--out", "/proc/s"], "/proc"),
        (["{tmp}/corpus", "--out", "{tmp}/old"], "old.bin exists; choose another --out or pass --overwrite"),
        (["{tmp}/old.json", "--out", "{tmp}/old", "--overwrite"], "would be overwritten by the store"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--workers", "0"], "--workers"),
        (["--stdlib", "--out", "{tmp}/s", "--documents", "lines"], "--documents has no effect with --stdlib"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--tokenizer", "gpt5"], "'gpt5' is neither"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--train-bpe", "100"], "--train-bpe 100: give 257 to"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--train-bpe", "300", "--tokenizer", "bytes"], "leave out --tokenizer"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--train-bpe", "300", "--end-token", "x"], "leave out --end-token"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--shard", "0/2"], "0/2 is not I/N with I from 1 to N"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--shard", "1/2", "--ray", "auto"], "--ray runs all shards at once"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--shard", "1/2", "--train-bpe", "300"], "--train-bpe learns from all"),
        (["{tmp}/corpus/c.png", "--out", "{tmp}/s"], "no documents are left of 1: 1 undecodable"),
    ],
)
def test_mistakes_are_one_line_and_status_2(wlb, tmp_path, corpus, arguments, message):
    assert wlb("prepare", corpus, "--out", tmp_path / "old")[0] == 0
    status, out, err = wlb("prepare", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert (status, out) == (2, "")
    assert message in err
    assert not (tmp_path / "new").exists()
    assert err.startswith("wlb: error: ")
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "old.bin", "old.idx", "old.json"]
    assert TokenStore.open(tmp_path / "old").tokens == 10


def test_sources_without_any_document_are_called_empty(wlb, tmp_path):
    (tmp_path / "none.jsonl").touch()
    parquet.write_table(arrow.table({"text": arrow.array([], arrow.string())}), tmp_path / "none.parquet")
    for name in ("none.jsonl", "none.parquet"):
        status, _, err = wlb("prepare", tmp_path / name, "--out", tmp_path / "s")
        assert (status, err) == (2, "wlb: error: the sources contain no documents\n")


def test_a_disk_that_takes_no_more_is_one_line_and_status_2(tmp_path):
    (tmp_path / "d.txt").write_bytes(b"x" * 3_000_000)
    command = [sys.executable, "-m", "wlb", "prepare", str(tmp_path / "d.txt"), "--out", str(tmp_path / "s")]
    limit = 1_000_000

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=small_files)
    assert result.returncode == 2
    assert "cannot write token store" in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["d.txt"]


def test_a_store_is_checked_in_full(tmp_path, wlb):
    with TokenStoreWriter(tmp_path / "s", vocab_size=50) as writer:
        for tokens in ([1, 2, 3], [4]):
            writer.add(tokens)
    status, out, _ = wlb("prepare", "--check", tmp_path / "s")
    said = f"{tmp_path / 's'} is whole: 2 documents, 4 tokens\nnext: wlb check {tmp_path / 's'}\n"
    assert (status, out) == (0, said)
    for arguments, message in (
        (
            ["--check", tmp_path / "s", "--out", tmp_path / "t"],
            f"--out has no effect with --check (got {tmp_path / 't'})",
        ),
        (["--check", tmp_path / "t"], "t.idx does not exist"),
    ):
        status, _, err = wlb("prepare", *arguments)
        assert status == 2
        assert message in err
    (tmp_path / "s.bin").write_bytes(b"\1\0\2\0\3\0\5\0")
    status, _, err = wlb("prepare", "--check", tmp_path / "s")
    assert status == 2
    assert "s.bin is not what was written: its sha256 is" in err
    assert err.count("\n") == 1
