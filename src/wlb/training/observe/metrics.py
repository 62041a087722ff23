"""The files of a job's metrics: ``steps.jsonl``, ``evaluation.jsonl`` and TensorBoard's, as rank 0 writes them.

A file never holds a step twice: a resumed job first removes the lines after its checkpoint, and a new job renames an
older file. Both read only the end of the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import takewhile
from math import inf
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal

from wlb.errors import UserError, require
from wlb.job.config import MetricsConfig
from wlb.training.console import say
from wlb.training.failures import TrainingError

STEPS = "steps.jsonl"  # in metrics.dir


class MetricsFiles:
    """The files of a job that continues after ``last_step`` (0: a new job); ``evaluated`` is the last step evaluated.

    Raises ``UserError`` if they cannot be written.
    """

    def __init__(self, config: MetricsConfig, last_step: int) -> None:
        self._directory, self._tensorboard = config.dir, None
        try:
            config.dir.mkdir(parents=True, exist_ok=True)
            for path in (config.dir / STEPS, config.dir / "evaluation.jsonl"):
                if note := continue_file(path, last_step):
                    say(note)
            self.evaluated = last_step_in(path)
            (config.dir / STEPS).open("a").close()
            if config.tensorboard:
                require("tensorboard", "train")
                from torch.utils.tensorboard import SummaryWriter

                self._tensorboard = SummaryWriter(str(config.dir), purge_step=last_step + 1)
        except OSError as error:
            raise UserError(
                f"metrics.dir {config.dir} cannot be written: {error.strerror}; choose another metrics.dir"
            ) from error

    def write(self, file: Literal["steps", "evaluation"], row: dict[str, Any]) -> None:
        """Append the row of step ``row["step"]``. Raises ``TrainingError`` if that fails."""
        path = self._directory / f"{file}.jsonl"
        try:
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row, allow_nan=False) + "\n")
            if self._tensorboard is not None:
                for name, value in _scalars(row if file == "steps" else {file: row}):
                    self._tensorboard.add_scalar(name, value, row["step"])
        except OSError as error:
            raise TrainingError(
                f"step {row['step']}: metrics.dir {path} cannot be written: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Flush and close the TensorBoard files."""
        if self._tensorboard is not None:
            self._tensorboard.close()


def _scalars(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row, with nested names joined by "/"; lists are not plotted."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, value


def continue_file(path: Path, last_step: int) -> str | None:
    """Make ``path`` end with ``last_step``, or rename it for a new job (0); returns a note if it did anything."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    if last_step == 0:
        aside = next(name for n in range(1, 10**6) if not (name := path.with_suffix(f".{n}.jsonl")).exists())
        os.replace(path, aside)
        return f"metrics of an earlier run are now in {aside}"
    later = [start for start, _ in takewhile(lambda line: line[1] > last_step, _lines_from_end(path))]
    if not later:
        return None
    os.truncate(path, later[-1])
    return f"{path} goes back to step {last_step}, later lines removed: {len(later)}"


def last_step_in(path: Path) -> int:
    """The step of the last whole line; 0 without one."""
    return next((int(step) for _, step in _lines_from_end(path) if step < inf), 0)


def _lines_from_end(path: Path) -> Iterator[tuple[int, float]]:
    """The start of each line and its step, last line first; infinity for a line that a killed writer cut short."""
    if not path.exists() or not (end := path.stat().st_size):
        return
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            line, end = content[start:end], start
            try:
                yield start, int(json.loads(line)["step"]) if line.endswith(b"\n") else inf
            except (ValueError, KeyError, TypeError):
                yield start, inf
