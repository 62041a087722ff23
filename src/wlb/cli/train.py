"""``wlb train``: train a model on this machine."""

from __future__ import annotations

from pathlib import Path

import typer

from wlb.cli import options

_DRY_RUN_ONLY = ("rank", "device", "hardware")


def train(
    context: typer.Context,
    config: Path = typer.Argument(..., help="Configuration of the job (TOML)."),
    overrides: list[str] = typer.Option(
        [], "--set", metavar="SECTION.KEY=VALUE", help="Override one setting; may be given several times."
    ),
    trace: bool = typer.Option(
        False, "--trace", help="Write a torch profiler trace of a few steps of every rank into METRICS_DIR/trace."
    ),
    traced: bool = typer.Option(False, "--profile", hidden=True, help="The name that --trace had."),
    as_json: bool = typer.Option(False, "--json", help="Print a summary as one JSON object on stdout at the end."),
    try_only: bool = typer.Option(
        False,
        "--dry-run",
        help="Train nothing: run one step of one rank of a job of any size on this CPU, and report its memory, its "
        "traffic and what would stop the job at its start.",
    ),
    rank: str = typer.Option(
        "0",
        "--rank",
        metavar="RANK|all",
        rich_help_panel=options.DRY_RUN_ONLY,
        help="The rank to run, or one of every kind.",
    ),
    device: str | None = typer.Option(
        None,
        "--device",
        metavar="cpu|cuda",
        rich_help_panel=options.DRY_RUN_ONLY,
        help="Where the job would run; default: as configured.",
    ),
    hardware: str | None = typer.Option(
        None,
        "--hardware",
        metavar="NAME",
        rich_help_panel=options.DRY_RUN_ONLY,
        help="Hardware preset: a100, h100, h200, b200, mi300x, cpu; default: h100, or cpu with --device cpu.",
    ),
) -> int:
    """Train a model on this machine, with one process per rank of \\[parallel].

    On several machines run the same configuration with torchrun -m wlb.training CONFIG.
    """
    if try_only:
        from wlb.cli.dry_run import dry_run

        return dry_run(config, overrides, rank, device, hardware, as_json)
    options.refuse_unused(context, _DRY_RUN_ONLY, "has no effect without --dry-run")
    from wlb.training.launcher import launch

    if trace or traced:
        overrides = [*overrides, "metrics.profile=true"]
    return launch(config, overrides, summary=as_json)
