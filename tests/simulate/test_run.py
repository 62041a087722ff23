"""A simulated job runs the trainer's plans, and its means are those of its steps."""

from itertools import islice

import numpy as np
import pytest

from tests.simulate.jobs import WINDOW, documents, job
from wlb.errors import UserError
from wlb.job.planner import StepPlanner
from wlb.simulate import simulate, simulate_steps
from wlb.simulate.decide import decide
from wlb.simulate.run import pooled

LENGTHS = documents(300)


def test_means_are_those_of_the_steps():
    simulated = decide(job("wlb-llm", pp=2, cp=2, dp=2), LENGTHS)
    result = simulate(simulated, LENGTHS, 9)
    steps = simulate_steps([*islice(StepPlanner(simulated, LENGTHS).plans(), 9)], simulated)
    assert result.steps == 9
    np.testing.assert_allclose(result.step_seconds, steps.seconds)
    assert result.tokens_per_second == pytest.approx(steps.tokens.sum() / steps.seconds.sum())
    assert sum(result.where.values()) == pytest.approx(result.mean_step_seconds)
    np.testing.assert_allclose(result.gpu_seconds, steps.gpu_seconds.mean(axis=0))


def test_only_cutting_loses_attention():
    assert simulate(job("fixed-4d"), LENGTHS, 20).attention_kept == 1
    assert simulate(job("wlb-llm"), LENGTHS, 20).attention_kept == 1
    assert 0.5 < simulate(job("plain-4d"), LENGTHS, 20).attention_kept < 1
    overlong = np.full(40, 2 * WINDOW + 10)  # whose pieces count as documents
    assert simulate(job("fixed-4d", micro_batches=2), overlong, 20).attention_kept == 1


def test_work_is_that_of_the_documents_trained():
    """Cutting documents leaves work out, and so does letting long ones wait; a price list of one's own prices all."""
    steps = 3
    plain, paper = (simulate(job(preset, micro_batches=8), documents(), steps) for preset in ("plain-4d", "wlb-llm"))
    for result in (plain, paper):
        plans = islice(StepPlanner(result.job, documents()).plans(), steps)
        lengths = [segment.length for plan in plans for segment in plan.segments]
        assert result.work_seconds == pytest.approx(result.job.workload.document_seconds(lengths).sum())
    # In three steps the queue of outliers is hardly full once: fewer seconds for as many tokens, but not for the work.
    assert paper.tokens_per_second / plain.tokens_per_second > paper.speed_at_equal_work(plain)

    class Tokens:
        def document_seconds(self, lengths):
            return np.asarray(lengths, np.float64)

    priced = simulate(plain.job, documents(), steps, work_prices=Tokens())
    assert priced.work_seconds == plain.tokens
    assert priced.seconds == plain.seconds


def test_a_hundred_thousand_gpus():
    simulated = job("plain-4d", tp=8, cp=16, pp=8, dp=98, micro_batches=8)
    assert simulated.layout.world_size > 100_000
    result = simulate(simulated, documents(40_000), 2)
    assert result.gpu_seconds.shape == (8, 98, 16)
    assert result.imbalance["gpus"] > 1


def test_documents_that_are_repeated_are_counted_in_epochs():
    simulated = job("plain-4d")
    epoch = int(LENGTHS.sum()) // (WINDOW * simulated.packing.global_batch)
    assert simulate(simulated, LENGTHS, epoch).epochs == 1
    assert simulate(simulated, LENGTHS, epoch + 1).epochs == 2
    assert simulate(simulated, LENGTHS, 3 * epoch + 3).to_json()["epochs"] == 4
    with pytest.raises(UserError, match="the documents have 60 tokens, and one step takes"):
        simulate(simulated, np.array([10, 20, 30]), 1)


def test_draws_are_pooled_as_one_series():
    """Sums over steps, means over draws, delay over tokens, and the most that any draw needs."""
    one, two = (simulate(job("wlb-llm", micro_batches=8), documents(count), 4) for count in (500, 4000))
    together = pooled([one, two])
    assert (together.tokens, together.seconds) == (one.tokens + two.tokens, one.seconds + two.seconds)
    assert together.work_seconds == one.work_seconds + two.work_seconds
    assert one.epochs > two.epochs
    assert together.epochs == one.epochs
    waited = one.token_delay * one.tokens + two.token_delay * two.tokens
    assert together.token_delay == pytest.approx(waited / together.tokens)
    assert one.token_delay != two.token_delay
    for cause in together.where:
        assert together.where[cause] == pytest.approx((one.where[cause] + two.where[cause]) / 2)
