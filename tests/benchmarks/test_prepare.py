"""The benchmark of preparing compares methods that make equal stores."""

import json

import pytest

from tests.programs import finished

pytest.importorskip("ray", reason="Ray is not installed (the extra ray)")

BENCHMARK = ("-m", "benchmarks.prepare")


# tests/documents/prepare proves shards and Ray equal to one process; this adds the table.
@pytest.mark.exhaustive
def test_small_run_compares_equal_stores(tmp_path):
    out = tmp_path / "prepare.json"
    done = finished(*BENCHMARK, "--workers", "2", "--copies", "1", "--turns", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert [row["method"] for row in results["methods"]] == ["--workers 2", "2 workers on Ray", "2 shards"]
    assert all(row["seconds"] > 0 and row["method"] in done.stdout for row in results["methods"])
