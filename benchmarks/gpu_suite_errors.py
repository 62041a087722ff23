"""How far predictions are from what the other sections measured, as shares of the measured seconds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from gpu_suite_setting import Comparison, Row


def errors(comparisons: Iterable[Comparison]) -> list[Row]:
    """Median, 90th percentile and worst error of every workload on every kind of work."""
    return [
        {"what": comparison.what, "workload": name, "count": len(predicted)} | _summary(predicted, comparison.measured)
        for comparison in comparisons
        for name, predicted in comparison.predicted.items()
    ]


def _summary(predicted: list[float], measured: list[float]) -> dict[str, float]:
    shares = np.abs(np.array(predicted) / np.array(measured) - 1)
    return {"median": float(np.median(shares)), "p90": float(np.quantile(shares, 0.9)), "worst": float(shares.max())}
