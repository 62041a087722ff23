"""Traces of all ranks, and what ranks and stages are predicted to compute: what the simulator says of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from tests.cases import in_turn
from tests.training.distributed import run_ranks
from tests.training.jobs import job, train
from wlb.job.planner import StepPlanner
from wlb.schedules.layout import split_layers
from wlb.sharding import make_shard_plan
from wlb.simulate import simulate_step, simulated_job
from wlb.simulate.step import Steps
from wlb.training.observe.monitor import predicted_seconds
from wlb.workload import make_workload


def names_in_trace(folder: Path, rank: int) -> set[str]:
    (path,) = folder.glob(f"rank-{rank}.*.json.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_a_job_leaves_traces_of_all_ranks(folder):
    config = job(
        folder,
        parallel={"pp": 2, "cp": 2},
        sharding={"strategy": "per_document"},
        checkpoint={"dir": str(folder / "checkpoints"), "every": 2},
        metrics={"profile": True},
        training={"steps": 4},
    )
    run_ranks(4, train, config)
    for rank in range(4):
        names = names_in_trace(folder / "metrics" / "trace", rank)
        expected = {"data", "plan agreement", "gradient norm", "optimizer", "checkpoint"}
        expected |= {"key/value exchange", "attention own", "attention received"}
        expected |= {f"{phase} micro-batch {i}" for phase in ("forward", "backward") for i in range(4)}
        assert expected <= names
        assert ("loss micro-batch 3" in names) == (rank >= 2)


LENGTHS = np.array([3000, 40, 700, 4096, 1, 2500, 12, 4000] * 4)


@in_turn(("cp", "tp", "stages"), [(1, 1, 1), (2, 1, 2), (1, 2, 3)])
def test_stages_share_what_the_simulator_predicts(cp: int, tp: int, stages: int):
    job = simulated_job("tiny", 4096, hardware="cpu", sharding="per_document", cp=cp, tp=tp, pp=stages)
    plan = next(StepPlanner(job, LENGTHS).plans())
    simulated = simulate_step(plan, job)
    assert isinstance(simulated, Steps)
    costs, chunks = make_workload(job.shape, "cpu", tp), split_layers(job.shape, stages)
    shard_plans = [make_shard_plan(of_one.lengths, cp, "per_document") for of_one in plan.micro_batches]
    loads = np.array([[predicted_seconds(shards, costs, [chunk]) for shards in shard_plans] for chunk in chunks])
    np.testing.assert_allclose(loads.sum(axis=0), simulated.micro_batch_seconds[0, 0])
    np.testing.assert_allclose(loads.sum(axis=1), simulated.gpu_seconds[0, :, 0])
    of_all_chunks = [predicted_seconds(shards, costs, chunks) for shards in shard_plans]
    np.testing.assert_allclose(of_all_chunks, loads.sum(axis=0))
