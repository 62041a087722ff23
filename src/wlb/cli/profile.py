"""``wlb profile``: measure what attention and everything else cost on this device."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, print_table, progress_bar, stdout
from wlb.errors import UserError, require

if TYPE_CHECKING:
    from rich.table import Table

    from wlb.profiling import Accuracy, ProfileSettings
    from wlb.workload.base import Workload

_DEFAULT_MODEL = {"cpu": "tiny", "cuda": options.DEFAULT_MODEL}
_DEFAULT_MAX_LENGTH = {"cpu": 4096, "cuda": 131_072}
_DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


class Device(StrEnum):
    """Where to measure."""

    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Compute types of training."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def profile(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Profile to write (JSON).", show_default=False)],
    device: Annotated[Device, typer.Option(help="Where to measure.")] = Device.CPU,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="As for wlb compare; default: tiny on cpu, llama3-8b on cuda.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, metavar="N", help="Measure one of N tensor-parallel ranks.")] = 1,
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", parser=options.tokens, help="Longest document; default 4,096 on cpu, 131,072 on cuda."
        ),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Compute type; default float32 on cpu, bfloat16 on cuda.")] = None,
    threads: Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="CPU threads.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer sizes, fewer times.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw seconds and FLOP/s: .png, .pdf or .svg.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Measure attention and everything else of a model's blocks on this device.

    Writes a workload profile for --profile of other commands, and prints its error on sizes that were held out. One
    block is measured, forward and backward.

    Example: wlb profile --out profile.json --plot profile.png
    """
    options.check_writable(out)
    if plot is not None:
        options.check_picture(plot)
    settings = _settings(device, model, tp, max_length, dtype, threads, quick)

    from wlb.profiling import crossover_tokens, measure_profile, prediction_errors, tensor_parallel_shard
    from wlb.training.runtime.environment import hardware_name
    from wlb.workload import analytic_workload, hardware_preset
    from wlb.workload.profile import write_profile

    with progress_bar() as bar:
        task = bar.add_task("measuring")
        measured, held_out = measure_profile(
            settings, lambda done, total: bar.update(task, completed=done, total=total)
        )
    write_profile(measured, out)
    if plot is not None:
        from wlb.report.plots import plot_profile

        plot_profile(measured, plot)
    preset = hardware_name(settings.device)
    workloads: dict[str, Workload] = {
        "profile": measured.workload(),
        f"{preset} preset": analytic_workload(tensor_parallel_shard(settings.shape, tp), hardware_preset(preset)),
    }
    accuracy = {name: prediction_errors(workload, held_out) for name, workload in workloads.items()}
    crossover = {name: crossover_tokens(workload) for name, workload in workloads.items()}
    if json:
        emit_json(
            {
                "profile": str(out),
                "machine": measured.machine,
                "clock": measured.clock,
                "dtype": measured.dtype,
                "accuracy": {name: [asdict(row) for row in rows] for name, rows in accuracy.items()},
                "crossover_tokens": crossover,
            }
        )
        return
    print_table(_table(accuracy, f"{measured.machine}, {measured.dtype}, measured with {measured.clock}"))
    lengths = ", ".join(f"{tokens:,} ({name})" for name, tokens in crossover.items() if tokens)
    stdout.print(f"tokens at which a document's attention costs as much as everything else: {lengths}", highlight=False)
    stdout.print(f"profile: {out}" + (f", picture: {plot}" if plot else ""), highlight=False)


def _settings(
    device: Device, model: str | None, tp: int, max_length: int | None, dtype: Dtype | None, threads: int, quick: bool
) -> ProfileSettings:
    """What the options ask for; raises ``UserError`` for a model, tp or device that there is not."""
    torch = require("torch", "train")
    from wlb.profiling import ProfileSettings, tensor_parallel_shard
    from wlb.workload import model_shape

    name = device.value
    shape = model_shape(model or _DEFAULT_MODEL[name])
    tensor_parallel_shard(shape, tp)
    if device is Device.CUDA and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no GPU on this machine; choose --device cpu")
    return ProfileSettings(
        shape,
        torch.device(name),
        getattr(torch, dtype.value if dtype else _DEFAULT_DTYPE[name]),
        _DEFAULT_MAX_LENGTH[name] if max_length is None else max_length,
        tp=tp,
        threads=threads,
        quick=quick,
    )


def _table(accuracy: dict[str, list[Accuracy]], title: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        caption="held-out sizes, forward and backward, predicted against measured: median error (worst)",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("sizes", no_wrap=True)
    for heading in ("measured", *accuracy):
        table.add_column(heading, justify="right", no_wrap=True)
    for rows in zip(*accuracy.values(), strict=True):
        errors = (f"{row.median:.1%} ({row.worst:.0%})" for row in rows)
        table.add_row(rows[0].shapes, str(rows[0].count), *errors)
    return table
