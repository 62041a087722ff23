"""The benchmark of large corpora measures a corpus and shards that it wrote."""

import json
import sys
from pathlib import Path

import pytest

from tests.programs import finished

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# tests/documents/store reads such stores, and tests/job/test_planner takes in no more than a step needs.
@pytest.mark.exhaustive
def test_a_small_run_measures_every_corpus(tmp_path: Path):
    out = tmp_path / "corpora.json"
    done = finished("-m", "benchmarks.corpora", "--documents", "100000", "--shards", "300", "--out", out)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert results["shards"]["documents"] == 300 * 100
    assert results["shards"]["handles"] <= 300 + 2 * 128
    (row,) = results["rows"]
    assert row["documents"] == 100_000
    assert 0 < row["first_documents"] < row["first_step"]
    assert row["private_mib"] > 0
