"""``wlb compare --prefill`` as a user runs it."""

import json
import subprocess
import sys

import pytest

PREFILL = ["synthetic:300:16384:0", "--prefill", "--model", "550m"]


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wlb", "compare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_json_has_every_method_and_setting():
    result = compare(*PREFILL, "--token-budget", "2048", "--dp", "4", "--load", "0.7", "--seed", "3", "--json")
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    assert [row["method"] for row in output["methods"]] == ["count", "tokens", "workload", "workload:shortest"]
    assert output["arrivals_per_second"] > 0
    assert (output["prompts"], output["dp"], output["pp"], output["seed"]) == (300, 4, 1, 3)
    assert all(row["p50_seconds"] <= row["p99_seconds"] for row in output["methods"])


def test_table_names_the_setting():
    result = compare(*PREFILL, "--token-budget", "16384", "--whole", "--independent", "--methods", "tokens,workload")
    assert result.returncode == 0, result.stderr
    assert "all at once" in result.stdout
    assert "chunked prefill off" in result.stdout
    assert "independent" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--prefill needs --token-budget"),
        (["--token-budget", "2048", "--whole"], "over the token budget 2048"),
        (["--token-budget", "2048", "--methods", "sequential"], "'sequential' is unknown"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str):
    result = compare(*PREFILL, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
