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
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np

from wlb.errors import UserError, require
from wlb.job.config import MetricsConfig
from wlb.terminal import columns
from wlb.training.console import say
from wlb.training.evaluation.held_out import Evaluation
from wlb.training.failures import TrainingError

STEPS = "steps.jsonl"  # in metrics.dir
_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE_COLUMNS = 40
_NOT_PLOTTED = {"step", "document_ids", "segments", "slow_ranks", "store_tokens"}
_SHORT = {"micro_batches": "mb"}  # in the live line
_SHORT_OF_POOLS = _SHORT | {"cp": "pool", "dp": "pools"}


class MetricsWriter:
    """Writes the metrics of a job that continues after ``last_step`` (0 for a new job).

    ``evaluated`` is the last step up to it whose evaluation is on record. With ``pooled`` the live line names pools.
    """

    def __init__(self, config: MetricsConfig, last_step: int, *, pooled: bool = False) -> None:
        self._pooled = pooled
        self._last: dict[str, Any] = {"step": None, "loss": None}
        self._tokens = self._documents = 0
        self._losses, self._seconds, self._imbalance = array("d"), array("d"), array("d")  # of every step, for months
        self._evaluation: Evaluation | None = None
        self._unlabelled_reported = False
        try:
            config.dir.mkdir(parents=True, exist_ok=True)
            self._rows, self._evaluations = config.dir / STEPS, config.dir / "evaluation.jsonl"
            for path in (self._rows, self._evaluations):
                if note := continue_file(path, last_step):
                    say(note)
            self.evaluated = last_step_in(self._evaluations)
            self._rows.open("a").close()
        except OSError as error:
            raise UserError(f"metrics.dir {config.dir} cannot be written: {error.strerror}") from error
        self._tensorboard = _tensorboard(config.dir, last_step) if config.tensorboard else None

    def write(self, row: dict[str, Any]) -> None:
        """Add a step, which becomes a line of steps.jsonl. Steps count from 1.

        ``loss`` is the mean over the step's labelled tokens and ``grad_norm`` the global norm before clipping; what is
        not finite is null, as JSON has no word for it, and the step ``skipped``. ``documents`` counts, and
        ``document_ids`` lists, the documents that the step finished: no part of them waits any more, so over an epoch
        each document appears once, however it was split. ``token_delay`` is the mean steps a token waited since it
        arrived; of ``pending_documents`` a part still waits. ``step_seconds`` includes ``data_wait_seconds``;
        ``planning_seconds`` were spent in another thread. ``mfu`` is the model FLOPs utilisation of ``reporter``,
        ``imbalance`` that of ``imbalance``; ``slow_ranks`` are those that ``diagnosis`` reported and that are slow
        still. ``segments`` are all that the step trained, in the order of documents. ``store_tokens`` has the tokens
        that come from each store of a mixture; ``loss_tokens`` are those that have a label. What is None is left out.
        """
        row = {name: value for name, value in row.items() if value is not None}
        self._tokens += row["tokens"]
        self._documents += row["documents"]
        self._losses.append(row["loss"])
        self._seconds.append(row["step_seconds"])
        self._imbalance.append(row["imbalance_degree"])
        unknown = {name: None for name in ("loss", "grad_norm") if not math.isfinite(row[name])}
        self._last = row | unknown | ({"skipped": True} if unknown else {})
        _append(self._rows, self._last)
        if self._tensorboard is not None:
            for name, value in _scalars(self._last):
                self._tensorboard.add_scalar(name, value, row["step"])
        if row.get("loss_tokens") == 0 and not self._unlabelled_reported:
            self._unlabelled_reported = True  # the others are in steps.jsonl
            say(
                f"wlb: warning: step {row['step']} has no labelled token among its {row['tokens']:,}, so its loss "
                "and gradients are zero; look at the masks of its documents (metrics.document_ids)"
            )
        say(live_line(row, columns(), pooled=self._pooled))

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
        seconds = self._seconds
        return {
            "steps": len(seconds),
            "last_step": self._last["step"],
            "tokens": self._tokens,
            "documents": self._documents,
            "median_step_seconds": statistics.median(seconds) if seconds else None,
            "tokens_per_second": self._tokens / sum(seconds) if seconds else None,
            "mean_imbalance_degree": statistics.fmean(self._imbalance) if seconds else None,
            "last_loss": self._last["loss"],
            "evaluation_loss": self._evaluation.to_json(0)["loss"] if self._evaluation else None,
        }

    def closing_lines(self) -> Iterator[str]:
        """What the steps of this run came to; nothing where none was trained."""
        if not self._seconds:
            return
        seconds = sum(self._seconds)
        yield (
            f"trained to step {self._last['step']}: {self._tokens:,} tokens in {seconds:,.1f} s, "
            f"{self._tokens / seconds:,.0f} tokens/s"
        )
        if finite := [loss for loss in self._losses if math.isfinite(loss)]:
            yield f"loss {finite[0]:.4f} to {finite[-1]:.4f}  {sparkline(finite)}"

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


LEGEND = (
    "imbalance: slowest over mean micro-batch, predicted; at the end by dimension, predicted/measured (1: even)\n"
    "delay: steps a token waits, mean; data wait: share of the step; pending: documents taken in and not trained yet"
)


def live_line(row: dict[str, Any], columns: int | None = None, *, pooled: bool = False) -> str:
    """A step in one line, what matters most first; what does not fit into ``columns`` is left out from the end.

    Imbalance by dimension is predicted/measured, where the dimension has more than one rank.
    """
    short = _SHORT_OF_POOLS if pooled else _SHORT
    fields = [
        f"step {row['step']}",
        f"loss {row['loss']:.4f}",
        f"{row['tokens_per_second']:,.0f} tokens/s",
        f"{row['step_seconds']:.2f} s",
        f"imbalance {row['imbalance_degree']:.3f}",
        f"delay {row['token_delay']:.2f}",
        f"mfu {row['mfu']:.1%}",
        f"data wait {row['data_wait_seconds'] / row['step_seconds']:.0%}",
        f"{row['pending_documents']} pending",
    ]
    fields += [
        f"{short.get(name, name)} {factor['predicted']:.2f}/{factor['measured']:.2f}"
        for name, factor in row["imbalance"].items()
        if factor["predicted"] is not None and factor["measured"] is not None and factor["measured"] != 1
    ]
    prefixes = accumulate(fields, "{}  {}".format)
    *_, fitting = fields[0], *takewhile(lambda line: columns is None or len(line) <= columns, prefixes)
    return fitting


def sparkline(values: Sequence[float]) -> str:
    """Finite ``values`` as bars between the least and the largest, of at most 40 columns: each a mean of some."""
    finite = np.array(values)[np.isfinite(values)]
    means = np.array([part.mean() for part in np.array_split(finite, min(len(finite), _SPARKLINE_COLUMNS) or 1)])
    heights = (means - means.min()) / (np.ptp(means) or 1.0) * (len(_BARS) - 1)
    return "".join(_BARS[height] for height in heights.round().astype(int))


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
    """The step of the last whole line; 0 without one."""
    steps = (_step_of(line) for _, line in _lines_from_end(path))
    return next((int(step) for step in steps if math.isfinite(step)), 0)


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
