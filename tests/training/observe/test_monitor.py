"""What a real job shows of itself: imbalance in every step, a diagnosis, traces of all ranks, the rank that is slow.

What ranks and stages are predicted to compute is what the simulator says of them.
"""

from __future__ import annotations

import gzip
import json
import re
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests.cases import in_turn
from tests.training.distributed import run_ranks
from tests.training.jobs import job, read_steps, trainer_of
from wlb.job.config import JobConfig
from wlb.job.job import Job
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.schedules.layout import split_layers
from wlb.sharding import ShardPlan, make_shard_plan
from wlb.simulate import simulate_step, simulated_job
from wlb.simulate.step import Steps
from wlb.training.observe import compute_clock, reporter
from wlb.training.observe.monitor import PredictedLoad

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


def test_a_job_shows_its_imbalance_and_leaves_traces(folder):
    config = job(
        folder,
        parallel={"pp": 2, "cp": 2},
        sharding={"strategy": "per_document"},
        checkpoint={"dir": str(folder / "checkpoints"), "every": 2},
        metrics={"profile": True, "diagnose_every": 4},
    )
    said = run_ranks(4, _train, config)
    rows = read_steps(folder)
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
    diagnosis = json.loads((folder / "metrics" / "diagnosis.json").read_text())
    assert [(rank["pp"], rank["cp"]) for rank in diagnosis["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({rank["process"] for rank in diagnosis["ranks"]}) == 4
    assert all(0 < rank["compute_seconds"] < diagnosis["step_seconds"] for rank in diagnosis["ranks"])
    for rank in range(4):
        names = names_in_trace(folder / "metrics" / "trace" / f"rank-{rank}.json.gz")
        expected = {"data", "plan agreement", "gradient norm", "optimizer", "checkpoint"}
        expected |= {"key/value exchange", "attention own", "attention received"}
        expected |= {f"{phase} micro-batch {i}" for phase in ("forward", "backward") for i in range(4)}
        assert expected <= names
        assert ("loss micro-batch 3" in names) == (rank >= 2)


# That a thread beside busy processes waits for its core by this clock, test_compute_clock shows.
def test_a_rank_that_waits_for_its_core_is_reported_by_name(folder):
    config = job(folder, parallel={"dp": 2}, training={"steps": 7})
    said, _ = run_ranks(2, _train_by_clock, config, (1.0, 0.0), (1.0, 9.0))
    process = json.loads((folder / "metrics" / "diagnosis.json").read_text())["ranks"][1]["process"]
    (warning,) = [line for line in said if "warning" in line]
    pattern = (
        rf"wlb: warning: rank 1 \(host \S+, process {process}, cpu:?0?\) is slow: 60 s of compute a step where \S+ s "
        r"is expected of it; 54 s of it waiting for a core that others have$"
    )
    assert re.match(pattern, warning)
    assert read_steps(folder)[-1]["slow_ranks"] == [1]
    assert "causes, costliest first:\n  1. rank 1 (" in said[-2]
    metrics = folder / "metrics"
    _, _, imbalance, *files = said[-1].splitlines()
    assert re.fullmatch(r"imbalance of ranks, slowest over mean: 1\.\d{3} predicted, 1\.818 measured", imbalance)
    assert files == [
        f"metrics: {metrics}; no checkpoint.dir is set",
        f"next: wlb report {metrics}",
    ]


LENGTHS = np.array([3000, 40, 700, 4096, 1, 2500, 12, 4000] * 4)


def planned(cp: int, tp: int, stages: int) -> tuple[Job, StepPlan, list[ShardPlan]]:
    job = simulated_job("tiny", 4096, hardware="cpu", sharding="per_document", cp=cp, tp=tp, pp=stages)
    plan = next(StepPlanner(job, LENGTHS).plans())
    return job, plan, [make_shard_plan(of_one.lengths, cp, "per_document") for of_one in plan.micro_batches]


@in_turn(("cp", "tp", "stages"), [(1, 1, 1), (2, 1, 2), (1, 2, 3)])
def test_stages_share_what_the_simulator_predicts(cp: int, tp: int, stages: int):
    job, plan, shard_plans = planned(cp, tp, stages)
    simulated = simulate_step(plan, job)
    assert isinstance(simulated, Steps)
    chunks = split_layers(job.shape, stages)
    loads = [PredictedLoad(job.shape, "cpu", [chunk], tp).seconds(shard_plans) for chunk in chunks]
    np.testing.assert_allclose(np.sum(loads, axis=0), simulated.micro_batch_seconds[0, 0])
    np.testing.assert_allclose([load.sum(axis=0) for load in loads], simulated.gpu_seconds[0, :, 0])


def test_the_load_of_a_rank_with_several_chunks_is_their_sum():
    job, _, shard_plans = planned(1, 1, 1)
    first, *_, last = chunks = split_layers(job.shape, 4)
    both = PredictedLoad(job.shape, "cpu", [first, last]).seconds(shard_plans)
    each = [PredictedLoad(job.shape, "cpu", [chunk]).seconds(shard_plans) for chunk in chunks[::3]]
    np.testing.assert_allclose(both, sum(each))
