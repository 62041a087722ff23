"""The benchmark of the simulator compares speeds at equal work."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _module(name: str) -> Any:
    sys.path[:0] = [str(BENCHMARKS)]
    return importlib.import_module(name)


@pytest.fixture(autouse=True)
def _path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
    for name in [*sys.modules]:  # other benchmarks' folders have parts, too
        if name == "parts" or name.startswith("parts."):
            del sys.modules[name]


def test_predicted_and_measured_speeds_are_compared_at_equal_work() -> None:
    turns = _module("parts.training.turns")
    base = turns.Trained("dp", "plain-4d", [4.0, 4.0], [5.0, 5.0], work=8.0, in_repetitions=[8.0])
    same = turns.Trained("dp", "best", [6.0], [7.5], work=9.0, in_repetitions=[6.0])
    assert (same.measured_speed(base), same.predicted_speed(base), same.apart(base)) == pytest.approx((1.5, 1.5, 0.0))
    assert same.speeds_in_repetitions(base) == [1.5]
    slower = turns.Trained("dp", "best", [6.0], [10.0], work=9.0, in_repetitions=[6.0])
    assert slower.apart(base) == pytest.approx(-0.25)
