"""``wlb simulate`` as a user runs it."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cases import in_turn
from tests.cli.conftest import printed, refusal
from tests.cli.conftest import run as wlb
from wlb.documents.store.reader import TokenStoreWriter
from wlb.errors import UserError
from wlb.job.job import Job

LENGTHS = "synthetic:3000:4096:0"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text('[data]\nstore = "corpus"\n[parallel]\npp = 2\ndp = 2\n[packing]\nglobal_batch = 8\n')
    return path


def test_a_configuration_is_simulated_beside_plain_4d(config: Path, tmp_path: Path):
    trace = tmp_path / "trace.json"
    asked = ("--lengths", LENGTHS, "--steps", "4", "--hardware", "cpu", "--trace", trace)
    systems = json.loads(printed("simulate", config, *asked, "--json"))["systems"]
    assert [row["system"] for row in systems] == ["as configured", "plain-4d"]
    for row in systems:
        assert row["gpus"] == 4
        assert sum(row["where"].values()) == pytest.approx(row["mean_step_seconds"])
    rates = [row["work_seconds"] / (row["steps"] * row["mean_step_seconds"]) for row in systems]
    assert [row["speed_at_equal_work"] for row in systems] == pytest.approx([rates[0] / rates[1], 1.0])
    events = json.loads(trace.read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["as configured dp 0", "as configured dp 1", "plain-4d dp 0", "plain-4d dp 1"]


def test_a_preset_that_is_configured_is_one_column(config: Path):
    out = printed("simulate", config, "--set", "preset=plain-4d", "--lengths", LENGTHS, "--steps", "1")
    assert "as configured" in out
    (row,) = (line for line in out.splitlines() if line.lstrip().startswith("speedup  "))
    assert row.count("x") == 1


def test_a_mixture_is_simulated_on_the_lengths_of_its_stores(tmp_path: Path):
    for name, length in (("short", 100), ("long", 4000)):
        with TokenStoreWriter(tmp_path / name, vocab_size=50) as writer:
            for _ in range(300):
                writer.add(np.zeros(length, np.int64))
    path = tmp_path / "job.toml"
    tables = [
        f'[[data.mixture]]\nstore = "{tmp_path / name}"\nweight = {weight}\n'
        for name, weight in (("short", 1), ("long", 3))
    ]
    path.write_text("".join(tables))
    shown = json.loads(printed("simulate", path, "--steps", "10", "--hardware", "cpu", "--json"))
    assert shown["lengths"] == f"{tmp_path / 'short'} + {tmp_path / 'long'}"
    plain = shown["systems"][1]
    assert (plain["steps"], plain["tokens"]) == (30, 30 * 4 * 4096)  # in three draws
    assert plain["epochs"] == 4  # of the smaller store, with 16 warm-up steps
    told = printed("simulate", path, "--steps", "10", "--hardware", "cpu")
    assert "Small corpus: documents reused up to 4 times; treat the result as rough." in told


def test_a_named_job_prints_where_the_time_goes():
    out = printed("simulate", "7b-64k", "--lengths", "synthetic:3000:65536:0", "--steps", "2", "--systems", "wlb-llm")
    for expected in ("32 GPUs", "compute", "imbalance: GPUs", "simulated (h100)"):
        assert expected in out
    assert out.index("speedup") < out.index("tokens/s")


def test_a_configuration_that_gains_little_is_no_reason_to_keep_something_else(config: Path):
    asked = ["--set", "preset=per-document-4d", "--lengths", LENGTHS, "--steps", "1", "--hardware", "cpu"]
    out = printed("simulate", config, *asked)
    assert "\nKeep what you have: no system gains 5% in every shuffle" in out


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A configuration whose token store has an empty document and 300 tokens in its vocabulary."""
    with TokenStoreWriter(tmp_path / "store", vocab_size=300) as writer:
        for length in (5, 0, 7):
            writer.add([1] * length)
    path = tmp_path / "trained.toml"
    path.write_text(f"[data]\nstore = {json.dumps(str(tmp_path / 'store'))}\ncontext_window = 16\n")
    return path


def test_the_store_and_a_pretrained_model_say_what_is_simulated(trained: Path, tmp_path: Path, monkeypatch):
    asked: list[tuple[Job, list[NDArray[np.int64]]]] = []

    def judge(_: object, job: Job, lengths: list[NDArray[np.int64]], *__: object, **___: object) -> None:
        asked.append((job, lengths))
        raise UserError("this is enough")

    monkeypatch.setattr("wlb.simulate.estimate.judge_config", judge)
    refusal("simulate", trained)
    ((job, (lengths,)),) = asked
    assert job.shape.vocab_size == 300
    assert lengths.tolist() == [5, 0, 7]  # the order of documents counts the empty ones
    refused = refusal("simulate", trained, "--set", "model.vocab_size=200")
    assert refused == "model.vocab_size = 200 is below the 300 of the token store; raise it"
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    document = {"model_type": "llama", "vocab_size": 320, "tie_word_embeddings": True, **shape}
    (tmp_path / "config.json").write_text(json.dumps(document))
    pretrained = ("simulate", trained, "--set", f"model.pretrained={tmp_path}")
    refusal(*pretrained)
    job, _ = asked[-1]
    assert (job.shape.layers, job.shape.vocab_size, job.tied_embeddings) == (2, 320, True)
    assert "model.layers = 3, but" in refusal(*pretrained, "--set", "model.layers=3")


def test_a_job_that_the_trainer_refuses_is_simulated_with_a_warning(tmp_path: Path):
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "70b"\n[data]\nstore = "corpus"\ncontext_window = 131072\n[parallel]\ntp = 8\n')
    asked = ["--lengths", "synthetic:400:128K:0", "--steps", "1", "--json"]
    result = wlb("simulate", job, *asked)
    assert result.returncode == 0, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("wlb: warning: as configured: with micro-batches of 131072 tokens a process needs up to ")
    assert line.endswith("; plain-4d does not fit either")
    assert len(json.loads(result.stdout)["systems"]) == 2


@in_turn(
    ("arguments", "message"),
    [
        ([], "Missing argument 'JOB'"),
        (["8b-128k"], "neither a .toml file nor a named job"),
        (["7b-128k", "--set", "parallel.pp=2"], "a named job has none"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str):
    assert message in refusal("simulate", *arguments)
