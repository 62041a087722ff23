"""A published measurement beside what the simulator predicts for it, and how well many of them agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wlb.errors import UserError

# What reading or pricing a row raises where the row has another form than its table's.
ODD = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError)
FUNCTIONAL = "functional runs"  # of which their source says that they were not tuned
_FEWEST = 3  # points that a correlation is worth giving for


@dataclass(frozen=True)
class Prediction:
    """One measurement of ``table``, in seconds; ``run`` and ``row`` say which of it, ``source`` who measured.

    Without ``predicted_seconds`` there is a ``reason``: what the publication does not say. ``assumed`` is what had to
    be taken for granted where it does not. ``kind`` groups measurements across tables. ``measured_seconds`` is None
    where what was published cannot be converted to seconds, and then so is the prediction. What is ``left_out`` of
    statistics says why.
    """

    table: str
    run: str
    row: str
    source: str
    measured_seconds: float | None = None
    predicted_seconds: float | None = None
    reason: str | None = None
    assumed: str | None = None
    kind: str | None = None
    left_out: str | None = None


def why(error: Exception) -> str:
    """The reason that stands in place of a prediction, for one of ``ODD``."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyError):
        return f"its {error.args[0]} is not published"
    return f"it does not have its table's format: {error}"


def source_of(row: Mapping[str, Any]) -> str:
    """Repository, commit and path."""
    return " ".join(str(row.get(name) or f"{name}?") for name in ("repo", "commit", "path"))


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
    median_error: float | None = None
    median_absolute_error: float | None = None
    worst_error: float | None = None
    bias: float | None = None
    correlation: float | None = None
    slope: float | None = None


def summaries(predictions: Sequence[Prediction], by: str) -> list[Summary]:
    """A summary for each value of the field ``by``, in order of appearance; predictions without one are in none."""
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(getattr(prediction, by), []).append(prediction)
    return [_summary(by, name, group) for name, group in groups.items() if name]


def compared(predictions: Sequence[Prediction]) -> list[tuple[float, float]]:
    """Measured and predicted seconds, where there are both and they are not left out."""
    return [
        (one.measured_seconds, one.predicted_seconds)
        for one in predictions
        if one.measured_seconds and one.predicted_seconds is not None and not one.left_out
    ]


def _summary(by: str, name: str, group: Sequence[Prediction]) -> Summary:
    measured, predicted = np.array(compared(group), np.float64).reshape(-1, 2).T
    errors = predicted / measured - 1
    correlation = slope = None
    if len(errors) >= _FEWEST and np.ptp(measured) > 0 and np.ptp(predicted) > 0:
        correlation = float(np.corrcoef(measured, predicted)[0, 1])
        slope = float(np.polyfit(predicted, measured, 1)[0])
    if not errors.size:
        return Summary(by, name, len(group), 0)
    sizes = np.abs(errors)
    return Summary(
        by,
        name,
        rows=len(group),
        count=len(errors),
        median_error=float(np.median(errors)),
        median_absolute_error=float(np.median(sizes)),
        worst_error=float(errors[sizes.argmax()]),
        bias=float(np.mean(errors)),
        correlation=correlation,
        slope=slope,
    )
