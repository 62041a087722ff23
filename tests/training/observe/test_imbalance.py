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
from wlb.training.observe.imbalance import RankSteps, imbalance_of


def measured_of(seconds: NDArray[np.float64]) -> dict[str, Any]:
    """The measured factors of seconds of each micro-batch, shape (pp, dp, cp, tp, micro_batches)."""
    rank, in_tp, in_cp = (
        np.broadcast_to(most, seconds.shape).sum(axis=-1).ravel()
        for most in (seconds, seconds.max(axis=3, keepdims=True), seconds.max(axis=(2, 3), keepdims=True))
    )
    nothing = np.zeros_like(rank)
    imbalance = imbalance_of(RankSteps(nothing, nothing, nothing, rank, in_tp, in_cp), seconds.shape[:4])
    assert all(factor["predicted"] is None for factor in imbalance.values())
    return {name: factor["measured"] for name, factor in imbalance.items()}


@given(st.tuples(*[st.integers(1, 3)] * 5).flatmap(lambda s: arrays(np.float64, s, elements=st.floats(0.1, 10))))
def test_factors_multiply_to_slowest_over_mean(seconds):
    factors = measured_of(seconds)
    assert all(factor >= 1 - 1e-9 for factor in factors.values())
    slowest = seconds.max(axis=(2, 3)).sum(axis=-1).max()  # a stage waits for its slowest rank in every micro-batch
    assert math.prod(factors.values()) == pytest.approx(slowest / seconds.sum(axis=-1).mean())


@in_turn(("axis", "name"), list(enumerate(["pp", "dp", "cp", "tp"])))
def test_one_uneven_dimension_shows_in_its_own_factor(axis, name):
    uneven = np.ones([2, 2, 2, 2, 2])
    np.moveaxis(uneven, axis, 0)[1] = 3.0
    factors = measured_of(uneven)
    assert factors.pop(name) == pytest.approx(1.5)
    assert list(factors.values()) == pytest.approx([1.0] * 3)


def test_ranks_that_are_slow_in_turn_cost_as_much_as_one_that_always_is():
    in_turn = np.array([[1.0, 3.0], [3.0, 1.0]])  # two context-parallel ranks, two micro-batches
    assert measured_of(in_turn.reshape(1, 1, 2, 1, 2))["cp"] == pytest.approx(1.5)
    # Data-parallel ranks meet at the end of the step only.
    assert measured_of(in_turn.reshape(1, 2, 1, 1, 2))["dp"] == pytest.approx(1.0)


def test_ranks_of_level_steps_wait_for_the_slowest_of_them():
    """Each has seconds of its own there."""
    seconds = np.array([1.0, 1.8, 1.0, 1.0])
    imbalance = imbalance_of(RankSteps(*[seconds] * 6), (1, 1, 4, 1))
    assert imbalance["cp"] == {"predicted": pytest.approx(1.5), "measured": pytest.approx(1.5)}
    assert imbalance["dp"] == {"predicted": 1.0, "measured": 1.0}
