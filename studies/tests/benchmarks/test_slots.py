"""Slots of ranks that share experts: equal counts on every rank, and less waiting by work than by tokens."""

import json
from pathlib import Path

import numpy as np

from studies.benchmarks import slots


def test_slots_by_work_wait_less_and_mistakes_are_named(tmp_path: Path, capsys):
    out, small = tmp_path / "slots.json", ["--gpus", "32", "--batch-tokens", str(2**21), "--steps", "1"]
    assert slots.main([*small, "--out", str(out)]) == 0
    tokens, work = json.loads(out.read_text())["rows"]
    assert work["speed"] > 1.02
    assert work["waiting"] < tokens["waiting"]
    assert slots.main(["--gpus", "16", "--ep", "3"]) == 2
    assert "ep = 3 does not divide" in capsys.readouterr().err


def test_all_ranks_run_equally_many_micro_batches():
    job = slots.job_of("qwen3-30b-a3b", 32_768, 32, 8)
    _, count, waiting = slots.step_of(job, np.full(256, 16_384), "work")
    assert count == 2
    assert waiting < 1e-9
