"""What level steps take, and that they are level by the prices that they are planned by."""

import json
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest

from tests.simulate.jobs import WINDOW, documents
from tests.workload.profiles import analytic_profile
from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.job.planner import StepPlanner
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.report.timeline import timeline
from wlb.report.trace import write_trace
from wlb.simulate import CAUSES, simulate_steps, simulated_job
from wlb.simulate.costs import JobCosts
from wlb.simulate.decide import decide
from wlb.simulate.level import LevelSteps
from wlb.workload import model_shape


def level_job(**settings) -> Job:
    packing = {"grouping": "level", "global_batch": 16} | settings.pop("packing", {})
    job = simulated_job("llama3-8b", WINDOW, "balanced", dp=8, micro_batches=2, tp=2, packing=packing, **settings)
    return decide(job, documents())


@pytest.fixture(scope="module")
def job() -> Job:
    return level_job()


@pytest.fixture(scope="module")
def plans(job):
    return [*islice(StepPlanner(job, documents()).plans(), 3)]


def test_it_is_one_pool_of_all_ranks(job):
    assert job.levels_steps
    assert (job.layout.dp, job.layout.cp, job.layout.pool) == (8, 1, 8)
    assert decide(job, documents()) == job


@pytest.mark.parametrize(("dp", "per_node"), [(2, 2), (4, 4), (6, 2), (12, 4), (16, 4)])
def test_ranks_that_are_planned_as_a_node_lie_on_one(dp, per_node):
    """A node has four ranks of two GPUs."""
    job = simulated_job("llama3-8b", WINDOW, "balanced", dp=dp, micro_batches=2, tp=2, packing={"grouping": "level"})
    assert job.with_pools("level", dp).stage_ranks.per_node == per_node


def test_causes_sum_to_steps_that_are_together_what_they_are_alone(job, plans):
    together = simulate_steps(plans, job)
    np.testing.assert_allclose(sum(together.where.values()), together.seconds)
    assert list(together.where) == list(CAUSES)
    alone = [simulate_steps([plan], job) for plan in plans]
    np.testing.assert_allclose(together.seconds, [steps.seconds[0] for steps in alone])
    assert together.tokens.tolist() == [plan.tokens for plan in plans]
    np.testing.assert_allclose(together.gpu_seconds, np.concatenate([steps.gpu_seconds for steps in alone]))


@pytest.mark.parametrize("kind", ["none", "keep_attention", "full"])
def test_prices_are_what_micro_batches_take(kind):
    job = level_job(activation_checkpointing=kind)
    plan = next(StepPlanner(job, documents()).plans())
    expected = [micro_batch.workload for micro_batch in plan.micro_batches]
    np.testing.assert_allclose(LevelSteps.of_plans([plan], JobCosts(job)).stages.both.ravel(), expected, rtol=1e-6)


def test_measured_prices_replace_those_of_hardware():
    job = decide(
        simulated_job("tiny", 4096, "balanced", hardware="cpu", dp=2, packing={"grouping": "level"}), documents()
    )
    plan = StepPlan(0, ((MicroBatch((Segment(0, 0, 4096),), 1.0, (0, 1)), MicroBatch((Segment(1, 0, 9),), 1.0, (0,))),))
    profiles = [analytic_profile(model_shape("tiny"), times=times) for times in (1.0, 2.0)]
    one, other = (simulate_steps([plan], replace(job, profile=profile)).gpu_seconds for profile in profiles)
    np.testing.assert_allclose(other, 2 * one)
    assert one.any()


def test_shards_of_a_micro_batch_are_those_of_its_ranks(job, plans):
    steps = simulate_steps(plans, job)
    for plan, tokens, received in zip(plans, steps.shards.tokens[:, 0], steps.shards.received[:, 0], strict=True):
        for micro_batch, of_ranks, keys in zip(plan.micro_batches, tokens, received, strict=False):
            others = sorted(set(range(8)) - set(micro_batch.ranks))
            assert of_ranks.sum() == micro_batch.tokens
            assert (of_ranks[list(micro_batch.ranks)] > 0).all()
            assert not of_ranks[others].any()
            assert keys.any() == (len(micro_batch.ranks) > 1)


def test_a_shared_document_takes_longer_on_two_nodes():
    """Of four ranks each."""
    plan = StepPlan(1, ((MicroBatch((Segment(0, 0, WINDOW),), 1.0, (0, 1, 2, 3)),),))
    apart = StepPlan(1, ((replace(plan.ranks[0][0], ranks=(0, 1, 6, 7)),),))
    near, far = LevelSteps.of_plans([plan, apart], JobCosts(level_job())).stages.both.ravel()
    assert near < far


def test_the_timeline_has_no_rank_in_two_places(job, plans, tmp_path):
    line = timeline(plans[0], job)
    assert line.seconds == pytest.approx(float(simulate_steps(plans[:1], job).seconds[0]))
    for rank in range(8):
        spans = sorted((line.starts[index, 0], line.ends[index, 0]) for index in line.operations_of(0, rank))
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))
    write_trace(tmp_path / "trace.json", {"level": line})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "thread_name" for event in events) == 8


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pp": 2, "micro_batches": 2}, "stages of a pipeline"),
        ({"packing": {"rank_micro_batches": 4}}, "rank_micro_batches = 4 has no meaning"),
    ],
)
def test_what_level_steps_cannot_have(settings, said):
    packing = {"grouping": "level"} | settings.pop("packing", {})
    with pytest.raises(UserError, match=said):
        decide(simulated_job("llama3-8b", WINDOW, "balanced", **{"dp": 2} | settings, packing=packing), documents())


def test_a_loop_in_lock_step_gets_pools():
    job = simulated_job("llama3-8b", WINDOW, "balanced", dp=4, micro_batches=2, tp=2)
    assert [decide(job, documents(500), lock_step=only).levels_steps for only in (False, True)] == [True, False]
