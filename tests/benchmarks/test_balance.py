"""The benchmark of ``wlb.balance`` runs without verl, and ours is never the less even one."""

import json
from pathlib import Path

from tests.programs import finished

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "balance.py"


def test_small_run_compares_on_equal_terms(tmp_path):
    out = tmp_path / "balance.json"
    small = ["--repetitions", "2", "--most-documents", "64", "--out", str(out)]
    done = finished(BENCHMARK, *small)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert "Karmarkar-Karp" in results["peer"]
    assert len(results["rows"]) == 8
    assert all(row["cases_less_even"] == 0 for row in results["rows"])
    assert all(row["our_over_even"] <= row["peer_over_even"] for row in results["rows"])


def test_planners_are_compared_with_those_installed(tmp_path):
    out = tmp_path / "planners.json"
    small = ["--repetitions", "1", "--documents", "64", "--ranks", "2", "--out", str(out)]
    done = finished(BENCHMARK.with_name("planners.py"), *small)
    assert done.returncode == 0, done.stderr
    ours = json.loads(out.read_text())["rows"][0]
    assert ours["planner"] == "wlb"
    assert ours["over_limit"] <= 1
    assert ours["lock_step"] < 1.1
