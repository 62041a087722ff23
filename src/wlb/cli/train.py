"""``wlb train``: train a model on this machine."""

from __future__ import annotations

from pathlib import Path

import typer


def train(
    config: Path = typer.Argument(..., help="Configuration of the job (TOML)."),
    overrides: list[str] = typer.Option(
        [], "--set", metavar="SECTION.KEY=VALUE", help="Override one setting; may be given several times."
    ),
    profile: bool = typer.Option(
        False, "--profile", help="Write a torch profiler trace of a few steps of every rank into METRICS_DIR/trace."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print a summary as JSON on stdout at the end."),
) -> int:
    """Train a model on this machine, with one process per rank of \\[parallel].

    On several machines run the same configuration with torchrun -m wlb.training CONFIG.
    """
    from wlb.training.launcher import launch

    if profile:
        overrides = [*overrides, "metrics.profile=true"]
    return launch(config, overrides, summary=as_json)
