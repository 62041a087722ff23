"""``wlb diagnose``: where the time of a training job goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, show_next, stdout
from wlb.terminal import wrapped


def diagnose(
    metrics_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="metrics.dir of a job that runs, or has run.")],
    json: options.Json = False,
) -> None:
    """Show how much of its time a job loses to imbalance, along which dimension, and what causes it.

    Reads what the job last wrote: every metrics.diagnose_every steps, and at its end.

    Example: wlb diagnose runs/tiny
    """
    from wlb.report.run_directory import read_diagnosis
    from wlb.training.observe.diagnosis import render

    diagnosis = read_diagnosis(metrics_dir)
    if json:
        emit_json(diagnosis)
    else:
        stdout.print(wrapped(render(diagnosis), stdout.width), markup=False, highlight=False, soft_wrap=True)
        show_next("report", metrics_dir)
