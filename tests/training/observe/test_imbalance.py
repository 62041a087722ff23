"""Waiting by dimension, against a direct reading of the definition on seconds of every micro-batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tests.cases import in_turn
from tests.training.observe.rows import rows_of
from wlb.training.observe.imbalance import imbalance_of

SIZES = st.integers(1, 3)


def measured_of(seconds: NDArray[np.float64]) -> dict[str, Any]:
    imbalance = imbalance_of([rows_of(seconds)], seconds.shape[:4], seconds.shape[4])
    return {name: factor["measured"] for name, factor in imbalance.items()}


@given(st.tuples(*[SIZES] * 5).flatmap(lambda shape: arrays(np.float64, shape, elements=st.floats(0.1, 10))))
def test_factors_multiply_to_slowest_over_mean(seconds):
    factors = measured_of(seconds)
    assert all(factor >= 1 - 1e-9 for factor in factors.values())
    slowest = seconds.max(axis=(2, 3)).sum(axis=-1).max()  # a stage waits for its slowest rank in every micro-batch
    product = math.prod(factors[name] for name in ("tp", "cp", "pp", "dp"))
    assert product == pytest.approx(slowest / seconds.sum(axis=-1).mean())


@in_turn(("axis", "name"), list(enumerate(["pp", "dp", "cp", "tp", "micro_batches"])))
def test_one_uneven_dimension_shows_in_its_own_factor(axis, name):
    shape = [2, 2, 2, 2, 2]
    uneven = np.ones(shape)
    np.moveaxis(uneven, axis, 0)[1] = 3.0
    factors = measured_of(uneven)
    assert factors.pop(name) == pytest.approx(1.5)
    assert list(factors.values()) == pytest.approx([1.0] * 4)


def test_ranks_that_are_slow_in_turn_cost_as_much_as_one_that_always_is():
    in_turn = np.array([[1.0, 3.0], [3.0, 1.0]])  # two context-parallel ranks, two micro-batches
    assert measured_of(in_turn.reshape(1, 1, 2, 1, 2))["cp"] == pytest.approx(1.5)
    # Data-parallel ranks meet at the end of the step only; but they do in every step.
    by_dp = in_turn.reshape(1, 2, 1, 1, 2)
    assert measured_of(by_dp)["dp"] == pytest.approx(1.0)
    steps = [rows_of(by_dp[..., :1]), rows_of(by_dp[..., 1:])]
    assert imbalance_of(steps, (1, 2, 1, 1), 1)["dp"]["measured"] == pytest.approx(1.5)


def test_a_step_that_was_not_measured_has_predictions_only():
    rows = rows_of(np.ones((1, 2, 1, 1, 3)))
    for name in ("compute_seconds", "tp_seconds", "cp_seconds", "largest_seconds"):
        rows[name] = np.nan
    imbalance = imbalance_of([rows], (1, 2, 1, 1), 3)
    assert all(factor == {"predicted": 1.0, "measured": None} for factor in imbalance.values())
