"""``wlb train``: train a model on this machine, or try one step of a job of any size with ``--dry-run``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, show_columns, show_next, stderr, stdout
from wlb.errors import UserError, require
from wlb.token_count import parse_count

if TYPE_CHECKING:
    from wlb.training.dry_run.job import Compared, RankReport

_PROBLEMS = 1  # exit status of a job that would not start


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What is recorded beside training."""

    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Write a torch profiler trace of a few steps of every rank into METRICS_DIR/trace."
        ),
    ] = False
    traced: Annotated[bool, typer.Option("--profile", hidden=True, help="The name that --trace had.")] = False


@dataclass(frozen=True, kw_only=True)
class DryRunOptions:
    """Which ranks are tried, and where the job would run."""

    rank: Annotated[str, typer.Option(metavar="RANK|all", help="The rank to run, or one of every kind.")] = "0"
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Where the job would run; default: as configured.")
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Hardware preset: a100, h100, h200, b200, mi300x, cpu; default: h100, or cpu with --device cpu.",
        ),
    ] = None


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration of the job (TOML).")],
    asked: Annotated[
        TrainOptions | DryRunOptions,
        typer.Option(
            "--dry-run",
            help="Train nothing: run one step of one rank of a job of any size on this CPU, and report its memory, its "
            "traffic and what would stop the job at its start.",
        ),
    ],
    overrides: options.Settings = None,
    json: options.Json = False,
) -> int:
    """Train a model on this machine, with one process per rank of \\[parallel].

    On several machines run the same configuration with torchrun -m wlb.training CONFIG.

    Example: wlb train configs/tiny.toml --set training.steps=12

    Example: wlb train configs/405b_128k.toml --dry-run
    """
    settings = overrides or []
    require("safetensors", "train")  # torch may be there without it, and processes that lack it end in a traceback
    if isinstance(asked, DryRunOptions):
        return _dry_run(config, settings, asked, json)
    from wlb.training.launcher import launch

    if asked.trace or asked.traced:
        settings = [*settings, "metrics.profile=true"]
    return launch(config, settings, summary=json)


def _dry_run(config: Path, overrides: list[str], asked: DryRunOptions, json: bool) -> int:
    """Try a job without running it; 1 where something would stop it at its start."""
    from wlb.job.config_file import load_config
    from wlb.workload.hardware import hardware_preset

    loaded = load_config(config, overrides)
    device = asked.device or ("cpu" if loaded.training.device == "cpu" else "cuda")
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device!r} is unknown; choose cpu or cuda")
    chosen: int | Literal["all"] | None = "all" if asked.rank == "all" else parse_count(asked.rank)
    if chosen is None:
        raise UserError(f"--rank {asked.rank!r} is not a rank; give a number, or all")
    name = asked.hardware or ("cpu" if device == "cpu" else "h100")
    if (kind := hardware_preset(name).device_type) != device:
        raise UserError(
            f"--hardware {name} has no effect on a job of --device {device}; leave it out, or choose --device {kind}"
        )
    require("torch", "train")
    from wlb.training.dry_run.job import dry_run

    with stderr.status("one step of every kind of rank" if chosen == "all" else f"one step of rank {chosen}"):
        result = dry_run(loaded, chosen, name)
    shown = result.to_json()
    if json:
        emit_json(shown)
    else:
        _print(config, shown, result.ranks, result.found.problems)
        if not result.found.problems and shown["gpus"] <= options.GPUS_PER_NODE:  # more are started by torchrun
            show_next("train", config, *(word for setting in overrides for word in ("--set", setting)))
    return _PROBLEMS if result.found.problems else 0


def _print(config: Path, shown: dict[str, Any], ranks: Sequence[RankReport], problems: Sequence[str]) -> None:
    data = "its token store" if shown["data"] == "store" else "synthetic documents, as its token store is not here"
    stdout.print(
        f"{config} on {shown['gpus']:,} x {shown['hardware']}: step {shown['step']}, of {shown['step_tokens']:,} tokens"
    )
    stdout.print(f"planned on {data}; of the first steps, the one in which ranks exchange most")
    imbalance = ", ".join(f"{name.replace('_', '-')} {value:.3f}" for name, value in shown["imbalance"].items())
    stdout.print(f"imbalance of the plan (slowest over mean, predicted): {imbalance}")
    if (speed := shown["speed_at_equal_work"]) is not None:
        stdout.print(f"simulated speed at equal work over plain-4d: {speed:.2f}x; wlb simulate says why")
    worst, limit = (_gib(shown[name]) for name in ("worst_step_bytes", "memory_limit_bytes"))
    stdout.print(f"the worst step that packing may produce needs {worst} of {limit} GiB")
    for report, of_rank in zip(ranks, shown["ranks"], strict=True):
        _show_memory(report)
        _show_traffic(report, of_rank["traffic"])
    if problems:
        stdout.print("\nwould stop the job at its start:")
    for problem in problems:
        stdout.print(f"- {problem}", markup=False, highlight=False)


def _show_memory(report: RankReport) -> None:
    place = ", ".join(f"{name} {value}" for name, value in report.run.place._asdict().items())
    kinds = report.memory | {"all": report.total}
    columns = {
        "kind": [*kinds],
        "dry run": [_gib(compared.run) for compared in kinds.values()],
        "memory model": [_gib(compared.predicted or 0) for compared in kinds.values()],
        "error": [_error(compared) for compared in kinds.values()],
    }
    stdout.print(f"\nrank {report.run.rank} ({place}): {report.role}", highlight=False)
    show_columns(columns, title="GiB at the peak of the step")


def _show_traffic(report: RankReport, details: dict[str, dict[str, Any]]) -> None:
    purposes = report.traffic
    columns = {
        "purpose": [*purposes],
        "over": [f"{details[purpose]['group']} ({details[purpose]['ranks']})" for purpose in purposes],
        "calls": [f"{details[purpose]['calls']:,}" for purpose in purposes],
        "dry run": [f"{compared.run / 1e6:,.1f}" for compared in purposes.values()],
        "simulator": [
            "not priced" if compared.predicted is None else f"{compared.predicted / 1e6:,.1f}"
            for compared in purposes.values()
        ],
        "error": [_error(compared) for compared in purposes.values()],
    }
    show_columns(columns, title="MB received from other ranks in the step", words=("purpose", "over"))


def _gib(number_of_bytes: int) -> str:
    return f"{number_of_bytes / 2**30:.2f}"


def _error(compared: Compared) -> str:
    return "" if compared.error is None else f"{compared.error:+.1%}"
