"""How ``wlb train --dry-run`` shows what it found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.table import Table

from wlb.cli.console import emit_json, print_table, stderr, stdout
from wlb.errors import UserError, require
from wlb.token_count import parse_count

if TYPE_CHECKING:
    from wlb.training.dry_run.job import Compared, DryRun, RankReport

_PROBLEMS = 1  # exit status of a job that would not start


def dry_run(
    config: Path, overrides: list[str], rank: str, device: str | None, hardware: str | None, as_json: bool
) -> int:
    """Try a job without running it; 1 where something would stop it at its start."""
    from wlb.job.config_file import load_config
    from wlb.workload.hardware import hardware_preset

    loaded = load_config(config, overrides)
    wanted = device or ("cpu" if loaded.training.device == "cpu" else "cuda")
    if wanted not in ("cpu", "cuda"):
        raise UserError(f"--device {wanted!r} is unknown; choose cpu or cuda")
    chosen: int | Literal["all"] | None = "all" if rank == "all" else parse_count(rank)
    if chosen is None:
        raise UserError(f"--rank {rank!r} is not a rank; give a number, or all")
    name = hardware or ("cpu" if wanted == "cpu" else "h100")
    if (kind := hardware_preset(name).device_type) != wanted:
        raise UserError(
            f"--hardware {name} has no effect on a job of --device {wanted}; leave it out, or choose --device {kind}"
        )
    require("torch", "train")
    from wlb.training.dry_run.job import dry_run as run

    with stderr.status("one step of every kind of rank" if rank == "all" else f"one step of rank {rank}"):
        result = run(loaded, chosen, name)
    if as_json:
        emit_json(result.to_json())
    else:
        _print(config, result)
    return _PROBLEMS if result.found.problems else 0


def _print(config: Path, result: DryRun) -> None:
    shown = result.to_json()
    data = "its token store" if shown["data"] == "store" else "synthetic documents, as its token store is not here"
    stdout.print(
        f"{config} on {shown['gpus']:,} x {shown['hardware']}: step {shown['step']}, of {shown['step_tokens']:,} tokens"
    )
    stdout.print(f"planned on {data}; of the first steps, the one in which ranks exchange most")
    imbalance = ", ".join(f"{name.replace('_', '-')} {value:.3f}" for name, value in shown["imbalance"].items())
    stdout.print(f"imbalance of the plan (slowest over mean, predicted): {imbalance}")
    worst, limit = (_gib(shown[name]) for name in ("worst_step_bytes", "memory_limit_bytes"))
    stdout.print(f"the worst step that packing may produce needs {worst} of {limit} GiB")
    for report in result.ranks:
        print_table(_memory_table(report))
        print_table(_traffic_table(report, shown["ranks"][result.ranks.index(report)]))
    if result.found.problems:
        stdout.print("\nwould stop the job at its start:")
    for problem in result.found.problems:
        stdout.print(f"- {problem}", markup=False, highlight=False)


def _memory_table(report: RankReport) -> Table:
    place = ", ".join(f"{name} {value}" for name, value in report.run.place._asdict().items())
    title = f"rank {report.run.rank} ({place}): {report.role}\nGiB at the peak of the step"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("kind", "dry run", "memory model", "error"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind, compared in (*report.memory.items(), ("all", report.total)):
        table.add_row(kind, _gib(compared.run), _gib(compared.predicted or 0), _error(compared))
    return table


def _traffic_table(report: RankReport, shown: dict[str, dict[str, dict[str, object]]]) -> Table:
    table = Table(title="MB received from other ranks in the step", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("purpose", "over", "calls", "dry run", "simulator", "error"):
        table.add_column(heading, justify="left" if heading in ("purpose", "over") else "right")
    for purpose, compared in report.traffic.items():
        details = shown["traffic"][purpose]
        predicted = "not priced" if compared.predicted is None else f"{compared.predicted / 1e6:,.1f}"
        group = f"{details['group']} ({details['ranks']})"
        table.add_row(
            purpose, group, f"{details['calls']:,}", f"{compared.run / 1e6:,.1f}", predicted, _error(compared)
        )
    return table


def _gib(number_of_bytes: int) -> str:
    return f"{number_of_bytes / 2**30:.2f}"


def _error(compared: Compared) -> str:
    return "" if compared.error is None else f"{compared.error:+.1%}"
