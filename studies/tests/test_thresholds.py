"""The setting that ``wlb-studies thresholds`` finds is the best of those tried, within the bound on delay."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from tests.packing.streams import SETTINGS, WORKLOADS
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.packing.options import PackingOptions
from wlb.packing.variable_length import VariableLengthPacker
from wlb_studies import thresholds
from wlb_studies.packing import PackingStatistics
from wlb_studies.thresholds import Trial, search, trade_off

JOB = 4, 256, WORKLOADS["7b"]
HEAVY = sample_lengths(4000, 256, seed=1, tail_share=0.3).tolist()


def beats(one, other):
    return one.imbalance_degree < other.imbalance_degree and one.mean_token_delay < other.mean_token_delay


@settings(SETTINGS, max_examples=examples(5))
@given(st.integers(0, 99), st.sampled_from([0.0, 0.1, 0.35, 5.0]), st.integers(0, 2))
def test_the_first_trial_is_the_best_within_the_bound(seed, max_token_delay, queues):
    lengths = sample_lengths(150, 256, seed=seed, tail_share=0.3)
    progress = []
    trials = search(
        lengths,
        *JOB,
        factors=[1.0, 1.5],
        max_token_delay=max_token_delay,
        queues=queues,
        on_trial=lambda done, total: progress.append(done),
    )
    assert len(trials) == 2 * {0: 1, 1: 12, 2: 67}[queues]
    assert progress == list(range(1, len(trials) + 1))
    within = [trial for trial in trials if trial.mean_token_delay <= max_token_delay]
    assert trials[: len(within)] == within  # no thresholds means no outlier delay, so there usually is one
    if within:
        assert trials[0].imbalance_degree == min(trial.imbalance_degree for trial in within)
    else:
        assert trials[0].mean_token_delay == min(trial.mean_token_delay for trial in trials)
    assert not any(beats(trial, trials[0]) for trial in trials)


def test_finalists_pack_the_whole_sample(monkeypatch):
    monkeypatch.setattr(thresholds, "SCREENING_STEPS", 6)
    trials = search(HEAVY, *JOB, factors=[1.5])
    for trial in trials:
        tried = {"outlier_thresholds": trial.outlier_thresholds, "max_length_factor": trial.max_length_factor}
        packer = VariableLengthPacker(*JOB, PackingOptions(method="variable_length", **tried))
        totals = PackingStatistics()
        totals.add(packer.plan(HEAVY))
        found = (trial.imbalance_degree, trial.mean_token_delay, trial.longest_delay, trial.tokens_per_step_cv)
        assert found == (
            totals.imbalance_degree,
            totals.mean_token_delay,
            totals.longest_delay,
            totals.tokens_per_step_cv,
        )
    settings = {(trial.outlier_thresholds, trial.max_length_factor) for trial in trials}
    assert thresholds._FINALISTS <= len(settings) == len(trials) < 67
    assert ((), 1.5) in settings  # no queue, no delay: the curve starts there


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from([1.0, 1.5])), max_size=12))
def test_the_trade_off_is_the_pareto_front(points):
    trials = [Trial((), factor, 1 + imbalance, delay, 0, 0.0) for imbalance, delay, factor in points]
    front = trade_off(trials)
    as_points = {(trial.mean_token_delay, trial.imbalance_degree) for trial in trials}
    assert {(trial.mean_token_delay, trial.imbalance_degree) for trial in front} == {
        (delay, imbalance)
        for delay, imbalance in as_points
        if not any(d <= delay and i <= imbalance and (d, i) != (delay, imbalance) for d, i in as_points)
    }
    assert [trial.mean_token_delay for trial in front] == sorted({trial.mean_token_delay for trial in front})


def test_trials_keep_to_the_bound_on_delay():
    for max_delay in (1, 3):
        trials = search(
            HEAVY, *JOB, PackingOptions(method="variable_length", max_delay=max_delay), factors=[2.0], queues=1
        )
        assert max(trial.longest_delay for trial in trials) == max_delay


def test_lengths_that_fill_no_step_are_refused():
    with pytest.raises(UserError, match="300 tokens fill no step of 4 micro-batches x 256 tokens; give more") as error:
        search([100, 200], *JOB)
    assert "\n" not in str(error.value)


def test_lengths_over_the_window_count_as_one_window():
    assert search([1000, 30] * 20, *JOB, queues=1) == search([256, 30] * 20, *JOB, queues=1)
