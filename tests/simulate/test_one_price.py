"""Plan, sharder, simulator and report give one price of a micro-batch, and a measured profile is in all of them."""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from tests.simulate.jobs import SHAPE, WINDOW, documents
from tests.workload.profiles import analytic_profile
from wlb.documents.synthetic import sample_lengths
from wlb.job.config import PRESETS
from wlb.job.job import Job
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.sharding import STRATEGIES, make_shard_plan
from wlb.simulate import simulate_steps, simulated_job
from wlb.simulate.decide import decide
from wlb.simulate.step import Steps
from wlb.workload.profile import WorkloadProfile
from wlb_studies.sharding import shard_latency


def attending(factor: float) -> WorkloadProfile:
    """As if measured: attention takes so many times what counting says, everything else just that."""
    counted = analytic_profile(SHAPE, "h100", tokens=tuple(2**k for k in range(6, 15)))
    scaled = {}
    for part in ("attention", "prefix_attention"):
        measurements = getattr(counted, part)
        columns = {name: np.array(getattr(measurements, name)) * factor for name in _SECONDS}
        tuples = {
            name: tuple(map(tuple, c.tolist())) if c.ndim == 2 else tuple(c.tolist()) for name, c in columns.items()
        }
        scaled[part] = measurements.model_copy(update=tuples)
    return counted.model_copy(update=scaled)


_SECONDS = ("forward_seconds", "backward_seconds")
PROFILE = attending(3.0)
layouts = st.fixed_dictionaries(
    {
        "dp": st.sampled_from([1, 2, 4]),
        "cp": st.sampled_from([1, 2, 4, 12]),
        "pp": st.sampled_from([1, 2, 4]),
        "tp": st.sampled_from([1, 2, 8]),
        "micro_batches": st.sampled_from([4, 8]),
        "activation_checkpointing": st.sampled_from(["none", "keep_attention", "full"]),
        "sharding": st.sampled_from([None, *STRATEGIES]),
    }
)


def plans_of(job: Job, steps: int = 2) -> list[StepPlan]:
    return [*islice(StepPlanner(job, documents()).plans(), steps)]


@settings(deadline=None, max_examples=examples(30))
@given(st.sampled_from(sorted(PRESETS)), layouts, st.booleans())
def test_plan_sharder_and_simulator_give_one_price(preset, layout, measured):
    job = decide(simulated_job(SHAPE, WINDOW, preset, profile=PROFILE if measured else None, **layout), documents())
    plans = plans_of(job)
    steps = simulate_steps(plans, job)
    heads = steps.heads if isinstance(steps, Steps) else 0.0  # a dealt head is an operation of its own
    simulated = (steps.stages.both.sum(axis=2) + heads).ravel()
    if job.levels_steps:
        simulated = simulated[simulated > 0]  # a step may have fewer micro-batches than another
    imbalance = steps.imbalance["dp" if job.levels_steps else "micro_batches"]
    micro_batches = [micro_batch for plan in plans for micro_batch in plan.micro_batches]
    np.testing.assert_allclose([micro_batch.workload for micro_batch in micro_batches], simulated, rtol=1e-3, atol=2e-9)
    np.testing.assert_allclose([plan.imbalance for plan in plans], imbalance, rtol=1e-3)
    for micro_batch in micro_batches[:4]:
        if micro_batch.segments and not micro_batch.ranks and not micro_batch.is_slice:
            sharded = make_shard_plan(
                micro_batch.lengths, job.layout.pool_size, job.sharding.strategy, workload=job.costs
            )
            assert shard_latency(sharded, job.costs).slowest == pytest.approx(micro_batch.workload, rel=1e-3)


def _by(profile: bool, preset: str, **layout: Any) -> Job:
    job = simulated_job(SHAPE, WINDOW, preset, profile=PROFILE if profile else None, **layout)
    return decide(job, documents())


@pytest.mark.parametrize("preset", ["wlb-llm", "balanced"])
@pytest.mark.parametrize("layout", [{"dp": 4, "cp": 2, "micro_batches": 4}, {"dp": 2, "cp": 4, "pp": 2}])
def test_a_profile_changes_what_is_packed_together(preset, layout):
    counted, measured = (_by(profile, preset, **layout) for profile in (False, True))
    together = [
        [[[*micro_batch.segments] for micro_batch in plan.micro_batches] for plan in plans_of(job, 4)]
        for job in (counted, measured)
    ]
    assert together[0] != together[1]


def test_a_profile_changes_how_ranks_share_a_micro_batch_and_what_it_takes():
    counted, measured = (_by(profile, "balanced", cp=8) for profile in (False, True))
    lengths = sample_lengths(12, WINDOW, 0)
    pieces = [
        [table.tolist() for table in make_shard_plan(lengths, 8, "balanced", workload=job.costs).pieces]
        for job in (counted, measured)
    ]
    assert pieces[0] != pieces[1]
    plan = plans_of(counted, 1)
    assert simulate_steps(plan, measured).seconds[0] > simulate_steps(plan, counted).seconds[0]


def test_pools_are_decided_by_the_profile():
    """Where attention costs next to nothing, no document needs several ranks."""
    layout: dict[str, Any] = {"dp": 8, "cp": 1, "pp": 2, "micro_batches": 2}
    counted = simulated_job(SHAPE, WINDOW, "balanced", packing={"grouping": "even"}, **layout)
    decided = [decide(job, documents()).sizes for job in (counted, replace(counted, profile=attending(1e-3)))]
    assert decided[0] != decided[1]


def test_another_model_or_layout_keeps_its_own_prices():
    job = simulated_job(SHAPE, WINDOW, "balanced", profile=PROFILE, tp=2)
    alone = replace(job.costs, tp=1)
    np.testing.assert_allclose(2 * job.costs.attention_seconds([100, 8000]), alone.attention_seconds([100, 8000]))
