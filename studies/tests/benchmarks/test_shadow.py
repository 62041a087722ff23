"""The benchmark of shadow mode predicts a gain and measures it, on two processes."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.programs import finished


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_a_small_run_predicts_and_measures(tmp_path: Path):
    out = tmp_path / "shadow.json"
    small = ["--stacks", "own_lists", "--turns", "1", "--documents", "32", "--context-window", "256"]
    done = finished("-m", "studies.benchmarks.shadow", *small, "--out", out)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["stack"] == "FSDP2"
    assert row["speed"] > 0
    assert row["predicted"] > 0 or row["r_squared"] < 0.5  # where shadow mode claims none
