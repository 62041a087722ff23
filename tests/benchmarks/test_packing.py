"""The packing benchmark runs without its peers, loses no document, and writes what it prints."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

SMALL: dict[str, list[float]] = {
    "--documents": [600],
    "--context-window": [4096],
    "--turns": [1],
    "--scaling": [2, 4],
    "--solver-steps": [1],
    "--oracle-steps": [2],
    "--time-limit": [0.1],
    "--memory-steps": [4, 8],
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "packing.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_small_run_reports_every_section(tmp_path):
    out = tmp_path / "results" / "packing.json"
    small = [text for option, values in SMALL.items() for text in (option, *map(str, values))]
    finished = run(*small, "--out", str(out))
    assert finished.returncode == 0, finished.stderr
    results = json.loads(out.read_text())
    rows = {row["method"]: row for row in results["balance"]}
    assert all(row["every_document_whole"] for row in rows.values())
    assert rows["sequential (plain-4D)"]["documents_out"] == 600
    assert rows["fixed_greedy, window 1"]["longest_micro_batch_tokens"] <= 4096
    assert rows["variable_length, 0 queues"]["mean_token_delay"] == 0
    assert any("next fit" in name for name in rows)
    assert [row["micro_batches"] for row in results["scaling"]] == [2, 4]
    assert results["oracle"]["steps"] == 2
    assert results["oracle"]["over_bound_mean"] >= results["oracle"]["over_best_mean"] >= 0
    assert [row["steps"] >= wanted for row, wanted in zip(results["memory"], (4, 8), strict=True)] == [True, True]
    assert str(tmp_path) not in out.read_text(), "results name no paths"


def test_missing_lengths_are_one_line():
    finished = run("--lengths", "absent.json")
    assert finished.returncode == 2
    assert finished.stderr.count("\n") == 1
    assert "absent.json does not exist" in finished.stderr
