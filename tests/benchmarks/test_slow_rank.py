"""The benchmark of a slowed rank runs all of its jobs to their end."""

import json
import sys

import pytest

from benchmarks import slow_rank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="keeps each process on a core of its own")


# tests/training/test_trainer.py::test_a_job_plans_by_what_it_measures_and_resumes_to_the_bit holds what they do.
@pytest.mark.exhaustive
def test_all_jobs_are_measured(tmp_path):
    out = tmp_path / "slow.json"
    assert slow_rank.main(["--steps", "2", "--every", "1", "--turns", "1", "--out", str(out)]) == 0
    assert [row["calibrate"] for row in json.loads(out.read_text())["rows"]] == ["0, no rank slowed", "0", "1"]
