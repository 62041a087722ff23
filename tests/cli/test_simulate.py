"""``wlb simulate`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LENGTHS = "synthetic:3000:4096:0"


def wlb(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "wlb", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text('[data]\nstore = "corpus"\n[parallel]\npp = 2\ndp = 2\n[packing]\nmicro_batches = 8\n')
    return path


def test_a_configuration_is_simulated_beside_plain_4d(config: Path, tmp_path: Path):
    trace = tmp_path / "trace.json"
    result = wlb(
        "simulate", config, "--lengths", LENGTHS, "--steps", "4", "--hardware", "cpu", "--trace", trace, "--json"
    )
    assert result.returncode == 0, result.stderr
    systems = json.loads(result.stdout)["systems"]
    assert [row["system"] for row in systems] == ["as configured", "plain-4d"]
    for row in systems:
        assert row["gpus"] == 4
        assert sum(row["where"].values()) == pytest.approx(row["mean_step_seconds"])
    rates = [row["work_seconds"] / (row["steps"] * row["mean_step_seconds"]) for row in systems]
    assert [row["speed_at_equal_work"] for row in systems] == pytest.approx([rates[0] / rates[1], 1.0])
    assert len(json.loads(trace.read_text())["traceEvents"]) > 8 * 2 * 2


def test_a_named_job_prints_where_the_time_goes():
    result = wlb("simulate", "7b-64k", "--lengths", "synthetic:3000:65536:0", "--steps", "2", "--systems", "wlb-llm")
    assert result.returncode == 0, result.stderr
    for expected in ("32 GPUs", "bubbles", "tp collectives", "simulated (h100)"):
        assert expected in result.stdout
    assert result.stdout.index("speed at equal work") < result.stdout.index("tokens/s")


def test_the_search_says_why_the_winner_wins():
    size = ["--gpus", "2", "--model", "tiny", "--context-window", "4096", "--batch-tokens", "16384"]
    result = wlb("simulate", "--search", *size, "--lengths", LENGTHS, "--steps", "1")
    assert result.returncode == 0, result.stderr
    assert "the runner-up" in result.stdout
    assert "plain-4d in its layout" in result.stdout
    assert "makespan, L_max 1.5, arranged, hybrid" in result.stdout
    assert "…" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a configuration file or a job"),
        (["--search"], "--search needs --gpus"),
        (["8b-128k"], "no .toml file and no named job"),
        (["7b-128k", "--set", "parallel.pp=2"], "a named job has none"),
        (["7b-128k", "--schedule", "1f2b"], "unknown pipeline schedule '1f2b'"),
        (["7b-128k", "--trace", "missing/trace.json"], "directory missing"),
        (["missing.toml"], "missing.toml does not exist"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str):
    result = wlb("simulate", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
