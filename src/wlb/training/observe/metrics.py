"""The metrics of each step: a console line, a JSON line and TensorBoard scalars.

Only rank 0 writes. ``steps.jsonl`` never holds a step twice: a resumed job first cuts off what was written past its
checkpoint, a new job sets an older file aside. Only the end of the file is read for that, so it takes as long after ten
million steps as after ten.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from wlb.documents.segments import Segment
from wlb.errors import UserError, require
from wlb.job.config import MetricsConfig
from wlb.training.evaluation.held_out import Evaluation
from wlb.training.observe.imbalance import Imbalance
from wlb.training.runtime.console import end_progress, say, show_progress
from wlb.training.runtime.failures import TrainingError

_NOT_PLOTTED = {"step", "document_ids", "segments", "slow_ranks", "store_tokens"}
_SHORT = {"micro_batches": "mb"}  # in the live line
_SHORT_OF_POOLS = _SHORT | {"cp": "pool", "dp": "pools"}


@dataclass(frozen=True)
class StepMetrics:
    """One line of steps.jsonl; steps count from 1.

    ``loss`` is the mean over the step's labelled tokens and ``grad_norm`` the global norm before clipping.
    ``documents`` counts, and ``document_ids`` lists, the documents that the step finished: no part of them waits any
    more, so over an epoch each document appears once, however it was split. ``token_delay`` is the mean steps a token
    waited since it arrived; of ``pending_documents`` a part still waits. ``step_seconds`` includes
    ``data_wait_seconds``; ``planning_seconds`` were spent in another thread. ``mfu`` is the model FLOPs utilisation of
    ``observer``, ``imbalance`` that of ``imbalance``; ``slow_ranks`` are those that ``stragglers`` reported and that
    are slow still. ``segments`` are all that the step trained, in the order of documents. ``store_tokens`` has the
    tokens that come from each store of a mixture; ``loss_tokens`` are those that have a label.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    documents: int
    step_seconds: float
    tokens_per_second: float
    imbalance_degree: float
    token_delay: float
    data_wait_seconds: float
    planning_seconds: float
    pending_documents: int
    mfu: float
    imbalance: Imbalance
    slow_ranks: tuple[int, ...]
    document_ids: tuple[int, ...] | None = None
    segments: tuple[Segment, ...] | None = None
    store_tokens: tuple[int, ...] | None = None
    loss_tokens: int | None = None

    @property
    def skipped(self) -> bool:
        """Whether the step left the weights as they were: its loss or its gradient norm is not finite."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    def to_json(self) -> dict[str, Any]:
        """The row of steps.jsonl; what is not finite is null, as JSON has no word for it."""
        row = {name: value for name, value in asdict(self).items() if value is not None}
        if self.skipped:
            row["skipped"] = True
            row |= {name: None for name in ("loss", "grad_norm") if not math.isfinite(row[name])}
        return row


class MetricsWriter:
    """Writes the metrics of a job that continues after ``last_step`` (0 for a new job).

    ``evaluated`` is the last step up to it whose evaluation is on record. With ``pooled`` the live line names pools.
    """

    def __init__(self, config: MetricsConfig, last_step: int, *, pooled: bool = False) -> None:
        self._pooled = pooled
        self._last: StepMetrics | None = None
        self._tokens = self._documents = 0
        self._seconds, self._imbalance = array("d"), array("d")  # of every step: 16 bytes, over months of them
        self._evaluation: Evaluation | None = None
        self._unlabelled_reported = False
        try:
            config.dir.mkdir(parents=True, exist_ok=True)
            self._rows, self._evaluations = config.dir / "steps.jsonl", config.dir / "evaluation.jsonl"
            for path in (self._rows, self._evaluations):
                if note := continue_file(path, last_step):
                    say(note)
            self.evaluated = last_step_in(self._evaluations)
            self._rows.open("a").close()
        except OSError as error:
            raise UserError(f"metrics.dir {config.dir} cannot be written: {error.strerror}") from error
        self._tensorboard = _tensorboard(config.dir, last_step) if config.tensorboard else None

    def write(self, metrics: StepMetrics) -> None:
        self._last = metrics
        self._tokens += metrics.tokens
        self._documents += metrics.documents
        self._seconds.append(metrics.step_seconds)
        self._imbalance.append(metrics.imbalance_degree)
        row = metrics.to_json()
        _append(self._rows, row)
        if self._tensorboard is not None:
            for name, value in _scalars(row):
                self._tensorboard.add_scalar(name, value, metrics.step)
        if metrics.loss_tokens == 0 and not self._unlabelled_reported:
            self._unlabelled_reported = True  # the others are in steps.jsonl
            say(
                f"wlb: warning: step {metrics.step} has no labelled token among its {metrics.tokens:,}, so its loss "
                "and gradients are zero; look at the masks of its documents (metrics.document_ids)"
            )
        show_progress(live_line(metrics, pooled=self._pooled))

    def write_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        _append(self._evaluations, evaluation.to_json(step))
        if self._tensorboard is not None:
            self._tensorboard.add_scalar("evaluation/loss", evaluation.loss, step)
            for bucket in evaluation.buckets:
                if bucket.tokens:
                    self._tensorboard.add_scalar(f"evaluation/loss by length/{bucket.name}", bucket.loss, step)
        say(evaluation.line(step))

    def summary(self) -> dict[str, Any]:
        """The steps of this run in one object; means and medians are null when no step was trained."""
        last, seconds = self._last, self._seconds
        return {
            "steps": len(seconds),
            "last_step": last.step if last else None,
            "tokens": self._tokens,
            "documents": self._documents,
            "median_step_seconds": statistics.median(seconds) if seconds else None,
            "tokens_per_second": self._tokens / sum(seconds) if seconds else None,
            "mean_imbalance_degree": statistics.fmean(self._imbalance) if seconds else None,
            "last_loss": last.to_json()["loss"] if last else None,
            "evaluation_loss": self._evaluation.to_json(0)["loss"] if self._evaluation else None,
        }

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        end_progress()


LEGEND = (
    "imbalance: slowest over mean micro-batch, predicted; at the end by dimension, predicted/measured (1: even)\n"
    "delay: steps a token waits, mean; data wait: share of the step; pending: documents taken in and not trained yet"
)


def live_line(metrics: StepMetrics, *, pooled: bool = False) -> str:
    """A step in one line, of which 80 columns show what matters most.

    Imbalance by dimension is predicted/measured, where the dimension has more than one rank.
    """
    short = _SHORT_OF_POOLS if pooled else _SHORT
    by_dimension = "".join(
        f"  {short.get(name, name)} {factor['predicted']:.2f}/{factor['measured']:.2f}"
        for name, factor in metrics.imbalance.items()
        if factor["predicted"] is not None and factor["measured"] is not None and factor["measured"] != 1
    )
    return (
        f"step {metrics.step}  loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s  "
        f"{metrics.step_seconds:.2f} s  imbalance {metrics.imbalance_degree:.3f}  delay {metrics.token_delay:.2f}  "
        f"mfu {metrics.mfu:.1%}  data wait {metrics.data_wait_seconds / metrics.step_seconds:.0%}  "
        f"{metrics.pending_documents} pending{by_dimension}"
    )


def _append(path: Path, row: dict[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise TrainingError(f"step {row['step']}: metrics.dir {path} cannot be written: {error.strerror}") from error


def _scalars(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """What can be plotted of a row, nested names joined by "/"."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}/")
        elif name not in _NOT_PLOTTED and value is not None:
            yield prefix + name, value


def _tensorboard(directory: Path, last_step: int) -> Any:
    require("tensorboard", "train")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=last_step + 1)


def continue_file(path: Path, last_step: int) -> str | None:
    """Make ``path`` end with ``last_step``, or set it aside for a new job (0); what was done, if anything was."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    if last_step == 0:
        aside = next(name for n in range(1, 10**6) if not (name := path.with_suffix(f".{n}.jsonl")).exists())
        os.replace(path, aside)
        return f"metrics of an earlier run are now in {aside}"
    later = [start for start, _ in takewhile(lambda line: _step_of(line[1]) > last_step, _lines_from_end(path))]
    if not later:
        return None
    os.truncate(path, later[-1])
    return f"{path} goes back to step {last_step}, later lines removed: {len(later)}"


def last_step_in(path: Path) -> int:
    """The step of the last line; 0 without one."""
    return next((int(_step_of(line)) for _, line in _lines_from_end(path)), 0)


def _lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines, the last one first, each with the number of bytes before it."""
    if not path.exists() or not (end := path.stat().st_size):
        return
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            yield start, content[start:end]
            end = start


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut short when its writer was killed
