"""The benchmark of other stacks trains as they do and as the examples do, on two processes."""

import importlib.util
import json
from pathlib import Path

import pytest

from studies.benchmarks.adoption import critical_path
from tests.programs import finished


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_small_run_trains_in_every_way(tmp_path: Path):
    out = tmp_path / "adoption.json"
    small = ["--stacks", "own_lists", "--turns", "1", "--documents", "32", "--context-window", "512"]
    done = finished("-m", "studies.benchmarks.adoption", *small, "--out", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == ["random", "best fit", "lock step", "own lists"]
    assert all(row["seconds"] > 0 for row in rows)
    assert "own lists" in done.stdout


def test_ranks_wait_for_each_other_where_they_share_a_micro_batch_and_nowhere_else():
    both = (0, 1)
    assert critical_path([[((), 1.0), ((), 2.0)], [((), 2.5)]]) == 3.0
    assert critical_path([[(both, 1.0), ((), 2.0)], [((), 1.5), (both, 2.0)]]) == 5.5
