"""``wlb-studies sharding`` as a user runs it."""

import json
from pathlib import Path

import pytest

from studies.tests.cli.conftest import studies

SYNTHETIC = "synthetic:2000:131072:0"
SIZE = ["--context-window", "131072", "--cp", "4"]


def test_strategies_are_compared_on_the_same_micro_batches():
    result = studies("sharding", SYNTHETIC, *SIZE, "--samples", "10", "--json")
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    rows = {row["strategy"]: row for row in output["strategies"]}
    assert list(rows) == ["per_sequence", "per_document", "adaptive", "balanced"]
    for row in rows.values():
        assert row["micro_batches"] == output["samples"] == 10
        assert 0 <= row["kv_gather_fraction"] <= 1
        assert min(row["attention_imbalance"], row["latency_imbalance"], row["token_imbalance"]) >= 1
        assert row["planning_ms"] > 0
    assert rows["per_document"]["attention_imbalance"] <= 1.002 < rows["per_sequence"]["attention_imbalance"]
    assert rows["per_document"]["token_imbalance"] == rows["per_sequence"]["token_imbalance"] == 1
    assert rows["balanced"]["kv_gather_fraction"] < rows["per_document"]["kv_gather_fraction"]
    assert rows["balanced"]["slowest_seconds"] <= rows["adaptive"]["slowest_seconds"]
    assert rows["adaptive"]["slowest_seconds"] <= rows["per_document"]["slowest_seconds"]
    assert sum(rows["adaptive"]["chosen"].values()) == pytest.approx(1)
    assert rows["balanced"]["chosen"] is None


def test_the_seed_draws_the_micro_batches(tmp_path: Path):
    def balance(seed: int) -> list[float]:
        arguments = ["--samples", "3", "--strategies", "per_sequence", "--seed", str(seed), "--json"]
        rows = json.loads(studies("sharding", SYNTHETIC, *SIZE, *arguments).stdout)["strategies"]
        return [row["attention_imbalance"] for row in rows]

    assert balance(0) == balance(0) != balance(1)


def test_table_and_picture(tmp_path: Path):
    picture = tmp_path / "ranks.png"
    result = studies(
        "sharding", SYNTHETIC, *SIZE, "--samples", "2", "--strategies", "per_document,balanced", "--plot", picture
    )
    assert result.returncode == 0, result.stderr
    assert "per_document" in result.stdout
    assert "2 micro-batches" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", *SIZE], "missing.json"),
        ([SYNTHETIC, *SIZE, "--strategies", "ring"], "'ring' is unknown"),
        ([SYNTHETIC, "--context-window", "131072"], "--cp"),
        ([SYNTHETIC, "--context-window", "131072", "--cp", "0"], "--cp"),
        ([SYNTHETIC, "--context-window", "1000000000", "--cp", "2"], "give more documents"),
        ([SYNTHETIC, *SIZE, "--model", "8t"], "8t"),
        ([SYNTHETIC, *SIZE, "--samples", "1", "--plot", "no/such/folder/picture.png"], "picture.png"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_two(arguments: list[str], message: str):
    result = studies("sharding", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
