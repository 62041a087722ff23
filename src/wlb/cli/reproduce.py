"""``wlb reproduce``: the paper's tables and figures beside ours."""

from __future__ import annotations

import json as json_module
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, empty_table, print_table, show_next, stderr, stdout
from wlb.cli.groups import refuse_unused
from wlb.errors import UserError, choose_from

if TYPE_CHECKING:
    from wlb.studies.experiment import Column, Report, Settings, Table, Value


def reproduce(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT",
            help="imbalance, table2, speedups, breakdown, context-windows, sharding, kernel, published, gains, "
            "rivals, level, convergence, or all (but the last five).",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory of NAME.json and NAME.png.")] = Path("results"),
    lengths: Annotated[
        str | None, typer.Option(metavar="LENGTHS", help="As for wlb compare; default: synthetic ones.")
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
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="published: measurements to hold the simulator against, in place of the project's own."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Reproduce the paper's evaluation, with quoted, simulated and measured numbers in columns of their own.

    Prints each table and writes it, with a picture, to --out. published holds the simulator against what others
    measured on GPUs; every row is in its JSON. convergence trains 12 small models, for over an hour, and
    rivals searches layouts of 24 policies for 24 jobs, on all cores; both can be interrupted and continued.

    Example: wlb reproduce speedups

    Example: wlb reproduce convergence --out results
    """
    from wlb.studies.experiment import Settings
    from wlb.studies.registry import EXPERIMENTS, SIMULATED

    if name != "all" and name not in EXPERIMENTS:
        raise UserError(f"experiment {name!r} is unknown; {choose_from(name, [*EXPERIMENTS, 'all'])}")
    if name == "published":
        unused = ("lengths", "steps", "seed", "seeds", "profile")
        refuse_unused(context, unused, "is not for published, whose documents and GPUs are those measured")
    if name == "gains":
        refuse_unused(context, ["lengths"], "is not for gains, whose documents fill windows of many lengths")
    if name != "convergence":
        refuse_unused(context, ["seeds"], f"is for convergence, and {name} has one seed, --seed")
    if profile is not None and name not in ("kernel", "all"):
        raise UserError(f"--profile is shown by kernel; {name} is simulated on the H100 preset")
    if measured is not None and name != "published":
        raise UserError(f"--measured is for published, and {name} is held against nothing; leave it out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"directory {out} cannot be made: {error.strerror}") from None
    settings = Settings(lengths, steps, seed, seeds, profile, out, measured=measured)
    written = []
    for experiment in SIMULATED if name == "all" else [name]:
        options.check_writable(out / f"{experiment}.json")
        report, document = _run(experiment, settings)
        written.append(document)
        if not json:
            _print(report)
            stdout.print(f"written: {out / experiment}.json and .png, {document['run_seconds']} s\n")
    if json:
        emit_json({"experiments": written})
    elif lengths is not None:
        show_next("check", lengths)


def _run(name: str, settings: Settings) -> tuple[Report, dict[str, Any]]:
    """Run an experiment and write its picture and its JSON."""
    from wlb.studies.registry import EXPERIMENTS

    began = time.perf_counter()
    with stderr.status(name) as status:
        report = EXPERIMENTS[name](replace(settings, on_progress=lambda what: status.update(f"{name}: {what}")))
        report.draw(settings.out / f"{name}.png")
    document = {"experiment": name, **report.to_json(), "run_seconds": round(time.perf_counter() - began, 1)}
    text = json_module.dumps(document, indent=1, allow_nan=False)
    (settings.out / f"{name}.json").write_text(text + "\n")
    return report, document


_VERDICTS = {True: "[green]holds[/green]", False: "[red]does not hold[/red]", None: "unknown"}


def _print(report: Report) -> None:
    stdout.print(f"[bold]{report.title}[/bold]\ndocuments: {report.documents}")
    for table in report.tables:
        stdout.print(f"\n{table.title}", markup=False, highlight=False)
        _show(table)
    for finding in report.findings:
        stdout.print(f"{_VERDICTS[finding.holds]}: {finding.statement} ({finding.evidence})")
    for note in report.notes:
        stdout.print(f"[dim]· {note}[/dim]")


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
