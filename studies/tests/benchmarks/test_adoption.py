"""The benchmark of other stacks trains as they do and as the examples do, on two processes."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.programs import finished


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_small_run_trains_both_ways(tmp_path: Path):
    out = tmp_path / "adoption.json"
    small = ["--stacks", "torch_loop", "--turns", "1", "--documents", "32", "--context-window", "512"]
    done = finished("-m", "studies.benchmarks.adoption", *small, "--out", out)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["theirs"] > 0 < row["ours"]
    assert row["example"] in done.stdout
