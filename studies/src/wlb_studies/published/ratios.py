"""Ratios of two systems on the same documents: gains that others measured, beside those that the simulator predicts."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from wlb_studies.published.batches import TABLES
from wlb_studies.published.metrics import Row
from wlb_studies.published.prediction import Prediction

_SYSTEM = ("arm", "policy", "head", "schedule")  # fields of a row that tell systems apart
# Fields that two rows must share for their ratio to be that of two systems alone.
_SAME = (
    "repo",
    "path",
    "table",
    "hardware",
    "model",
    "shape",
    "precision",
    "gpus",
    "seq_len",
    "global_batch",
    "micro_batch",
)


class SystemRatio(NamedTuple):
    """Seconds of ``run`` (``system``) over those of ``base`` (another system), on the ``steps`` that both ran."""

    kind: str
    run: str
    system: str
    base: str
    base_system: str
    steps: int
    measured: float
    predicted: float


def system_ratios(rows: Sequence[Row], predictions: Sequence[Prediction]) -> list[SystemRatio]:
    """Ratios of rows, whose predictions come first and in order, and of measured batches."""
    return [*_of_rows(rows, predictions[: len(rows)]), *_of_batches(predictions)]


def _of_rows(rows: Sequence[Row], predictions: Sequence[Prediction]) -> Iterator[SystemRatio]:
    """Every other row over the first one with the same job and another system."""
    first: dict[str, tuple[str, Prediction]] = {}
    for row, one in zip(rows, predictions, strict=True):
        system = ", ".join(str(row[name]) for name in _SYSTEM if row.get(name) is not None)
        if not system or one.predicted_seconds is None or not one.measured_seconds:
            continue
        base_system, base = first.setdefault(str([row.get(name) for name in _SAME]), (system, one))
        if base_system != system and base.measured_seconds and base.predicted_seconds:
            measured, predicted = (
                one.measured_seconds / base.measured_seconds,
                one.predicted_seconds / base.predicted_seconds,
            )
            yield SystemRatio(one.kind or "", one.row, system, base.row, base_system, 1, measured, predicted)


def _of_batches(predictions: Sequence[Prediction]) -> Iterator[SystemRatio]:
    """Every two runs in a folder that ran the same documents under different systems, plain first.

    Only batches with predictions in both runs and left out in neither count.
    """
    runs: dict[tuple[str, str], dict[str, Prediction]] = {}
    for table in TABLES.values():
        for one in predictions:
            if one.table == table and one.predicted_seconds is not None and not one.left_out:
                runs.setdefault((table, one.run), {})[one.row] = one
    for ((base_table, base), base_rows), ((table, run), rows) in combinations(runs.items(), 2):
        common = [row for row in rows if row in base_rows]
        if table == base_table or PurePosixPath(run).parent != PurePosixPath(base).parent or not common:
            continue
        measured, predicted = (
            sum(getattr(rows[row], field) for row in common) / sum(getattr(base_rows[row], field) for row in common)
            for field in ("measured_seconds", "predicted_seconds")
        )
        system, base_system = (name.rpartition(": ")[2] for name in (table, base_table))
        kind = "DistCA, WLB-LLM and plain data parallelism"
        yield SystemRatio(kind, run, system, base, base_system, len(common), measured, predicted)


class RatioSummary(NamedTuple):
    """Predicted minus measured ratio, in points of a hundredth, for all pairs of a kind; below 0 is optimistic."""

    kind: str
    pairs: int
    median: float
    median_absolute: float
    worst: float


def ratio_summaries(ratios: Sequence[SystemRatio]) -> list[RatioSummary]:
    found = []
    for kind in dict.fromkeys(one.kind for one in ratios):
        points = np.array([100 * (one.predicted - one.measured) for one in ratios if one.kind == kind])
        sizes = np.abs(points)
        median, worst = float(np.median(points)), float(points[sizes.argmax()])
        found.append(RatioSummary(kind, len(points), median, float(np.median(sizes)), worst))
    return found
