"""What a training job wrote about itself into its ``metrics.dir``: ``steps.jsonl`` and ``diagnosis.json``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.terminal import number_of

STEPS, DIAGNOSIS = "steps.jsonl", "diagnosis.json"

# Of diagnosis.json: what is shown of the job, of every rank, and by dimension.
_DIAGNOSED = ("steps", "last_step", "step_seconds", "mean_compute_seconds", "slowest_over_mean")
_OF_RANK = (
    "rank",
    "process",
    "pp",
    "dp",
    "cp",
    "compute_seconds",
    "normalised",
    "core_wait_seconds",
    "data_wait_seconds",
)
_DIMENSIONS = ("tp", "cp", "pp", "dp", "micro_batches")

_LONGEST_LABEL = 22
_COLUMNS = ("step", "tokens", "step_seconds", "data_wait_seconds", "imbalance_degree", "token_delay", "mfu")


@dataclass(frozen=True)
class TrainingRun:
    """Measured steps of a job, without the first of the file, in which it warms up, where there are others.

    Every mean of a run is over all of these steps. ``columns`` holds arrays of shape (steps,) by the names of
    steps.jsonl. ``compute_seconds`` are those of every GPU, shape (pp, dp, cp), of a tensor-parallel group its slowest
    rank; None, as is ``diagnosis``, in a job that has not been diagnosed yet. Both are of ``diagnosed``, the job's last
    steps.
    """

    name: str
    columns: dict[str, NDArray[np.float64]]
    diagnosis: dict[str, Any] | None
    compute_seconds: NDArray[np.float64] | None

    @property
    def label(self) -> str:
        """The name, as far as it fits beside a bar."""
        return self.name if len(self.name) <= _LONGEST_LABEL else self.name[: _LONGEST_LABEL - 1] + "…"

    @property
    def steps(self) -> int:
        return len(self.columns["step"])

    @property
    def work(self) -> NDArray[np.float64]:
        """The model FLOPs of each step, as seconds of all devices at their peak."""
        return self.columns["mfu"] * self.columns["step_seconds"]

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation over all steps: work in a second."""
        return float(self.work.sum() / self.columns["step_seconds"].sum())

    @property
    def tokens_per_second(self) -> float:
        return float(self.columns["tokens"].sum() / self.columns["step_seconds"].sum())

    @property
    def diagnosed(self) -> str:
        """Which steps the diagnosis covers."""
        assert self.diagnosis is not None
        return f"{self.name}: {number_of(self.diagnosis['steps'], 'step')} up to step {self.diagnosis['last_step']}"

    def mean(self, column: str) -> float:
        return float(self.columns[column].mean())


def read_run(path: Path) -> TrainingRun:
    """Read a job's ``metrics.dir``. Raises ``UserError`` for what is missing or was not written by a job."""
    rows = _read_steps(path / STEPS)
    rows = rows[1:] or rows
    columns = {name: np.array([row[name] for row in rows], np.float64) for name in _COLUMNS}
    diagnosis = read_diagnosis(path) if (path / DIAGNOSIS).exists() else None
    seconds = None if diagnosis is None else _compute_seconds(diagnosis)
    return TrainingRun(path.name or str(path), columns, diagnosis, seconds)


def read_diagnosis(metrics_dir: Path) -> dict[str, Any]:
    """What a job last wrote into its ``metrics_dir``; raises ``UserError`` where that cannot be read."""
    path = metrics_dir / DIAGNOSIS
    try:
        diagnosis: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _check_diagnosis(diagnosis)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{metrics_dir} has no {DIAGNOSIS}: name the metrics.dir of a job that has trained metrics.diagnose_every "
            "steps"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path} is not a diagnosis ({type(error).__name__}); let the job write it anew") from error
    return diagnosis


def _check_diagnosis(diagnosis: dict[str, Any]) -> None:
    """Raise an exception of some kind where a field that is shown anywhere is missing or of another type."""
    numbers = [diagnosis[name] for name in _DIAGNOSED]
    for rank in diagnosis["ranks"]:
        numbers += [rank[name] for name in _OF_RANK]
        _ = rank["host"], rank["device"]
    factors = [diagnosis["imbalance"][name][kind] for name in _DIMENSIONS for kind in ("predicted", "measured")]
    for number in (*numbers, *(factor for factor in factors if factor is not None)):
        _number(number)
    _ = [cause["text"] for cause in diagnosis["causes"]]
    _compute_seconds(diagnosis)


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
            rows.append({name: _number(row[name]) for name in _COLUMNS})
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break  # cut short when its writer was killed, or being written
            raise UserError(f"{path}: line {number} is not a step of a training job") from None
    if not rows or not all(row[name] > 0 for row in rows for name in ("step_seconds", "tokens", "mfu")):
        raise UserError(f"{path} holds no steps that took time; let the job train first")
    return rows


def _compute_seconds(diagnosis: dict[str, Any]) -> NDArray[np.float64]:
    ranks = diagnosis["ranks"]
    shape = tuple(1 + max(int(rank[name]) for rank in ranks) for name in ("pp", "dp", "cp"))
    if math.prod(shape) > len(ranks):
        raise ValueError(f"{len(ranks)} ranks do not fill a mesh of {shape}")
    seconds = np.zeros(shape)
    for rank in ranks:
        place = tuple(int(rank[name]) for name in ("pp", "dp", "cp"))
        seconds[place] = max(seconds[place], rank["compute_seconds"])
    return seconds


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
