"""``wlb check``: what it says of which systems, what it counts of text, and what it refuses."""

import json
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.cases import in_turn
from tests.cli.conftest import printed, printed_both, refusal, run
from wlb.errors import UserError
from wlb.simulate.estimate import fastest

SMALL = ("--tokenizer", "bytes", "--model", "tiny", "--hardware", "cpu", "--gpus", 1, "--context-window", "4K")
TEXTS = ["a" * 3000, "b\nc", "d" * 9000]


LITTLE = ("--model", "tiny", "--hardware", "cpu", "--context-window", "4K", "--batch-tokens", "16K", "--steps", 1)
TWO = ("--systems", "plain-4d,balanced")


@pytest.fixture
def even(tmp_path: Path) -> Path:
    """Documents of one length, from which no preset gains anything."""
    path = tmp_path / "even.json"
    path.write_text(json.dumps([4096] * 24))
    return path


def test_where_little_is_gained_one_keeps_what_one_has(even):
    out, found = printed_both("check", even, *LITTLE, "--gpus", 1)
    assert out.startswith(f"read {even}: 24 documents, 98,304 tokens; median 4,096, longest 4,096;")
    assert "\nKeep what you have: no preset gains 5% in every shuffle.\n" in out
    assert "preset =" not in out
    assert "GPU-hours" not in out
    assert (found["winner"], found["config"], found["gpu_hours_a_day"]) == ("plain-4d", "", 0)
    assert [row["system"] for row in found["systems"]] == ["plain-4d", "per-document-4d", "balanced"]


def test_only_the_systems_that_are_named_are_compared(even):
    found = json.loads(printed("check", even, *LITTLE, *TWO, "--gpus", 2, "--json"))
    assert [row["system"] for row in found["systems"]] == ["plain-4d", "balanced"]
    assert found["left_out"] == {}
    unknown = refusal("check", even, *LITTLE, "--gpus", 2, "--systems", "plain-4d,wrost")
    assert "preset 'wrost' is unknown; choose from" in unknown


def test_a_system_that_cannot_run_the_job_is_left_out_and_says_why(even, monkeypatch):
    def searched(space, system, lengths, told):
        if system == "balanced":
            raise UserError("no pool has room")
        return fastest(space, system, lengths)

    monkeypatch.setattr("wlb.simulate.estimate.fastest", searched)
    asked = ("check", even, *LITTLE, "--gpus", 1, "--systems")
    out, found = printed_both(*asked, "plain-4d,balanced")
    assert "balanced is left out: no pool has room" in out
    assert [row["system"] for row in found["systems"]] == ["plain-4d"]
    assert found["left_out"] == {"balanced": "no pool has room"}
    alone = run(*asked, "balanced")
    assert (alone.returncode, alone.stdout, alone.stderr) == (2, "", "wlb: error: no pool has room\n")
    named = run("simulate", "550m-64k", "--steps", 1, "--systems", "plain-4d,balanced", "--json")
    assert [row["system"] for row in json.loads(named.stdout)["systems"]] == ["plain-4d"]
    assert "wlb: warning: balanced is left out: no pool has room" in named.stderr


def test_the_layout_that_is_given_is_said_with_whether_it_fits(even):
    asked = ("check", even, *LITTLE, *TWO)
    assert "); each system in its own fastest layout; 1 step per shuffle" in printed(*asked, "--gpus", 2)
    partly = printed(*asked, "--gpus", 2, "--pp", 1)
    assert "each system in its own fastest layout with pp 1; 1 step" in partly
    partly = printed(*asked, "--dp", 2, "--pp", 2, "--tp", 1)
    assert "--gpus 64" in partly
    assert "fastest layout with dp 2, pp 2, tp 1; 1 step" in partly
    given = printed(*asked, "--dp", 1, "--pp", 1, "--cp", 1, "--tp", 1)
    assert "every system in the given layout, except plain-4d tuned and balanced tuned; 1 step" in given
    assert "does not fit the memory" not in given
    sizes = ("--dp", 1, "--cp", 1, "--tp", 2, "--pp", 1, "--steps", 1)
    large = printed("check", even, "--context-window", "4K", "--model", "70b", *TWO, *sizes)
    assert "over the memory of these GPUs, which the figures ignore: plain-4d, balanced" in large


