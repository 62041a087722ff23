"""``wlb-studies paper``: reproduce the paper's tables and figures."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, empty_table, print_table, show_next, stderr, stdout
from wlb.cli.groups import refuse_unused
from wlb.errors import UserError, choose_from

if TYPE_CHECKING:
    from wlb_studies.experiment import Column, Report, Settings, Table, Value

Out = Annotated[Path, typer.Option(metavar="DIR", help="Directory of NAME.json and NAME.png.")]


def paper(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT",
            help="imbalance, table2, speedups, breakdown, context-windows, sharding, kernel; all of these: all. "
            "Beyond the paper, and longer: gains, mixtures, grid, level, convergence.",
        ),
    ] = "all",
    out: Out = Path("results"),
    lengths: Annotated[
        str | None, typer.Option(metavar="LENGTHS", help="As for wlb check; default: synthetic ones.")
    ] = None,
    steps: Annotated[
        int | None,
        options.number_of_steps("Steps to simulate (sharding: micro-batches; convergence: to train)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the documents and their order.")] = 0,
    seeds: Annotated[int, options.number("convergence: runs of each method.", most=1000)] = 2,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="kernel: workload profile measured by wlb profile, shown beside the H100 preset."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Reproduce the paper's evaluation, with quoted, simulated and measured numbers in columns of their own.

    Prints each table and writes it, with a picture, to --out. gains shows who gains, by model, window and GPUs;
    mixtures the same for mixtures of experts. grid searches layouts of all policies for 28 jobs, on all cores. level
    removes ingredients of level steps. convergence trains 12 small models for over an hour. You can interrupt and
    continue gains, mixtures, grid and convergence.

    Example: wlb-studies paper speedups

    Example: wlb-studies paper convergence --out results
    """
    from wlb_studies.experiment import Settings
    from wlb_studies.registry import EXPERIMENTS, OF_THE_PAPER

    if name != "all" and name not in EXPERIMENTS:
        raise UserError(f"experiment {name!r} is unknown; {choose_from(name, [*EXPERIMENTS, 'all'])}")
    if name == "gains":
        refuse_unused(context, ["lengths"], "has no effect on gains, which makes its own documents for each window")
    if name != "convergence":
        refuse_unused(context, ["seeds"], f"is for convergence, and {name} has one seed, --seed")
    if profile is not None and name not in ("kernel", "all"):
        raise UserError(f"--profile works only with kernel; {name} is simulated on the H100 preset")
    settings = Settings(lengths, steps, seed, seeds, profile, out)
    chosen = OF_THE_PAPER if name == "all" else [name]
    show_experiments({experiment: EXPERIMENTS[experiment] for experiment in chosen}, settings, as_json=json)
    if lengths is not None and not json:
        show_next("check", lengths)


def show_experiments(
    experiments: Mapping[str, Callable[[Settings], Report]], settings: Settings, *, as_json: bool
) -> None:
    """Run ``experiments``, print their reports, and write each as NAME.json and NAME.png."""
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"directory {settings.out} cannot be made: {error.strerror}") from None
    written = []
    for name, experiment in experiments.items():
        options.check_writable(settings.out / f"{name}.json")
        report, document = _run(name, experiment, settings)
        written.append(document)
        if not as_json:
            _print(report)
            stdout.print(f"written: {settings.out / name}.json and .png, {document['run_seconds']} s\n")
    if as_json:
        emit_json({"experiments": written})


def _run(name: str, experiment: Callable[[Settings], Report], settings: Settings) -> tuple[Report, dict[str, Any]]:
    """Run an experiment and write its picture and its JSON."""
    began = time.perf_counter()
    with stderr.status(name) as status:
        report = experiment(replace(settings, on_progress=lambda what: status.update(f"{name}: {what}")))
        report.draw(settings.out / f"{name}.png")
    document = {"experiment": name, **report.to_json(), "run_seconds": round(time.perf_counter() - began, 1)}
    text = json_module.dumps(document, indent=1, allow_nan=False)
    (settings.out / f"{name}.json").write_text(text + "\n")
    return report, document


_VERDICTS = {True: "[green]holds[/green]", False: "[red]does not hold[/red]", None: "unknown"}


def _print(report: Report) -> None:
    stdout.print(f"[bold]{report.title}[/bold]\ndocuments: {report.documents}", markup=True)
    for table in report.tables:
        stdout.print(f"\n{table.title}")
        _show(table)
    for finding in report.findings:
        stdout.print(f"{_VERDICTS[finding.holds]}: {finding.statement} ({finding.evidence})", markup=True)
    for note in report.notes:
        stdout.print(f"[dim]· {note}[/dim]", markup=True)


def _show(table: Table) -> None:
    shown = empty_table()
    for index, column in enumerate(table.columns):
        numbers = any(isinstance(row[index], int | float) for row in table.rows)
        heading = f"{column.name}\n{column.kind}"
        shown.add_column(heading, justify="right" if numbers else "left", no_wrap=index == 0)
    for row in table.rows:
        shown.add_row(*(_cell(value, column) for value, column in zip(row, table.columns, strict=True)))
    print_table(shown)


def _cell(value: Value, column: Column) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, column.format)
