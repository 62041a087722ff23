"""Figure 16, measured: does packing change what a model learns?

The same small model is trained on the source of Python's standard library with every packing method, on the same
documents in the same order, from the same weights. The baseline, which the paper lacks, is ``unpacked``: whole
documents in order of arrival. A difference counts as real if its mean over seeds is outside the 95% interval of
Student's t around zero, with the pooled spread of the paired differences of all methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.documents.permutation import Permutation
from wlb.documents.store.reader import TokenStore
from wlb_studies.experiment import Column, Finding, Report, Settings, Table
from wlb_studies.paper import paper
from wlb_studies.paper.training_runs import MICRO_BATCHES, WINDOW, SeedRun, prepare_data, runs_of, train_all
from wlb_studies.plots import COLOURS, pyplot_without_display, save, tidy

_STEPS = 400
_LAST_SHARE = 0.1  # last share of all steps, over which the final training loss is averaged
_POINTS = 50  # points of a training curve
_BASE = "unpacked"
# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom; beyond the table, the normal quantile.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.960


class Trained(NamedTuple):
    """Results of one run. Curves are (steps, losses); the training loss is averaged over equal groups of steps."""

    training: tuple[list[float], list[float]]
    held_out: tuple[list[float], list[float]]
    final_training: float
    final_held_out: float
    still_falling: float  # relative drop of the held-out loss over the last tenth of the run
    token_delay: float
    displaced_steps: float
    displaced_share: float
    longest: float


class Displacement(NamedTuple):
    """Steps between a document's place in arrival order and the step that finished it, for finished documents.

    Places in arrival order assume the run's mean tokens per step. ``moved`` is the share of tokens trained more than
    one step away from their place.
    """

    mean_steps: float  # absolute, weighted by tokens
    moved: float
    longest: float


def run(settings: Settings) -> Report:
    seeds = [settings.seed + index for index in range(settings.seeds)]
    steps = settings.steps or _STEPS
    settings.on_progress("preparing the standard library")
    data = prepare_data(settings.out / "convergence" / "data")
    runs = runs_of(settings.out, steps, seeds)
    settings.on_progress(f"{sum(run.finished for run in runs)} of {len(runs)} runs finished")
    train_all(runs, data, settings.on_progress)
    lengths = TokenStore.open(data[0]).lengths
    methods: dict[str, list[Trained]] = {}
    for one in runs:
        methods.setdefault(one.method, []).append(measured(one, lengths))
    return report(methods, steps, seeds)


def measured(run: SeedRun, lengths: NDArray[np.int64]) -> Trained:
    """The results that a finished run wrote."""
    lines, evaluations = run.lines(), run.evaluations()
    losses = np.array([line["loss"] for line in lines])
    groups = np.array_split(np.arange(len(losses)), min(_POINTS, len(losses)))
    held_out = [float(evaluation["loss"]) for evaluation in evaluations]
    tokens = np.array([line["tokens"] for line in lines])
    moved = displacement([line["document_ids"] for line in lines], tokens.tolist(), lengths, run.seed)
    return Trained(
        ([float(group[-1]) + 1 for group in groups], [float(losses[group].mean()) for group in groups]),
        ([float(evaluation["step"]) for evaluation in evaluations], held_out),
        float(losses[-max(1, round(_LAST_SHARE * len(losses))) :].mean()),
        held_out[-1],
        1 - held_out[-1] / held_out[-2] if len(held_out) > 1 else 0.0,
        float(np.average([line["token_delay"] for line in lines], weights=tokens)),
        *moved,
    )


def displacement(
    finished: Sequence[Sequence[int]], tokens: Sequence[int], lengths: NDArray[np.int64], seed: int
) -> Displacement:
    """Computed from the ``finished`` documents and ``tokens`` of every step and the store's ``lengths``."""
    documents = np.array([document for of_step in finished for document in of_step], np.int64)
    step = np.repeat(np.arange(len(finished)), [len(of_step) for of_step in finished])
    epochs = int(documents.max(initial=0)) // len(lengths) + 1
    count = len(lengths)
    orders = [Permutation(count, seed, epoch, 0).between(0, count) + epoch * count for epoch in range(epochs)]
    order = np.concatenate(orders)
    ends = np.empty(len(order))
    ends[order] = np.cumsum(lengths[order % len(lengths)])
    place = (ends[documents] - 1) // np.mean(tokens)  # the step of its last token in arrival order
    weights = lengths[documents % len(lengths)]
    distance = np.abs(step - place)
    return Displacement(
        float(np.average(distance, weights=weights)),
        float(np.average(distance > 1, weights=weights)),
        float(distance.max()),
    )


def report(methods: dict[str, list[Trained]], steps: int, seeds: list[int]) -> Report:
    losses = [_Loss.of(methods, what) for what in ("training", "held_out")]
    return Report(
        title="Convergence of a small model under each packing method (paper: Figure 16)",
        documents="source and prose of this Python's standard library, bytes; one document in 20 is held out",
        tables=[_ends(losses), _orders(methods), *map(_curve_table, losses)],
        draw=partial(_draw, losses),
        findings=_findings(losses),
        notes=[
            f"model tiny (hidden 128), window {WINDOW:,}, {MICRO_BATCHES} windows a step, {steps} steps, seeds "
            f"{', '.join(map(str, seeds))}: of the weights and of the order of documents",
            "training loss: mean of the last tenth of the steps; ± is half the range over seeds",
            "quoted: fixed-length packing over 8 global batches against 1, a 550M model, 52K steps",
            f"held-out loss still fell by up to {max(t.still_falling for ts in methods.values() for t in ts):.1%} over "
            "the last tenth of the steps",
        ],
    )


