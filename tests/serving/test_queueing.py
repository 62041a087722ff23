"""The queueing formula, against cases that have exact answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from wlb.serving.queueing import waiting_seconds


def test_one_server_with_exponential_service():
    """M/M/1: a share ``load`` waits, for an exponential time of mean 1 / (service rate - arrival rate)."""
    rate, mean = 0.5, 1.0
    assert waiting_seconds(rate, mean, 2 * mean**2, 1, 0.01) == pytest.approx(math.log(0.5 / 0.01) / (1 - 0.5))


def test_two_servers_with_exponential_service():
    """M/M/2 at a load of 1: Erlang C is 1/3."""
    assert waiting_seconds(1.0, 1.0, 2.0, 2, 0.01) == pytest.approx(math.log(1 / 3 / 0.01) / (2 - 1))


def test_more_servers_wait_less_and_too_few_forever():
    waits = [waiting_seconds(3.0, 1.0, 5.0, servers, 0.01) for servers in range(1, 12)]
    assert waits[:3] == [math.inf] * 3
    assert waits[-1] == 0.0
    assert np.all(np.diff(waits[3:]) <= 0)
