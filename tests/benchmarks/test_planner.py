"""The planner benchmark runs on few steps, loses no question, and knows a point that is not covered."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"

SMALL = (
    *("--context-window", "4096", "--length-factors", "1.5", "--timed", "4", "8"),
    *("--solver-steps", "1", "--time-limit", "0.1"),
)

PROBE = """
from parts.curves import Point, violations
def point(packer, delay, imbalance):
    return Point(packer, 1.5, {}, delay, 0, imbalance, 1.1, 0.0)
ours = [point("makespan", 0.0, 1.2), point("makespan", 0.2, 1.01)]
others = [point("variable_length", 0.1, 1.1), point("variable_length", 0.3, 1.02), point("sequential", 0.0, 1.1)]
print([(v.cost, v.point.packer, v.reached, v.why) for v in violations("", ours, others)])
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=BENCHMARKS)


def test_a_small_run_answers_every_question(tmp_path):
    out = tmp_path / "planner.json"
    finished = run("planner.py", *SMALL, "--steps", "6", "--corpora", "synthetic", "--out", str(out))
    assert finished.returncode == 0, finished.stderr
    results = json.loads(out.read_text())
    packers = {point["packer"] for point in results["corpora"][0]["points"]}
    assert packers == {"makespan", "variable_length", "sequential"}
    assert [row["micro_batches"] for row in results["planning"]] == [4, 8]
    assert results["placement"]["over_bound_mean"] >= results["placement"]["over_best_mean"] >= 0
    assert "makespan is worse at the same delay in" in finished.stdout
    assert str(tmp_path) not in out.read_text(), "results name no paths"


# The run above again, on lengths from a file.
@pytest.mark.exhaustive
def test_given_lengths_are_packed_instead_of_the_corpora(tmp_path):
    source, out = tmp_path / "lengths.json", tmp_path / "planner.json"
    source.write_text(json.dumps([4096, 100, 2000, 300] * 40))
    finished = run("planner.py", *SMALL, "--lengths", str(source), "--out", str(out))
    assert finished.returncode == 0, finished.stderr
    assert [corpus["corpus"] for corpus in json.loads(out.read_text())["corpora"]] == ["given lengths, 4 micro-batches"]


def test_a_point_is_covered_by_one_of_no_more_delay_and_cost():
    finished = run("-c", PROBE)
    assert finished.stdout.strip() == (
        "[('imbalance', 'variable_length', 1.2, ''), ('imbalance', 'sequential', 1.2, 'cuts documents')]"
    )


def test_an_unknown_corpus_is_one_line():
    finished = run("planner.py", "--corpora", "novels")
    assert finished.returncode == 2
    assert finished.stderr.count("\n") == 1
