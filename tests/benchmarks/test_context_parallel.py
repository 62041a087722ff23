"""The context-parallel benchmark runs every method on real processes and finds them all right."""

import json

import pytest

from tests.programs import finished

pytest.importorskip("torch")

BENCHMARK = ("-m", "benchmarks.context_parallel")


# tests/attention proves every strategy exact on real processes; this adds torch's all-gather and the table.
@pytest.mark.exhaustive
def test_small_run_writes_what_it_prints(tmp_path):
    out = tmp_path / "context_parallel.json"
    small = ["--context-window", "512", "--micro-batches", "1", "--turns", "1", "--out", str(out)]
    done = finished(*BENCHMARK, *small)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert results["largest_error"] < 1e-4
    rows = {row["method"]: row for row in results["methods"]}
    assert {"per_sequence", "per_document", "adaptive", "balanced", "torch, all-gather"} < set(rows)
    assert rows["per_document"]["predicted"] == pytest.approx(1.0, abs=0.01)
    assert all(row["seconds"] > 0 and row["method"] in done.stdout for row in results["methods"])