def outside_noise(differences: dict[str, list[float]]) -> dict[str, bool | None]:
    """Whether each method's mean paired difference exceeds seed noise; None with one seed."""
    freedom = sum(len(of_method) - 1 for of_method in differences.values())
    if freedom == 0:
        return dict.fromkeys(differences)
    squares = sum(float(np.var(of_method) * len(of_method)) for of_method in differences.values())
    quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL
    return {
        name: abs(float(np.mean(of_method))) > quantile * math.sqrt(squares / freedom / len(of_method))
        for name, of_method in differences.items()
    }


class _Loss(NamedTuple):
    """Training or held-out loss of every method, by seed."""

    name: str
    steps: list[float]
    curves: dict[str, NDArray[np.float64]]  # (seeds, steps)
    final: dict[str, NDArray[np.float64]]
    differences: dict[str, list[float]]  # final losses, relative to unpacked training with the same seed
    outside: dict[str, bool | None]  # seed noise

    @classmethod
    def of(cls, methods: dict[str, list[Trained]], what: str) -> _Loss:
        curves = {name: np.array([getattr(run, what)[1] for run in runs]) for name, runs in methods.items()}
        final = {name: np.array([getattr(run, f"final_{what}") for run in runs]) for name, runs in methods.items()}
        differences = {name: (loss / final[_BASE] - 1).tolist() for name, loss in final.items() if name != _BASE}
        steps = getattr(methods[_BASE][0], what)[0]
        return cls(f"{what.replace('_', '-')} loss", steps, curves, final, differences, outside_noise(differences))


def _ends(losses: list[_Loss]) -> Table:
    columns = [Column("method"), Column("loss against 1 global batch", "quoted", "+.1%")]
    for loss in losses:
        columns += [
            Column(loss.name, "measured", ".4f"),
            Column("±", "measured", ".4f"),
            Column("over unpacked", "measured", "+.2%"),
            Column("outside seed noise"),
        ]
    rows: list[tuple[Any, ...]] = []
    for name in losses[0].final:
        row: list[Any] = [name, paper.CONVERGENCE_LOSS_INCREASE if name == "fixed_greedy:8" else None]
        for loss in losses:
            values = loss.final[name]
            row += [float(np.mean(values)), float(np.ptp(values)) / 2 if len(values) > 1 else None]
            row += [None, ""] if name == _BASE else [float(np.mean(loss.differences[name])), _SAID[loss.outside[name]]]
        rows.append(tuple(row))
    return Table("loss at the end", tuple(columns), rows)


_SAID = {True: "yes", False: "no", None: "unknown: one seed"}


def _orders(methods: dict[str, list[Trained]]) -> Table:
    names = ("token_delay", "displaced_steps", "displaced_share", "longest")
    rows: list[tuple[Any, ...]] = [
        (
            name,
            paper.CONVERGENCE_TOKEN_DELAY if name == "WLB-LLM" else None,
            *(float(np.mean([getattr(trained, what) for trained in of_method])) for what in names),
        )
        for name, of_method in methods.items()
    ]
    columns = (
        Column("method"),
        Column("token delay, steps", "quoted", ".2f"),
        Column("token delay, steps", "measured", ".2f"),
        Column("displacement, steps", "measured", ".2f"),
        Column("tokens moved over a step", "measured", ".1%"),
        Column("longest, steps", "measured", ".1f"),
    )
    return Table("order of documents: steps from their place in arrival order", columns, rows)


def _curve_table(loss: _Loss) -> Table:
    """Means over seeds, a column for each method."""
    columns = (Column("step", format=",.0f"), *(Column(name, "measured", ".4f") for name in loss.curves))
    means = [curve.mean(axis=0).tolist() for curve in loss.curves.values()]
    return Table(f"{loss.name}, mean over seeds", columns, [*zip(loss.steps, *means, strict=True)])


def _findings(losses: list[_Loss]) -> list[Finding]:
    found = [
        Finding(
            f"{name}: {loss.name} is within seed noise",
            None if loss.outside[name] is None else not loss.outside[name],
            f"{np.mean(of_seeds):+.2%} against unpacked, {_by_seed(of_seeds)}",
        )
        for loss in losses
        for name, of_seeds in loss.differences.items()
    ]
    training = losses[0].final
    increase = (training["fixed_greedy:8"] / training["fixed_greedy:1"] - 1).tolist()
    outside = outside_noise({"8 over 1": increase})["8 over 1"]
    mean = float(np.mean(increase))
    found.append(
        Finding(
            "packing over 8 global batches raises the training loss over 1 (paper: 1.6%)",
            None if outside is None else outside and mean > 0,
            f"{mean:+.2%}, {_by_seed(increase)}",
        )
    )
    return found


def _by_seed(differences: list[float]) -> str:
    return f"seeds {', '.join(f'{difference:+.2%}' for difference in differences)}"


def _draw(losses: list[_Loss], path: Path) -> None:
    """Draw both curves with their range over seeds, and their difference from unpacked training."""
    figure, axes = pyplot_without_display().subplots(2, 2, figsize=(13, 7.5), constrained_layout=True)
    for loss, (top, bottom) in zip(losses, axes.T, strict=True):
        base = loss.curves[_BASE]
        for (name, curve), colour in zip(loss.curves.items(), ("black", *COLOURS), strict=False):
            for axis, values in ((top, curve), (bottom, 100 * (curve / base - 1))):
                axis.plot(loss.steps, values.mean(axis=0), color=colour, label=name, lw=1.5)
                axis.fill_between(loss.steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, lw=0)
        band = "; band: range over seeds" if len(base) > 1 else ""
        top.set_title(f"{loss.name}, measured{band}", fontsize=10)
        bottom.set_title("over unpacked, %", fontsize=10)
        bottom.set_xlabel("step")
    for axis in axes.ravel():
        tidy(axis)
    save(figure, path)
