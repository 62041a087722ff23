"""``wlb train``: train a model on this machine, or check and predict a job of any size with ``--dry-run``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, show_next, stderr, stdout
from wlb.cli.groups import refuse_unused
from wlb.errors import UserError, require

if TYPE_CHECKING:
    from wlb.job.config import JobConfig
    from wlb.training.dry_run import DryRun

_PROBLEMS = 1  # exit status of a job that would not start


def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration of the job (TOML).")],
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Write a torch profiler trace of a few steps of every rank into METRICS_DIR/trace."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Train nothing: find what would stop a job of any size at its start, and predict its memory and its "
            "first steps.",
        ),
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Hardware preset: a100, h100, h200, b200, mi300x, cpu; default: h100, or cpu if training.device is.",
            rich_help_panel="Only with --dry-run",
        ),
    ] = None,
    overrides: options.Settings = None,
    json: options.Json = False,
) -> int:
    """Train a model on this machine, with one process per rank of \\[parallel].

    On several machines run the same configuration with torchrun -m wlb.training CONFIG.

    Example: wlb train configs/tiny.toml --set training.steps=12

    Example: wlb train configs/405b_128k.toml --dry-run
    """
    from wlb.job.config_file import load_config

    settings = overrides or []
    if dry_run:
        refuse_unused(context, ["trace"], "has no effect with --dry-run")
        return _dry_run(config, load_config(config, settings), settings, hardware, json)
    if hardware is not None:
        raise UserError("--hardware needs --dry-run")
    # Before torch is imported, which takes seconds.
    loaded = load_config(config, [*settings, *["metrics.profile=true"] * trace], auto_dp=_dp_of_this_machine)
    _require_training()
    from wlb.training.launcher import launch

    return launch(loaded, summary=json)


def _require_training() -> None:
    """Raise ``UserError`` where a package is missing, without which processes end in a traceback."""
    for package in ("safetensors", "torch"):
        require(package, "train")


def _dp_of_this_machine(of_one_rank: int) -> int:
    """As many data-parallel ranks as the GPUs suffice for; one on a machine without GPUs."""
    gpus: int = require("torch", "train").cuda.device_count()
    return max(1, gpus // of_one_rank)


def _dry_run(config: Path, loaded: "JobConfig", overrides: list[str], hardware: str | None, json: bool) -> int:
    """Check a job without running it; returns 1 if something would stop it at its start."""
    from wlb.workload.hardware import hardware_preset

    name = hardware or ("cpu" if loaded.training.device == "cpu" else "h100")
    hardware_preset(name)  # before torch is imported
    _require_training()
    from wlb.training.dry_run import dry_run

    with stderr.status("checking the job and simulating its first steps"):
        result = dry_run(loaded, name)
    job = result.job
    if json:
        emit_json(result.to_json())
    else:
        _print(config, result)
        if not result.problems and job.layout.world_size <= job.hardware.node_size:  # torchrun starts more
            show_next("train", config, *(word for setting in overrides for word in ("--set", setting)))
    return _PROBLEMS if result.problems else 0


def _print(config: Path, result: "DryRun") -> None:
    simulated = result.simulated
    data = "synthetic documents, as its token store is not here" if result.synthetic else "its token store"
    stdout.print(f"{config} on {result.job.layout.world_size:,} x {result.hardware}, planned on {data}")
    if simulated is not None:
        stdout.print(
            f"first {simulated.steps} steps, simulated: {simulated.tokens / simulated.steps:,.0f} tokens in "
            f"{simulated.mean_step_seconds:.3g} s each, {simulated.tokens_per_second:,.0f} tokens/s"
        )
        imbalance = ", ".join(f"{name.replace('_', '-')} {value:.3f}" for name, value in simulated.imbalance.items())
        stdout.print(f"imbalance (slowest over mean): {imbalance}")
    if result.not_simulated is not None:
        stdout.print(f"not simulated: {result.not_simulated}")
    if result.speed is not None:
        stdout.print(
            f"simulated: {result.speed:.2f}x the tokens per second of plain-4d; wlb simulate {config} says why"
        )
    limit = result.job.memory_limit.number_of_bytes / 2**30
    stdout.print(f"the worst step that packing may produce needs {result.memory}, of {limit:.3g} GiB")
    if result.problems:
        stdout.print("\nwould stop the job at its start:")
    for problem in result.problems:
        stdout.print(f"- {problem}")
