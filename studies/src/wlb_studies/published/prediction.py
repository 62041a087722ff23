"""A published measurement and the simulator's prediction, and how well many of them agree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wlb.errors import UserError

# Exceptions from reading or pricing a row that does not have its table's format.
ODD = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError)
FUNCTIONAL = "functional runs"  # their source says that they were not tuned
_FEWEST = 3  # fewest points for a correlation


@dataclass(frozen=True)
class Prediction:
    """One measurement of ``table`` in seconds; ``run`` and ``row`` identify it, ``source`` says who measured.

    Without ``predicted_seconds`` there is a ``reason``, such as a missing setting. ``assumed`` lists assumptions where
    the publication is silent. ``kind`` groups measurements across tables. ``measured_seconds`` is None if the published
    value cannot be converted to seconds; then so is the prediction. ``missing`` is the first thing that the prediction
    is known to lack. ``left_out`` says why statistics leave a row out.
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
    missing: str | None = None
    left_out: str | None = None


def why(error: Exception) -> str:
    """The reason instead of a prediction, for an exception in ``ODD``."""
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
    """Summary of all measurements with the same ``name`` in the field that they are grouped ``by``.

    ``rows`` were published, ``count`` of them are compared. An error is predicted over measured seconds, minus one;
    ``bias`` is the mean error, ``worst_error`` the error furthest from 0. ``slope`` belongs to the line (with constant)
    of measured over predicted seconds. Values are None if there are too few points.
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
    """A summary for each value of the field ``by``, in order of appearance; predictions without a value are skipped."""
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(getattr(prediction, by), []).append(prediction)
    return [_summary(by, name, group) for name, group in groups.items() if name]


def compared(predictions: Sequence[Prediction]) -> list[tuple[float, float]]:
    """Measured and predicted seconds of rows that have both and are not left out."""
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
