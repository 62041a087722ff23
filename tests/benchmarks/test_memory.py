"""The memory benchmark measures real processes and finds the prediction within 15%."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the high-water mark in /proc")

BENCHMARK = ("-m", "benchmarks.memory")
CASES = ("pp 2, keep_attention",)  # the whole table is one command; a case takes ten seconds


# tests/job/memory holds blocks to the byte, and tests/training/order whole ranks.
@pytest.mark.exhaustive
def test_predictions_are_within_fifteen_percent_of_what_processes_hold(tmp_path):
    out = tmp_path / "memory.json"
    chosen = [argument for case in CASES for argument in ("--only", case)]
    finished = subprocess.run(
        [sys.executable, *BENCHMARK, "--layers", "4", "--tokens", "512", *chosen, "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == list(CASES)
    for row in rows:
        assert abs(row["error"]) < 0.15, row
        assert row["name"] in finished.stdout
