"""The measured steps of a training job, read from ``steps.jsonl`` in its ``metrics.dir``."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError

STEPS = "steps.jsonl"

_LONGEST_LABEL = 22
_COLUMNS = ("step", "tokens", "step_seconds", "data_wait_seconds", "imbalance_degree", "token_delay", "mfu")
_KINDS = ("predicted", "measured")


@dataclass(frozen=True)
class TrainingRun:
    """The measured steps of a job without the first one, which warms up (unless it is the only one).

    Every mean of a run covers all of these steps. ``columns`` has an array of shape (steps,) per name of steps.jsonl;
    the values of ``slowest_rank`` are "predicted" and "measured".
    """

    name: str
    columns: dict[str, NDArray[np.float64]]

    @property
    def label(self) -> str:
        """The name, cut to fit beside a bar."""
        return self.name if len(self.name) <= _LONGEST_LABEL else self.name[: _LONGEST_LABEL - 1] + "…"

    @property
    def steps(self) -> int:
        return len(self.columns["step"])

    @property
    def work(self) -> NDArray[np.float64]:
        """The model FLOPs of each step, in seconds of all devices at peak."""
        return self.columns["mfu"] * self.columns["step_seconds"]

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation over all steps."""
        return float(self.work.sum() / self.columns["step_seconds"].sum())

    @property
    def tokens_per_second(self) -> float:
        return float(self.columns["tokens"].sum() / self.columns["step_seconds"].sum())

    def mean(self, column: str) -> float:
        return float(self.columns[column].mean())


def read_run(path: Path) -> TrainingRun:
    """Read the ``metrics.dir`` of a job. Raises ``UserError`` for a missing file, or one that no job wrote."""
    rows = _read_steps(path / STEPS)
    rows = rows[1:] or rows
    return TrainingRun(path.name or str(path), {name: np.array([row[name] for row in rows]) for name in rows[0]})


def _read_steps(path: Path) -> list[dict[str, float]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):  # a file of lengths beside --before
        raise UserError(f"{path.parent} has no {STEPS}: name the metrics.dir of a training job") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    rows: list[dict[str, float]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            factors = {kind: _number(row["slowest_rank"][kind]) for kind in _KINDS}
            rows.append({name: _number(row[name]) for name in _COLUMNS} | factors)
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break  # cut short when its writer was killed, or being written
            raise UserError(f"{path}: line {number} is not a step of a training job") from None
    if not rows or not all(row[name] > 0 for row in rows for name in ("step_seconds", "tokens", "mfu")):
        raise UserError(f"{path} holds no steps that took time; let the job train first")
    return rows


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
