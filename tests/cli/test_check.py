"""``wlb check`` on documents of text: what it counts, what it refuses, and the command that it names next."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

SMALL = ("--tokenizer", "bytes", "--model", "tiny", "--hardware", "cpu", "--gpus", 1, "--context-window", "4K")
TEXTS = ["a" * 3000, "b\nc", "d" * 9000]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of texts, in the working directory."""
    monkeypatch.chdir(tmp_path)
    with Path("d.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(TEXTS)])
    Path("d.json").write_text(json.dumps(TEXTS))
    Path("d.txt").write_text("".join(text.replace("\n", " ") + "\n" for text in TEXTS))
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(TEXTS):
        Path(f"folder/{number}.txt").write_text(text)
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "e"}] for text in TEXTS]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


@pytest.mark.parametrize(
    ("given", "options"),
    [("d.csv", ()), ("d.txt", ("--documents", "lines")), ("chats.jsonl", ("--chat",))],
)
def test_every_kind_of_text_is_counted_and_the_same_is_prepared(wlb, texts, given, options):
    status, out, err = wlb("check", given, *SMALL, *options)
    assert (status, err) == (0, "")
    following = out.splitlines()[-1].removeprefix("next: wlb ").split()
    assert sorted(following) == sorted(["prepare", given, "--tokenizer", "bytes", *options, "--out", "corpus"])
    assert wlb(*following)[0] == 0
    checked = json.loads(wlb("check", given, *SMALL, *options, "--json")[1])
    stored = json.loads(wlb("check", "corpus", *SMALL[2:], "--json")[1])
    assert {**checked, "config": ""} == {**stored, "config": ""}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["d.txt", *SMALL],
            "d.txt has several lines; give --documents lines if each is a document, or --documents files",
        ),
        (
            ["d.csv", *SMALL, "--text-field", "body"],
            "d.csv has no column 'body', only id, text; choose one with --text-f",
        ),
        (
            ["chats.jsonl", *SMALL],
            "3 missing field; the first entry without field 'text' has messages; choose one with",
        ),
        (["d.csv", *SMALL, "--documents", "lines"], "--documents is for text files, and d.csv has none; leave it out"),
        (
            ["d.csv"],
            "has no column 'length'; it has id, text; if it is text, count its tokens with: wlb check d.csv --tok",
        ),
        (
            ["folder"],
            "if it is text, count its tokens with: wlb check folder --tokenizer bytes, or store them with: wlb",
        ),
        (["d.json", "--text-field", "body"], "--text-field has no effect without --tokenizer (got body); leave it out"),
        (["d.json", "--chat"], "--chat has no effect without --tokenizer"),
    ],
)
def test_mistakes_are_one_line(wlb, texts, arguments, message):
    status, out, err = wlb("check", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("wlb: error: ")
    assert message in err
    assert err.count("\n") == 1
