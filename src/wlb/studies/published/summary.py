"""How well predictions agree with what was measured, in a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wlb.studies.published.prediction import Prediction

_FEWEST = 3  # points that a correlation is worth giving for


@dataclass(frozen=True)
class Summary:
    """Of all measurements that have the same ``name`` in what they are grouped ``by``.

    ``rows`` were published, ``count`` of them are compared. An error is predicted over measured seconds, less one;
    ``bias`` is the mean error, ``worst_error`` the one furthest from 0. ``slope`` is that of the line through measured
    over predicted seconds, with a constant. None where there are too few points.
    """

    by: str
    name: str
    rows: int
    count: int
    median_error: float | None
    median_absolute_error: float | None
    worst_error: float | None
    bias: float | None
    correlation: float | None
    slope: float | None


def summaries(predictions: Sequence[Prediction], by: str) -> list[Summary]:
    """A summary for each value of the field ``by``, in order of appearance; predictions without one are in none."""
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        name = getattr(prediction, by)
        if name:
            groups.setdefault(name, []).append(prediction)
    return [_summary(by, name, group) for name, group in groups.items()]


def compared(predictions: Sequence[Prediction]) -> list[tuple[float, float]]:
    """Measured and predicted seconds, where there are both and they are not left out."""
    return [
        (one.measured_seconds, one.predicted_seconds)
        for one in predictions
        if one.measured_seconds and one.predicted_seconds is not None and not one.left_out
    ]


def _summary(by: str, name: str, group: Sequence[Prediction]) -> Summary:
    pairs = np.array(compared(group), np.float64).reshape(-1, 2)
    measured, predicted = pairs.T
    errors = predicted / measured - 1

    def of_errors(number: Callable[[np.ndarray], float]) -> float | None:
        return float(number(errors)) if errors.size else None

    correlation = slope = None
    if len(pairs) >= _FEWEST and np.ptp(measured) > 0 and np.ptp(predicted) > 0:
        correlation = float(np.corrcoef(measured, predicted)[0, 1])
        slope = float(np.polyfit(predicted, measured, 1)[0])
    return Summary(
        by=by,
        name=name,
        rows=len(group),
        count=len(pairs),
        median_error=of_errors(np.median),
        median_absolute_error=of_errors(lambda all_of_them: np.median(np.abs(all_of_them))),
        worst_error=of_errors(lambda all_of_them: all_of_them[np.abs(all_of_them).argmax()]),
        bias=of_errors(np.mean),
        correlation=correlation,
        slope=slope,
    )
