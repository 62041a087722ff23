"""What a real job shows of itself: imbalance in every step, a diagnosis, traces of all ranks, the rank that is slow."""

from __future__ import annotations

import gzip
import json
import re
from itertools import count
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.training.distributed import run_ranks
from tests.training.jobs import job, read_steps, trainer_of, write_store
from wlb.job.config import JobConfig
from wlb.training.observe import compute_clock, reporter

DIMENSIONS = {"tp", "cp", "pp", "dp", "micro_batches"}


def _train(config: JobConfig) -> list[str]:
    """Train; returns what its reporter said."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporter, "say", said.append)
        trainer_of(config).run()
    return said


def _train_by_clock(config: JobConfig, *seconds: tuple[float, float]) -> list[str]:
    """The same where a reading of the clock adds ``seconds`` of each rank, those it ran and those it had no core."""
    ran, without_core = seconds[dist.get_rank()]
    readings = count()

    def now() -> tuple[float, float]:
        reading = next(readings)
        return reading * ran, reading * without_core

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute_clock, "thread_seconds", lambda: now)
        return _train(config)


def names_in_trace(path: Path) -> set[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_a_job_shows_its_imbalance_and_leaves_traces(tmp_path):
    write_store(tmp_path / "store")
    config = job(
        tmp_path,
        parallel={"pp": 2, "cp": 2},
        sharding={"strategy": "per_document"},
        checkpoint={"dir": str(tmp_path / "checkpoints"), "every": 2},
        metrics={"profile": True, "diagnose_every": 4},
    )
    said = run_ranks(4, _train, config)
    rows = read_steps(tmp_path)
    for row in rows:
        assert set(row["imbalance"]) == DIMENSIONS
        assert all(
            factor[kind] >= 1 - 1e-9 for factor in row["imbalance"].values() for kind in ("predicted", "measured")
        )
        assert row["imbalance"]["dp"]["measured"] == row["imbalance"]["tp"]["measured"] == 1
        assert 0 < row["mfu"] < 1
        assert row["pending_documents"] >= 0
    # The first step warms up and is not in it; four steps would be, but the run ends two after the last four.
    (text,) = [line for line in said[0] if "causes" in line or "no cause" in line]
    assert "compute of 4 ranks without collectives, mean of 4 steps up to step 6" in text
    assert not any(said[1:])
    diagnosis = json.loads((tmp_path / "metrics" / "diagnosis.json").read_text())
    assert [(rank["pp"], rank["cp"]) for rank in diagnosis["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({rank["process"] for rank in diagnosis["ranks"]}) == 4
    assert all(0 < rank["compute_seconds"] < diagnosis["step_seconds"] for rank in diagnosis["ranks"])
    for rank in range(4):
        names = names_in_trace(tmp_path / "metrics" / "trace" / f"rank-{rank}.json.gz")
        expected = {"data", "plan agreement", "gradient norm", "optimizer", "checkpoint"}
        expected |= {"key/value exchange", "attention own", "attention received"}
        expected |= {f"{phase} micro-batch {i}" for phase in ("forward", "backward") for i in range(4)}
        assert expected <= names
        assert ("loss micro-batch 3" in names) == (rank >= 2)


# That a thread beside busy processes waits for its core by this clock, test_compute_clock shows.
def test_a_rank_that_waits_for_its_core_is_reported_by_name(tmp_path):
    write_store(tmp_path / "store")
    config = job(tmp_path, parallel={"dp": 2}, training={"steps": 7})
    said, _ = run_ranks(2, _train_by_clock, config, (1.0, 0.0), (1.0, 9.0))
    process = json.loads((tmp_path / "metrics" / "diagnosis.json").read_text())["ranks"][1]["process"]
    (warning,) = [line for line in said if "warning" in line]
    pattern = (
        rf"wlb: warning: rank 1 \(host \S+, process {process}, cpu:?0?\) is slow: 60 s of compute a step where \S+ s "
        r"is expected of it; 54 s of it waiting for a core that others have$"
    )
    assert re.match(pattern, warning)
    assert read_steps(tmp_path)[-1]["slow_ranks"] == [1]
    assert "causes, costliest first:\n  1. rank 1 (" in said[-2]
    metrics = tmp_path / "metrics"
    _, _, imbalance, *files = said[-1].splitlines()
    assert re.fullmatch(r"imbalance of ranks, slowest over mean: 1\.\d{3} predicted, 1\.818 measured", imbalance)
    assert files == [
        f"metrics: {metrics}; no checkpoint.dir is set",
        f"next: wlb report {metrics}",
    ]


def test_an_even_job_warns_of_nobody(tmp_path):
    write_store(tmp_path / "store")
    config = job(tmp_path, parallel={"dp": 2}, training={"steps": 7})
    said, _ = run_ranks(2, _train_by_clock, config, (1.0, 0.0), (1.0, 0.0))
    assert not [line for line in said if "warning" in line]
    assert all(row["slow_ranks"] == [] for row in read_steps(tmp_path))
