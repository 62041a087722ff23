"""What ranks and stages are predicted to compute is what the simulator says of them."""

from __future__ import annotations

import numpy as np
import pytest

from wlb.job.job import Job
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.schedules.layout import split_layers
from wlb.sharding import ShardPlan, make_shard_plan
from wlb.simulate import simulate_step, simulated_job
from wlb.simulate.step import Steps
from wlb.training.observe.monitor import PredictedLoad

LENGTHS = np.array([3000, 40, 700, 4096, 1, 2500, 12, 4000] * 4)


def planned(cp: int, tp: int, stages: int) -> tuple[Job, StepPlan, list[ShardPlan]]:
    job = simulated_job("tiny", 4096, hardware="cpu", sharding="per_document", cp=cp, tp=tp, pp=stages)
    plan = next(StepPlanner(job, LENGTHS).plans())
    return job, plan, [make_shard_plan(of_one.lengths, cp, "per_document") for of_one in plan.micro_batches]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_stages_share_what_the_simulator_predicts(cp: int, tp: int, stages: int):
    job, plan, shard_plans = planned(cp, tp, stages)
    simulated = simulate_step(plan, job)
    assert isinstance(simulated, Steps)
    chunks = split_layers(job.shape, stages)
    loads = [PredictedLoad(job.shape, "cpu", [chunk], tp).seconds(shard_plans) for chunk in chunks]
    np.testing.assert_allclose(np.sum(loads, axis=0), simulated.micro_batch_seconds[0, 0])
    np.testing.assert_allclose([load.sum(axis=0) for load in loads], simulated.gpu_seconds[0, :, 0])


def test_a_rank_with_several_chunks_has_them_all():
    job, _, shard_plans = planned(1, 1, 1)
    first, *_, last = chunks = split_layers(job.shape, 4)
    both = PredictedLoad(job.shape, "cpu", [first, last]).seconds(shard_plans)
    each = [PredictedLoad(job.shape, "cpu", [chunk]).seconds(shard_plans) for chunk in chunks[::3]]
    np.testing.assert_allclose(both, sum(each))
