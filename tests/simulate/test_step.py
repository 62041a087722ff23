"""A step's seconds, and their division among causes."""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tests.simulate.jobs import ROUTED, SHAPE, documents, job
from wlb.errors import UserError
from wlb.job.pipeline import pipeline_load
from wlb.job.planner import StepPlanner
from wlb.report.timeline import timeline
from wlb.schedules.operations import HEAD
from wlb.simulate import CAUSES, simulate, simulate_steps
from wlb.simulate.costs import JobCosts
from wlb.simulate.decide import decide
from wlb.simulate.level import LevelSteps
from wlb.simulate.step import Steps
from wlb.workload import Costs
from wlb.workload.base import TICKS
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
        where = simulate_steps([next(StepPlanner(simulated, documents()).plans())], simulated).where
        taken |= {cause for cause, seconds in where.items() if abs(seconds[0]) > 1e-9}
    assert taken == set(CAUSES)


def test_what_the_job_lacks_costs_nothing():
    simulated = job(pp=1, micro_batches=2)
    where = simulate_steps([next(StepPlanner(simulated, documents()).plans())], simulated).where
    assert {cause for cause, seconds in where.items() if seconds[0] > 1e-12} == {"compute", "optimizer"}


def test_steps_are_priced_together_as_alone():
    simulated = job("balanced", pp=2, cp=2, dp=2)
    plans = [*islice(StepPlanner(simulated, documents()).plans(), 5)]
    together = simulate_steps(plans, simulated)
    alone = [simulate_steps([plan], simulated) for plan in plans]
    np.testing.assert_allclose(together.seconds, [float(result.seconds[0]) for result in alone], rtol=1e-12)
    np.testing.assert_allclose(together.gpu_seconds, np.concatenate([result.gpu_seconds for result in alone]))


def test_the_timeline_ends_with_the_step():
    simulated = job("wlb-llm", pp=4, cp=2, dp=2)
    plan = next(StepPlanner(simulated, documents()).plans())
    line = timeline(plan, simulated)
    assert line.seconds == pytest.approx(float(simulate_steps([plan], simulated).seconds[0]))
    assert (line.rank_ends.max(axis=1) + line.reduction + line.optimizer).max() == pytest.approx(line.seconds)
    assert line.rank_ends.shape == (4, 2)
    assert line.ends.max() == line.rank_ends.max()
    assert (line.starts >= 0).all()
    slowest = line.compute.max(axis=2)
    assert (slowest <= line.ends - line.starts + 1e-12).all()


def test_a_dealt_head_is_work_of_the_ranks_that_run_it():
    dealt = decide(job("balanced", pp=4, dp=2, micro_batches=8, head="dealt"), documents())
    assert [*dealt.stage_blocks] == [2] * 4
    plan = next(StepPlanner(dealt, documents()).plans())
    steps = simulate_steps([plan], dealt)
    assert isinstance(steps, Steps)
    assert sum(steps.where.values()) == pytest.approx(steps.seconds)
    shards, heads = steps.shards, steps.head.both.sum(axis=(0, 3))  # (dp, micro-batches)
    blocks = float((shards.attention_forward + shards.attention_backward + steps.blocks.both).sum())
    assert steps.gpu_seconds.sum() == pytest.approx(blocks + heads.sum())
    assert steps.heads[0] == pytest.approx(heads)  # pools of one rank
    for pipeline, lists in enumerate(plan.operations):
        busy = steps.gpu_seconds[0, :, pipeline].sum(axis=1)
        mine = [sum(heads[pipeline, one.micro_batch] for one in of_rank if one.kind == HEAD) for of_rank in lists]
        assert mine[0] == 0
        assert busy - mine == pytest.approx(np.full(4, busy[0]))
    alone = replace(steps, modelled=frozenset({"compute"}))  # evenly over all ranks
    assert alone.ends == pytest.approx((steps.stages.both.sum() + steps.heads.sum()) / 8)


def test_gradients_of_a_dealt_head_are_gathered_reduced_and_summed_on_every_rank_that_has_one():
    dealt, last = (JobCosts(job("balanced", pp=4, dp=2, head=head)) for head in ("dealt", "last"))
    moved = 2 * SHAPE.vocab_size * SHAPE.hidden / 2 * 10 * 4  # of two more heads, over two ranks: AdamW and clipping
    more = (dealt.optimizer - last.optimizer).sum()
    assert more == pytest.approx(moved / dealt.job.hardware.memory_bandwidth)
    assert dealt.root_gather.tolist() == [last.root_gather[0]] * 4  # of the first the embedding
    reduced = dealt.rank_reduction - dealt.job.stage_blocks * dealt.block_reduction
    assert reduced[0] == pytest.approx(dealt.root_reduction[0])
    assert (reduced[1:] > 1.1 * dealt.root_reduction[1:]).all()


@pytest.mark.parametrize(("pp", "head", "copies"), [(1, "auto", [1]), (2, "dealt", [1, 1]), (4, "dealt", [1] * 4)])
def test_a_tied_embedding_is_one_matrix_on_every_rank_that_has_it(pp, head, copies):
    apart = job("balanced", pp=pp, dp=2, micro_batches=8, head=head)
    tied = JobCosts(replace(apart, tied_embeddings=True))
    assert tied.root_gather / JobCosts(apart).root_gather[-1] * (1 + (pp == 1)) == pytest.approx(copies, rel=0.1)
    own = tied.rank_reduction - tied.job.stage_blocks * tied.block_reduction
    assert own == pytest.approx(np.full(pp, own[0]))  # of all, each with a copy
    assert (own[0] > 1.1 * tied.root_reduction[0]) == (pp > 1)


def test_weight_gradients_of_micro_batches_in_a_row_share_a_product(monkeypatch):
    simulated = decide(job("balanced", pp=2, micro_batches=4, pool=1, packing={"rank_micro_batches": 32}), documents())
    plan = next(StepPlanner(simulated, documents()).plans())
    together = _divided(simulate_steps([plan], simulated))
    tokens = [one.tokens for one in plan.micro_batches]
    joined = pipeline_load(simulated, plan.micro_batches)[1].joined
    assert joined is not None
    assert joined.sum(axis=0) / TICKS == pytest.approx(simulated.costs.joined_seconds(tokens, "blocks"), abs=1e-8)
    monkeypatch.setattr(Costs, "joined_seconds", lambda self, tokens, part: np.zeros(np.shape(tokens)))
    apart = _divided(simulate_steps([plan], simulated))
    assert apart["step"] > together["step"]
    assert apart["compute"] > together["compute"]


def _divided(steps: Steps | LevelSteps) -> dict[str, float]:
    """The seconds of the only one of ``steps`` by cause, and together; what is computed is never idle time."""
    where = {cause: float(seconds[0]) for cause, seconds in steps.where.items()} | {"step": float(steps.seconds[0])}
    assert sum(where[cause] for cause in CAUSES) == pytest.approx(where["step"])
    assert where["compute"] == pytest.approx(steps.gpu_seconds.mean())
    assert isinstance(steps, Steps)
    busy = np.zeros(steps.costs.layout.pp)
    for one, seconds in zip(steps.pipelines.operations, steps.pipelines.seconds[:, 0, 0], strict=True):
        busy[one.stage % len(busy)] += seconds
    assert steps.gpu_seconds[0, :, 0, 0] == pytest.approx(busy)
    assert steps.gpu_seconds.max() <= where["step"]
    assert where["bubbles"] + where["stages"] + where["micro-batches"] >= 0
    return where
