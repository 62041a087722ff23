"""``wlb profile`` as a user runs it."""

import json
import os
from pathlib import Path

import pytest

from tests.cases import in_turn
from tests.cli.conftest import printed, refusal
from wlb.workload.profile import read_profile


@pytest.fixture(autouse=True)
def _one_round(monkeypatch):
    """Accuracy is tested in ``tests/profiling``."""
    monkeypatch.setattr("wlb.profiling.measure._QUICK_ROUNDS", 1)


def test_profile_writes_what_check_reads(tmp_path: Path):
    out = tmp_path / "profile.json"
    asked = ("--quick", "--max-length", "256", "--out", out)
    report = json.loads(printed("profile", *asked, "--json"))
    assert set(report["accuracy"]) == set(report["crossover_tokens"]) == {"profile", "cpu preset"}
    for rows in report["accuracy"].values():
        assert [row["shapes"] for row in rows] == ["documents", "pieces of documents", "micro-batches"]
        assert all(0 <= row["median"] <= row["worst"] for row in rows)
    assert read_profile(out).machine == report["machine"]
    assert os.listdir(tmp_path) == ["profile.json"]

    job = ("--context-window", "256", "--steps", "1", "--systems", "plain-4d", "--profile", out)
    check = ("check", "synthetic:500:256:0", *job)
    assert "profile tiny" in " ".join(printed(*check, "--gpus", "1").split())
    assert " in the given layout" in " ".join(printed(*check, "--dp", "2", "--cp", "2", "--pp", "1").split())
    assert "--tp 2: the profile has tp = 1; leave --tp out" in refusal(*check, "--tp", "2")


def test_the_table_names_the_clock_and_the_crossover(tmp_path: Path):
    out = printed("profile", "--quick", "--max-length", "256", "--tp", "2", "--out", tmp_path / "profile.json")
    for text in ("process CPU time", "micro-batches", "attention costs as much as everything else"):
        assert text in " ".join(out.split())


@in_turn(
    ("arguments", "message"),
    [
        (["--out", "p.json", "--max-length", "8"], "--max-length 8 is below 256 tokens"),
        (["--out", "p.json", "--max-length", "5M"], "--max-length 5242880 is over 4194304 tokens"),
        (["--out", "p.json", "--threads", "1025"], "--threads"),
        (["--out", "p.json", "--tp", "3"], "--tp 3 does not divide the model's heads = 4"),
        (["--out", "p.json", "--model", "huge"], "unknown model 'huge'"),
        (["--out", "p.json", "--dtype", "int8"], "'int8' is not one of"),
        (["--out", "p.json", "--device", "cuda"], "--device cuda: PyTorch finds no GPU"),
        (
            ["--out", "p.json", "--model", "mixtral-8x7b"],
            "a profile times dense blocks, and the model has experts; name a dense model",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert message in refusal("profile", *arguments)
