"""What a group takes, against ranks that run layer after layer and meet where ``wlb.attention`` makes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from wlb.sharding.group import RankSeconds, backward_seconds, forward_seconds

LAYERS = 400
seconds = st.floats(0, 10)


@st.composite
def layers(draw: st.DrawFn) -> tuple[RankSeconds, NDArray[np.float64]]:
    """What the ranks of a group compute in one layer, and an exchange."""
    ranks = draw(st.integers(1, 6))
    parts = (np.array(draw(st.lists(seconds, min_size=ranks, max_size=ranks))) for _ in range(3))
    return RankSeconds(*parts), np.array(draw(seconds))


def _forward(ranks: RankSeconds, exchange: float) -> float:
    """The last rank's end; every rank goes on with the next layer as soon as it can."""
    now = np.zeros(len(ranks.own))
    for _ in range(LAYERS):
        arrival = now.max() + exchange  # the slowest sends last
        now = np.maximum(now + ranks.own, arrival) + ranks.received + ranks.rest
    return float(now.max())


def _backward(ranks: RankSeconds, exchange: float, kept: bool) -> float:
    now = np.zeros(len(ranks.own))
    for _ in range(LAYERS):
        if kept:
            now = now + ranks.received
            now = np.maximum(now + ranks.own, now.max() + exchange)
        else:
            now = np.maximum(now + ranks.own, now.max() + exchange) + ranks.received
            now = np.full_like(now, now.max() + exchange)
        now = now + ranks.rest
    return float(now.max())


@settings(deadline=None, max_examples=60)
@given(layers())
def test_many_layers_take_what_one_does_times_their_number(layer):
    ranks, exchange = layer
    slack = 4 * (exchange + sum(part.max() for part in ranks)) / LAYERS + 1e-9  # filling and draining
    assert _forward(ranks, float(exchange)) / LAYERS == pytest.approx(forward_seconds(ranks, exchange), abs=slack)
    for kept in (True, False):
        predicted = backward_seconds(ranks, exchange, np.array(kept))
        assert _backward(ranks, float(exchange), kept) / LAYERS == pytest.approx(predicted, abs=slack)


@settings(deadline=None, max_examples=60)
@given(layers())
def test_keeping_never_takes_longer_than_sending_again(layer):
    ranks, exchange = layer
    kept, again = (backward_seconds(ranks, exchange, np.array(keeps)) for keeps in (True, False))
    assert kept <= again + 1e-12
