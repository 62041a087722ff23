"""The benchmark of training compares measured and predicted speeds at equal work."""

from typing import Any

import pytest

from benchmarks.parts.training.turns import Trained


def _trained(preset: str, *, cpu: list[float], predicted: list[float], work: float) -> Trained:
    rest: dict[str, Any] = {"tokens": [4] * len(cpu), "imbalance_degree": 1.0, "exchanged": 0.0, "busy": 0.8}
    repeated = [sum(cpu), 1.5 * sum(cpu)] if preset == "balanced" else [sum(cpu), sum(cpu)]
    rest |= {"clock_of_repetitions": repeated[:1], "differences": {}}
    return Trained(
        "dp", preset, cpu=cpu, clock=cpu, cpu_of_repetitions=repeated, predicted=predicted, work=work, **rest
    )


def test_predicted_and_measured_speeds_are_compared_at_equal_work() -> None:
    base = _trained("plain-4d", cpu=[4.0, 4.0], predicted=[5.0, 5.0], work=8.0)
    row = _trained("balanced", cpu=[6.0], predicted=[7.5], work=9.0).row(base)
    assert (row["speed"], row["predicted_speed"], row["apart"]) == pytest.approx((1.5, 1.5, 0.0))
    assert row["most"] == row["clock_speed"] == row["clock_least"] == row["clock_most"] == 1.5
    assert row["least"] == 1.0
    assert row["of_ideal"] == pytest.approx(1.5 * 0.8)
    assert row["prediction_error"] == pytest.approx(0.25)
    slower = _trained("balanced", cpu=[6.0], predicted=[10.0], work=9.0).row(base)
    assert slower["apart"] == pytest.approx(-0.25)
