import ast
import inspect
import json
import random
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cases import in_turn
from tests.cli.conftest import printed, refusal
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


def test_table_names_rejects_and_skipped_files(tmp_path, corpus):
    out = printed("prepare", corpus, "--out", tmp_path / "s", "--text-field", "body")
    assert out.startswith(
        f"read {corpus} (one document per file or line): 2 documents, 10 tokens; median 4, longest 6; "
        "documents up to 6 cover 95% of tokens\n"
    )
    assert f"Token store {tmp_path / 's'}" in " ".join(out.split())  # the path is not broken
    assert "the first entry without the field 'body' has: text; choose one with --text-field" in out
    for words in ("rejected: bad json", "rejected: missing field", "skipped 1 file", "vocabulary 257, end token 256"):
        assert words in out


def test_a_text_file_is_one_document_or_one_per_line(tmp_path):
    (tmp_path / "d.txt").write_text("one\ntwo\n")
    for given, count in ((["--documents", "lines"], 2), (["--documents", "files"], 1)):
        out = printed("prepare", tmp_path / "d.txt", "--out", tmp_path / "s", "--overwrite", "--json", *given)
        assert json.loads(out)["documents_out"] == count


def test_a_trained_tokenizer_can_be_used_again(tmp_path, corpus):
    out = printed("prepare", corpus, "--out", tmp_path / "s", "--train-bpe", 260, "--json")
    saved = tmp_path / "s.tokenizer.json"
    assert str(saved) in json.loads(out)["files"]
    printed("prepare", corpus, "--out", tmp_path / "t", "--tokenizer", saved)
    assert (tmp_path / "s.bin").read_bytes() == (tmp_path / "t.bin").read_bytes()
    printed("prepare", corpus, "--out", tmp_path / "s", "--tokenizer", saved, "--overwrite")
    assert saved.exists()


def test_stdlib(tmp_path, monkeypatch):
    """A small one; of the real one, test_sources counts the documents."""
    small = tmp_path / "stdlib"
    small.mkdir()
    texts = [inspect.getsource(module) for module in (ast, random)]
    for name, text in zip(("ast", "random"), texts, strict=True):
        (small / f"{name}.py").write_text(text)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(small)})
    result = json.loads(printed("prepare", "--stdlib", "--out", tmp_path / "s", "--json"))
    # One byte is one token, and every document has its end token.
    assert result["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert result["documents_out"] > len(texts)
    assert TokenStore.open(tmp_path / "s").tokens == result["tokens"] == result["text_bytes"] + result["documents_out"]


def test_shards_are_stores_that_a_glob_checks(tmp_path, corpus):
    with (corpus / "b.jsonl").open("a") as file:
        file.write('{"text": "three"}\n')
    command = ("prepare", corpus, "--out", tmp_path / "s", "--shard")
    printed("prepare", corpus, "--out", tmp_path / "s-en", "--shard", "1/3")  # of another corpus
    assert f"Token store {tmp_path / 's-2-of-2'}" in printed(*command, "2/2")
    files = json.loads(printed(*command, "1/2", "--json"))["files"]
    assert [Path(file).name for file in files] == ["s-1-of-2.bin", "s-1-of-2.json", "s-1-of-2.idx"]
    assert "s-1-of-2.bin exists; choose another --out" in refusal(*command, "1/2")
    alone = json.loads(printed("prepare", corpus, "--out", tmp_path / "alone", "--json"))
    whole = json.loads(printed("prepare", "--check", tmp_path / "s-*-of-2", "--json"))
    assert (whole["documents"], whole["tokens"]) == (alone["documents_out"], alone["tokens"])


@in_turn(
    ("arguments", "message"),
    [
        (["--out", "{tmp}/s"], "name files or directories to prepare, or else --stdlib"),
        (["{tmp}/corpus", "--stdlib", "--out", "{tmp}/s"], "not both"),
        (["{tmp}/corpus"], "--out"),
        (["{tmp}/nothing", "--out", "{tmp}/new/s"], "nothing does not exist"),
        (["{tmp}/corpus", "--out", "{tmp}/old.json/s"], "old.json is not a directory"),
        (["{tmp}/corpus", "--out", "{tmp}/corpus"], "corpus is a directory; name the store in it"),
        (["{tmp}/corpus", "--out", "/proc/s"], "/proc"),
        (["{tmp}/corpus", "--out", "{tmp}/old"], "old.bin exists; choose another --out or pass --overwrite"),
        (["{tmp}/old.json", "--out", "{tmp}/old", "--overwrite"], "would be overwritten by the store"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--tokenizer", "gpt5"], "'gpt5' is neither"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--train-bpe", "100"], "--train-bpe 100: give 257 to"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--train-bpe", "300", "--tokenizer", "bytes"], "leave out --tokenizer"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--train-bpe", "300", "--end-token", "x"], "leave out --end-token"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--shard", "0/2"], "0/2 is not I/N with I from 1 to N"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--shard", "1/2", "--ray", "auto"], "--ray runs all shards at once"),
        (["{tmp}/corpus", "--out", "{tmp}/s", "--shard", "1/2", "--train-bpe", "300"], "--train-bpe learns from all"),
        (["{tmp}/corpus/c.png", "--out", "{tmp}/s"], "1 document read, none can be stored: 1 undecodable"),
    ],
)
def test_mistakes_are_one_line_and_status_2(tmp_path, corpus, arguments, message):
    printed("prepare", corpus, "--out", tmp_path / "old", "--overwrite")
    assert message in refusal("prepare", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "old.bin", "old.idx", "old.json"]
    assert TokenStore.open(tmp_path / "old").tokens == 10


def test_a_disk_that_takes_no_more_is_one_line_and_status_2(tmp_path):
    (tmp_path / "d.txt").write_bytes(b"x" * 3_000_000)
    command = [sys.executable, "-m", "wlb", "prepare", str(tmp_path / "d.txt"), "--out", str(tmp_path / "s")]
    limit = 1_000_000

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=small_files)
    assert result.returncode == 2
    assert "cannot be written" in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["d.txt"]


def test_a_store_is_checked_in_full(tmp_path):
    with TokenStoreWriter(tmp_path / "s", vocab_size=50) as writer:
        for tokens in ([1, 2, 3], [4]):
            writer.add(tokens)
    said = f"{tmp_path / 's'} is whole: 2 documents, 4 tokens\nnext: wlb check {tmp_path / 's'}\n"
    assert printed("prepare", "--check", tmp_path / "s") == said
    assert "t.idx does not exist" in refusal("prepare", "--check", tmp_path / "t")
    assert "--out has no effect with --check" in refusal("prepare", "--check", tmp_path / "s", "--out", tmp_path / "t")
    (tmp_path / "s.bin").write_bytes(b"\1\0\2\0\3\0\5\0")
    assert "s.bin is not what was written: its sha256 is" in refusal("prepare", "--check", tmp_path / "s")
