"""The planners benchmark runs with those that are installed, and ours keeps the limit."""

import json
from pathlib import Path

from studies.benchmarks import planners


def test_planners_are_compared_with_those_installed(tmp_path: Path):
    out = tmp_path / "planners.json"
    planners.main(["--repetitions", "1", "--documents", "64", "--ranks", "2", "--out", str(out)])
    ours = json.loads(out.read_text())["steps"][0]
    assert ours["planner"] == "wlb"
    assert ours["over_limit"] <= 1
    assert ours["lock_step"] < 1.1
