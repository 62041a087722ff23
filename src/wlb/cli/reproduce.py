"""``wlb reproduce``: the paper's tables and figures beside ours."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, print_table, stderr, stdout
from wlb.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from wlb.studies.experiment import Column, Report, Table, Value


def reproduce(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="imbalance, table2, speedups, breakdown, context-windows, sharding, kernel, published, rivals, "
            "convergence, or all (but the last three)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory of NAME.json and NAME.png.")] = Path(
        "results"
    ),
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="LENGTHS", help="As for wlb compare; default: synthetic ones.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            max=options.MOST_STEPS,
            metavar="N",
            help="Steps to simulate (sharding: micro-batches; convergence: to train).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Seed of the documents and their order.")] = 0,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=1000, metavar="N", help="convergence: runs of each method.")
    ] = 2,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="kernel: workload profile measured by wlb profile, shown beside the H100 preset.",
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured",
            metavar="FILE",
            help="published: measurements to hold the simulator against, in place of the project's own.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Reproduce the paper's evaluation, with quoted, simulated and measured numbers in columns of their own.

    Prints each table and writes it, with a picture, to --out. published holds the simulator against what others
    measured on GPUs; every row is in its JSON. convergence trains 12 small models, for over an hour, and
    rivals searches layouts of 19 policies for 24 jobs, on all cores; both can be interrupted and continued.

    Examples: wlb reproduce speedups · wlb reproduce all · nohup wlb reproduce convergence &
    """
    from wlb.studies.experiment import Settings
    from wlb.studies.registry import EXPERIMENTS, SIMULATED

    if name != "all" and name not in EXPERIMENTS:
        raise UserError(f"experiment {name!r} is unknown; choose from {', '.join(EXPERIMENTS)}, all")
    if name == "published":
        unused = ("lengths", "steps", "seed", "seeds", "profile")
        options.refuse_unused(context, unused, "is not for published, whose documents and GPUs are those measured")
    if name != "convergence":
        options.refuse_unused(context, ["seeds"], f"is for convergence, and {name} has one seed, --seed")
    if profile is not None and name not in ("kernel", "all"):
        raise UserError(f"--profile is shown by kernel; {name} is simulated on the H100 preset")
    if measured is not None and name != "published":
        raise UserError(f"--measured is for published, and {name} is held against nothing; leave it out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"directory {out} cannot be made: {error.strerror}") from None
    written = []
    for chosen in SIMULATED if name == "all" else [name]:
        options.check_writable(out / f"{chosen}.json")
        with stderr.status(chosen) as status:

            def show(what: str, experiment: str = chosen, status: Any = status) -> None:
                status.update(f"{experiment}: {what}")

            settings = Settings(lengths, steps, seed, seeds, profile, out, show, measured)
            began = time.perf_counter()
            report = EXPERIMENTS[chosen](settings)
            report.draw(out / f"{chosen}.png")
        document = {"experiment": chosen, **report.to_json(), "run_seconds": round(time.perf_counter() - began, 1)}
        (out / f"{chosen}.json").write_text(json_module.dumps(document, indent=1, allow_nan=False) + "\n")
        written.append(document)
        if not json:
            _print(report)
            stdout.print(f"written: {out / chosen}.json and .png, {document['run_seconds']} s\n")
    if json:
        emit_json({"experiments": written})


_VERDICTS = {True: "[green]holds[/green]", False: "[red]does not hold[/red]", None: "unknown"}


def _print(report: Report) -> None:
    stdout.print(f"[bold]{report.title}[/bold]\ndocuments: {report.documents}")
    for table in report.tables:
        stdout.print(f"\n{table.title}", markup=False, highlight=False)
        print_table(_rich(table))
    for finding in report.findings:
        stdout.print(f"{_VERDICTS[finding.holds]}: {finding.statement} ({finding.evidence})")
    for note in report.notes:
        stdout.print(f"[dim]· {note}[/dim]")


def _rich(table: Table) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable

    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(table.columns):
        numbers = any(isinstance(row[index], int | float) for row in table.rows)
        heading = f"{column.name}\n{column.kind}"
        shown.add_column(heading, justify="right" if numbers else "left", no_wrap=index == 0)
    for row in table.rows:
        shown.add_row(*(_cell(value, column) for value, column in zip(row, table.columns, strict=True)))
    return shown


def _cell(value: Value, column: Column) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, column.format)