def test_a_job_that_runs_today_is_described_by_its_layout_weights_recomputation_and_micro_batches():
    sizes = ("--dp", 2, "--cp", 2, "--pp", 1, "--tp", 1)
    asked = (
        "check",
        "synthetic:1500:4K:0",
        "--model",
        "550m",
        "--context-window",
        "4K",
        "--batch-tokens",
        "64K",
        *sizes,
    )
    settings = ("--recompute", "full", "--sharding", "gathered", "--micro-batch-tokens", "8K", "--steps", 1)
    table, found = printed_both(*asked, *settings)
    rows = {row["system"]: row for row in found["systems"]}
    assert [*rows] == ["plain-4d", "plain-4d kept", "plain-4d tuned", "per-document-4d", "balanced", "balanced tuned"]
    for name in ("plain-4d", "per-document-4d", "balanced"):
        assert [rows[name]["layout"][size] for size in ("dp", "cp", "pp", "tp")] == [2, 2, 1, 1]
        assert rows[name]["activation_checkpointing"] == "full"
    assert rows["plain-4d"]["layout"]["rank_micro_batches"] == 4  # of two windows each
    assert 1 < rows["plain-4d kept"]["speedup"] < rows["plain-4d tuned"]["speedup"]
    assert [rows[name]["weights"] for name in ("plain-4d", "plain-4d kept")] == ["gathered", "kept"]
    assert "less recomputation" in found["verdict"]
    assert [line.split()[1:4] for line in table.splitlines() if line.startswith(" weights")] == [
        ["gathered", "kept", "kept"]
    ]
    for option, value in (("--recompute", "some"), ("--sharding", "zero")):
        assert f"{option} '{value}' is unknown; " in refusal(*asked, option, value)
    said = refusal(*asked, "--micro-batch-tokens", "6K")
    assert said == "--micro-batch-tokens 6144 is no multiple of the context window, 4096 tokens; give 4096"


def test_layouts_are_called_host_bound_where_kernels_take_no_longer_than_their_launches():
    asked = ("check", "synthetic:1500:4K:0", "--batch-tokens", "64K", "--gpus", 2, "--pp", 1, *TWO, "--steps", 1)
    assert "host-bound: a block takes a GPU (plain-4d 0." in printed(*asked, "--model", "tiny")
    assert "host-bound" not in printed(*asked, "--model", "7b")
    assert "priced by counting" not in printed(*asked, "--model", "7b")


def test_a_hybrid_is_checked_from_its_config_json_and_said_to_be_rough(tmp_path):
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "mamba_d_ssm": 512,
        "mamba_n_heads": 8,
        "mamba_d_state": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon_h1"} | sizes), encoding="utf-8")
    asked = ("check", "synthetic:1500:4K:0", "--batch-tokens", "64K", "--gpus", 2, "--pp", 1, *TWO, "--steps", 1)
    assert "linear layers: priced by counting, and hardly measured" in printed(*asked, "--model", tmp_path)


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
def test_every_kind_of_text_is_counted_and_the_same_is_prepared(texts, given, options):
    out, checked = printed_both("check", given, *SMALL, *options)
    following = out.splitlines()[-1].removeprefix("next: wlb ").split()
    assert sorted(following) == sorted(["prepare", given, "--tokenizer", "bytes", *options, "--out", "corpus"])
    printed(*following)
    stored = json.loads(printed("check", "corpus", *SMALL[2:], "--json"))
    assert {**checked, "config": ""} == {**stored, "config": ""}


@in_turn(
    ("arguments", "message"),
    [
        (["d.txt", *SMALL], "d.txt has several lines; give --documents lines if each is a document, or --documents f"),
        (["d.parquet", *SMALL, "--text-field", "body"], "d.parquet has no column 'body', only id, text; choose one"),
        (["chats.jsonl", *SMALL], "3 missing field; the first entry without the field 'text' has: messages; choose on"),
        (
            ["d.parquet"],
            "has no column 'length' (--length-column names another), but id, text; if it is text, count its tok",
        ),
        (["folder"], "if it is text, count its tokens with: wlb check folder --tokenizer bytes, or store them with: "),
        (["d.json", "--text-field", "body"], "--text-field needs --tokenizer"),
    ],
)
def test_mistakes_are_one_line(texts, arguments, message):
    assert message in refusal("check", *arguments)
