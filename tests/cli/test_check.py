"""``wlb check``: what it says of which systems, what it counts of text, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

SMALL = ("--tokenizer", "bytes", "--model", "tiny", "--hardware", "cpu", "--gpus", 1, "--context-window", "4K")
TEXTS = ["a" * 3000, "b\nc", "d" * 9000]


LITTLE = ("--model", "tiny", "--hardware", "cpu", "--context-window", "4K", "--batch-tokens", "16K", "--steps", 1)
TWO = ("--systems", "plain-4d,best")


@pytest.fixture
def even(tmp_path: Path) -> Path:
    """Documents of one length, from which no preset gains anything."""
    path = tmp_path / "even.json"
    path.write_text(json.dumps([4096] * 24))
    return path


def test_where_little_is_gained_one_keeps_what_one_has(wlb, even):
    status, out, err = wlb("check", even, *LITTLE, "--gpus", 1)
    assert (status, err) == (0, "")
    assert out.startswith(f"read {even}: 24 documents, 98,304 tokens; median 4,096, longest 4,096;")
    assert "Keep what you have: no preset is at least 5% faster, and faster in every draw." in out
    assert "preset =" not in out
    assert "GPU-hours" not in out
    found = json.loads(wlb("check", even, *LITTLE, "--gpus", 1, "--json")[1])
    assert (found["winner"], found["config"], found["gpu_hours_a_day"]) == ("plain-4d", "", 0)
    assert [row["system"] for row in found["systems"]] == ["plain-4d", "per-document-4d", "best", "elastic"]


def test_only_the_systems_that_are_named_are_compared(wlb, even):
    found = json.loads(wlb("check", even, *LITTLE, *TWO, "--gpus", 2, "--json")[1])
    assert [row["system"] for row in found["systems"]] == ["plain-4d", "best"]
    assert found["left_out"] == {}
    out = wlb("check", even, *LITTLE, *TWO, "--gpus", 2)[1]
    assert "elastic" not in out
    for wrong in ("plain-4d,wrost", "wrost", "plain-4d,"):
        status, out, err = wlb("check", even, *LITTLE, "--gpus", 2, "--systems", wrong)
        assert (status, out) == (2, "")
        assert "preset 'wrost' is unknown; choose from" in err or "--systems 'plain-4d,' has an empty name" in err
        assert err.count("\n") == 1


def test_a_system_that_cannot_run_the_job_is_left_out_and_says_why(wlb, tmp_path):
    (tmp_path / "images.json").write_text(json.dumps([{"length": 2000, "image_tokens": 40}] * 60))
    asked = ("check", tmp_path / "images.json", *LITTLE, "--gpus", 1, "--systems")
    out = wlb(*asked, "plain-4d,elastic")[1]
    assert "elastic is left out: packing method 'elastic' does not know phases (language model, image)" in out
    found = json.loads(wlb(*asked, "plain-4d,elastic", "--json")[1])
    assert [row["system"] for row in found["systems"]] == ["plain-4d"]
    assert [*found["left_out"]] == ["elastic"]
    status, out, err = wlb(*asked, "elastic")
    assert (status, out) == (2, "")
    assert "'elastic' does not know phases" in err


def test_the_layout_that_is_given_is_said_with_whether_it_fits(wlb, even):
    asked = ("check", even, *LITTLE, *TWO)
    assert "simulated, each system in its own fastest layout: 1 step in each of 3 draws" in wlb(*asked, "--gpus", 2)[1]
    partly = wlb(*asked, "--gpus", 2, "--pp", 1)[1]
    assert "simulated, each system in its own fastest layout of pp 1: 1 step" in partly
    partly = wlb(*asked, "--pp", 2)[1]
    assert "64 GPUs (--gpus)" in partly
    assert "fastest layout of pp 2: 1 step" in partly
    given = wlb(*asked, "--dp", 1, "--pp", 1, "--cp", 1, "--tp", 1)[1]
    assert "simulated, all in the layout given: 1 step" in given
    assert "over the memory of these GPUs" not in given
    large = wlb(
        "check",
        even,
        "--context-window",
        "4K",
        "--model",
        "70b",
        *TWO,
        *("--dp", 1, "--cp", 1, "--tp", 8, "--pp", 1, "--steps", 1),
    )[1]
    assert "plain-4d, best: over the memory of these GPUs; the figures assume that they fit" in large


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of texts, in the working directory."""
    monkeypatch.chdir(tmp_path)
    parquet.write_table(arrow.table({"id": [*range(len(TEXTS))], "text": TEXTS}), "d.parquet")
    Path("d.json").write_text(json.dumps(TEXTS))
    Path("d.txt").write_text("".join(text.replace("\n", " ") + "\n" for text in TEXTS))
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(TEXTS):
        Path(f"folder/{number}.txt").write_text(text)
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "e"}] for text in TEXTS]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


@pytest.mark.parametrize(
    ("given", "options"),
    [("d.parquet", ()), ("d.txt", ("--documents", "lines")), ("chats.jsonl", ("--chat",))],
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
            ["d.parquet", *SMALL, "--text-field", "body"],
            "d.parquet has no column 'body', only id, text; choose one with --text-f",
        ),
        (
            ["chats.jsonl", *SMALL],
            "3 missing field; the first entry without field 'text' has messages; choose one with",
        ),
        (
            ["d.parquet"],
            "has no column 'length'; it has id, text; if it is text, count its tok",
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
