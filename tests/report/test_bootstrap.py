"""The gain is a ratio of throughputs, and its interval covers what it says it covers."""

import numpy as np
import pytest

from wlb.report.bootstrap import gain


def test_constant_steps_leave_no_doubt():
    tokens, seconds = np.full(40, 100), np.full(40, 2.0)
    result = gain(tokens, seconds, tokens, seconds / 1.25)
    assert (result.factor, result.low, result.high) == pytest.approx((1.25, 1.25, 1.25))
    assert str(result) == "1.25x (1.25 to 1.25)"


def test_throughputs_are_weighted_by_time():
    result = gain(np.array([100, 100]), np.array([1.0, 3.0]), np.array([300, 100]), np.array([1.0, 1.0]))
    assert result.factor == pytest.approx((400 / 2) / (200 / 4))


def test_all_steps_of_series_of_different_length_count():
    tokens, seconds = np.full(10, 100), np.ones(10)
    later = np.concatenate([np.full(10, 0.5), np.full(20, 2.0)])
    result = gain(tokens, seconds, np.full(30, 100), later)
    assert result.factor == pytest.approx((3000 / later.sum()) / 100)
    assert result.low < result.factor < result.high
    assert result == gain(tokens, seconds, np.full(30, 100), later)  # the interval is no chance


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Steps drawn anew 200 times, neighbours correlated as by an outlier queue; 95% nominal, fewer in small samples."""
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        before = 2.0 + 0.5 * _correlated(random)
        after = 1.6 + 0.2 * _correlated(random)
        result = gain(np.full(96, 100), before, np.full(96, 100), after)
        covered += result.low <= 2.0 / 1.6 <= result.high
    assert 0.85 <= covered / 200 <= 0.99


def _correlated(random):
    noise = random.standard_normal(97)
    return (noise[1:] + noise[:-1]) / np.sqrt(2)
