"""``wlb profile`` as a user runs it."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import run as started
from wlb.profiling.timing import Effort
from wlb.workload.profile import read_profile


@pytest.fixture(autouse=True)
def _one_round(monkeypatch):
    """Accuracy is tested in ``tests/profiling``."""
    monkeypatch.setattr("wlb.profiling.measure._QUICK_EFFORT", Effort(0.0, fewest_rounds=1))


def test_profile_writes_what_compare_reads(tmp_path: Path):
    out, picture = tmp_path / "profile.json", tmp_path / "profile.png"
    result = started("profile", "--quick", "--max-length", "256", "--out", out, "--plot", picture, "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert set(report["accuracy"]) == set(report["crossover_tokens"]) == {"profile", "cpu preset"}
    for rows in report["accuracy"].values():
        assert [row["shapes"] for row in rows] == ["documents", "pieces of documents", "micro-batches"]
        assert all(0 <= row["median"] <= row["worst"] for row in rows)
    assert read_profile(out).machine == report["machine"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["profile.json", "profile.png"]

    size = ["--context-window", "256", "--micro-batches", "4"]
    compared = started(
        "compare", "synthetic:500:256:0", *size, "--profile", out, "--methods", "variable_length", "--json"
    )
    assert compared.returncode == 0, compared.stderr
    assert json.loads(compared.stdout)["workload"] == {"profile": "tiny", "hardware": "h100"}


def test_the_table_names_the_clock_and_the_crossover(tmp_path: Path):
    result = started("profile", "--quick", "--max-length", "256", "--tp", "2", "--out", tmp_path / "profile.json")
    assert result.returncode == 0, result.stderr
    for text in ("process CPU time", "micro-batches", "attention costs as much as everything else"):
        assert text in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "missing/profile.json"], "directory missing of missing/profile.json does not exist"),
        (["--out", "/"], "/ is a directory"),
        (["--out", "p.json", "--max-length", "8"], "--max-length 8 is below 256 tokens"),
        (["--out", "p.json", "--max-length", "5M"], "--max-length 5242880 is over 4194304 tokens"),
        (["--out", "p.json", "--threads", "1025"], "--threads"),
        (["--out", "p.json", "--plot", "p.foo"], "picture p.foo must end in one of"),
        (["--out", "p.json", "--tp", "3"], "--tp 3 does not divide the model's heads = 4"),
        (["--out", "p.json", "--model", "huge"], "unknown model 'huge'"),
        (["--out", "p.json", "--dtype", "int8"], "'int8' is not one of"),
        pytest.param(
            ["--out", "p.json", "--device", "cuda"],
            "--device cuda: PyTorch finds no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, wlb):
    status, out, err = wlb("profile", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
