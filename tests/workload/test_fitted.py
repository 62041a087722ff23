"""Prices fitted to measured micro-batches: found again, under noise and outliers, and as a profile."""

import numpy as np
import pytest

from wlb.errors import UserError
from wlb.workload import Costs, ModelShape
from wlb.workload.fitted import FittedPrices, fit_prices
from wlb.workload.hardware import HARDWARE

TRUE = FittedPrices(square=2e-9, token=3e-6, fixed=4e-3, r_squared=1.0)
SHAPE = ModelShape(hidden=128, layers=2, heads=2, kv_heads=2, head_dim=64, ffn_hidden=352, vocab_size=512)


def micro_batches(count: int, ranks: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Squares and tokens of shape (count, ranks), and what the slowest rank takes."""
    rng = np.random.default_rng(seed)
    documents = [[rng.lognormal(6, 1.2, rng.integers(2, 20)).round() for _ in range(ranks)] for _ in range(count)]
    squares = np.array([[(d**2).sum() for d in rank] for rank in documents])
    tokens = np.array([[d.sum() for d in rank] for rank in documents])
    return squares, tokens, (TRUE.square * squares + TRUE.token * tokens + TRUE.fixed).max(axis=1)


@pytest.mark.parametrize("ranks", [1, 4])
def test_prices_are_found_again(ranks):
    found = fit_prices(*micro_batches(64, ranks))
    assert (found.square, found.token, found.fixed) == pytest.approx((TRUE.square, TRUE.token, TRUE.fixed), rel=1e-6)
    assert found.r_squared == pytest.approx(1.0)


def test_noise_and_a_slow_start_do_not_mislead():
    squares, tokens, seconds = micro_batches(256)
    noisy = seconds * np.random.default_rng(1).normal(1, 0.05, len(seconds))
    noisy[:3] *= 30
    found = fit_prices(squares, tokens, noisy)
    typical = [300, 2000, 5000]
    assert found.seconds(typical) == pytest.approx(TRUE.seconds(typical), rel=0.03)
    assert 0.9 < found.r_squared < 1


def test_short_micro_batches_tell_what_each_costs_beside_its_documents():
    squares, tokens, seconds = (array[:, 0] if array.ndim == 2 else array for array in micro_batches(256))
    long = np.arange(256) % 8 > 0  # in most, noise hides it
    scale = np.where(long, 20, 1)
    noisy = (seconds + (scale - 1) * (seconds - TRUE.fixed)) * np.random.default_rng(1).normal(1, 0.05, 256)
    assert fit_prices(scale * squares, scale * tokens, noisy).fixed == pytest.approx(TRUE.fixed, rel=0.25)


def test_a_term_that_explains_nothing_is_zero():
    squares, tokens, _ = micro_batches(64)
    found = fit_prices(squares, tokens, TRUE.token * tokens[:, 0])
    assert (found.square, found.fixed) == (0, 0)
    assert found.token == pytest.approx(TRUE.token)


def test_a_profile_of_them_has_their_prices():
    profile = TRUE.profile(SHAPE, machine="here", versions={}, dtype="float32", clock="CPU seconds")
    costs = Costs(SHAPE, HARDWARE["cpu"], profile=profile)
    lengths = np.array([100, 1000, 7000])
    seconds = costs.attention_seconds(lengths).sum() + costs.linear_seconds(lengths.sum())
    assert seconds == pytest.approx(TRUE.seconds(lengths), rel=1e-3)
    in_pieces = costs.piece_seconds([0, 500], [500, 1000]).sum()
    assert in_pieces == pytest.approx(float(costs.attention_seconds(1000)), rel=1e-3)


def test_too_few_micro_batches_are_refused():
    with pytest.raises(UserError, match="at least 8 measured micro-batches; only 3 were measured"):
        fit_prices([1, 2, 3], [1, 2, 3], [1, 2, 3])
