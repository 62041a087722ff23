"""A step's seconds, and their division among causes."""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tests.simulate.jobs import ROUTED, documents, job
from wlb.errors import UserError
from wlb.job.planner import StepPlanner
from wlb.report.timeline import timeline
from wlb.simulate import CAUSES, simulate, simulate_step, simulate_steps
from wlb.workload.phases import DocumentPhases

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 4, "cp": 2, "dp": 2, "tp": 2},
    {"pp": 1, "cp": 2, "dp": 4, "micro_batches": 3},
    {"pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b", "cp": 4, "micro_batches": 4},
    {"pp": 2, "dp": 2, "micro_batches": 6},
    {"pp": 4, "micro_batches": 8, "activation_checkpointing": "full"},
]


@pytest.mark.parametrize("preset", ["plain-4d", "balanced"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_causes_sum_to_the_step(layout, preset):
    simulated = job(preset, **layout)
    results = simulate_steps([*islice(StepPlanner(simulated, documents()).plans(), 4)], simulated)
    assert list(results.where) == list(CAUSES)
    np.testing.assert_allclose(sum(results.where.values()), results.seconds, rtol=1e-12)
    np.testing.assert_allclose(results.where["compute"], results.gpu_seconds.mean(axis=(1, 2, 3)), rtol=1e-12)
    for cause in set(CAUSES) - {"micro-batches", "stages", "bubbles"}:
        assert (results.where[cause] >= -1e-12).all(), cause
    assert (results.gpu_seconds.max(axis=(1, 2, 3)) <= results.seconds).all()


def test_phases_are_not_simulated():
    priced = replace(job(), phases=DocumentPhases({"encoder": np.ones(len(documents()))}))
    with pytest.raises(UserError, match="not simulated; leave them out"):
        simulate(priced, documents(), 1)


def test_every_cause_takes_time_in_some_job():
    taken = set()
    for layout in (*LAYOUTS, {"shape": ROUTED, "dp": 4, "ep": 4}):
        simulated = job("plain-4d", **layout)
        where = simulate_step(next(StepPlanner(simulated, documents()).plans()), simulated).where
        taken |= {cause for cause, seconds in where.items() if abs(seconds[0]) > 1e-9}
    assert taken == set(CAUSES)


def test_what_the_job_lacks_costs_nothing():
    simulated = job(pp=1, micro_batches=2)
    where = simulate_step(next(StepPlanner(simulated, documents()).plans()), simulated).where
    assert {cause for cause, seconds in where.items() if seconds[0] > 1e-12} == {"compute", "optimizer"}


def test_steps_are_priced_together_as_alone():
    simulated = job("balanced", pp=2, cp=2, dp=2)
    plans = [*islice(StepPlanner(simulated, documents()).plans(), 5)]
    together = simulate_steps(plans, simulated)
    alone = [simulate_step(plan, simulated) for plan in plans]
    np.testing.assert_allclose(together.seconds, [float(result.seconds[0]) for result in alone], rtol=1e-12)
    np.testing.assert_allclose(together.gpu_seconds, np.concatenate([result.gpu_seconds for result in alone]))


def test_the_timeline_ends_with_the_step():
    simulated = job("wlb-llm", pp=4, cp=2, dp=2)
    plan = next(StepPlanner(simulated, documents()).plans())
    line = timeline(plan, simulated)
    assert line.seconds == pytest.approx(float(simulate_step(plan, simulated).seconds[0]))
    assert (line.rank_ends.max(axis=1) + line.reduction + line.optimizer).max() == pytest.approx(line.seconds)
    assert line.rank_ends.shape == (4, 2)
    assert line.ends.max() == line.rank_ends.max()
    assert (line.starts >= 0).all()
    slowest = line.compute.max(axis=2)
    assert (slowest <= line.ends - line.starts + 1e-12).all()
