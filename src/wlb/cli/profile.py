"""``wlb profile``: measures the cost of attention and of everything else on this device."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.console import counted, emit_json, show_columns, show_next, stdout
from wlb.errors import UserError, require

if TYPE_CHECKING:
    from wlb.profiling.measure import ProfileSettings

# The default model, compute type and longest document of each device.
_DEFAULTS = {"cpu": ("tiny", "float32", 4096), "cuda": (options.DEFAULT_MODEL, "bfloat16", 131_072)}

_DOCUMENTS = 4000  # synthetic ones, to try the profile on

Device = StrEnum("Device", ["CPU", "CUDA"])
Dtype = StrEnum("Dtype", ["FLOAT64", "FLOAT32", "BFLOAT16"])


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What to measure, and where."""

    device: Annotated[Device, typer.Option(help="Where to measure.")] = Device.CPU
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="As for wlb check; default: tiny on cpu, llama3-8b on cuda.")
    ] = None
    tp: Annotated[int, options.number("Measure one of N tensor-parallel ranks.")] = 1
    max_length: Annotated[
        int | None, options.number_of_tokens("Longest document; default 4,096 on cpu, 131,072 on cuda.")
    ] = None
    dtype: Annotated[Dtype | None, typer.Option(help="Compute type; default float32 on cpu, bfloat16 on cuda.")] = None
    threads: Annotated[int, options.number("CPU threads.", most=1024)] = 1
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer sizes, fewer times.")] = False

    def settings(self) -> "ProfileSettings":
        """The settings of the measurement. Raises ``UserError`` for a model, tp or device that does not exist."""
        torch = require("torch", "train")
        from wlb.profiling.measure import ProfileSettings, tensor_parallel_shard
        from wlb.workload import model_shape

        device = self.device.value
        model, dtype, max_length = _DEFAULTS[device]
        shape = model_shape(self.model or model)
        tensor_parallel_shard(shape, self.tp)
        if self.device is Device.CUDA and not torch.cuda.is_available():
            raise UserError("--device cuda: PyTorch finds no GPU on this machine; choose --device cpu")
        return ProfileSettings(
            shape,
            torch.device(device),
            getattr(torch, self.dtype.value if self.dtype else dtype),
            self.max_length or max_length,
            tp=self.tp,
            threads=self.threads,
            quick=self.quick,
        )


def profile(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Profile to write (JSON).", show_default=False)],
    asked: ProfileOptions,
    json: options.Json = False,
) -> None:
    """Measure attention and everything else of a model's blocks on this device.

    Writes a workload profile for --profile of other commands, and prints its error on sizes that were held out. One
    block is measured, forward and backward.

    Example: wlb profile --out profile.json
    """
    options.check_writable(out)
    settings = asked.settings()

    from wlb.profiling.measure import measure_profile, prediction_errors, tensor_parallel_shard
    from wlb.training.environment import hardware_name
    from wlb.workload import make_workload
    from wlb.workload.costs import crossover_tokens
    from wlb.workload.profile import write_profile

    with counted("measuring") as progress:
        measured, held_out = measure_profile(settings, progress)
    write_profile(measured, out)
    how = f"{measured.dtype}, measured with {measured.clock}"
    preset = hardware_name(settings.device)
    workloads = {
        "profile": make_workload(settings.shape, preset, settings.tp, profile=measured),
        f"{preset} preset": make_workload(tensor_parallel_shard(settings.shape, settings.tp), preset),
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
                "accuracy": accuracy,
                "crossover_tokens": crossover,
            }
        )
        return
    _show(accuracy, f"{measured.machine}, {how}")
    lengths = ", ".join(f"{tokens:,} ({name})" for name, tokens in crossover.items() if tokens)
    stdout.print(f"tokens at which a document's attention costs as much as everything else: {lengths}")
    stdout.print(f"profile: {out}")
    documents = f"synthetic:{_DOCUMENTS}:{settings.max_length}:0"
    show_next("check", documents, "--profile", out, "--hardware", preset)


def _show(accuracy: dict[str, list[dict[str, Any]]], title: str) -> None:
    sizes = next(iter(accuracy.values()))
    columns = {"sizes": [row["shapes"] for row in sizes], "measured": [str(row["count"]) for row in sizes]}
    columns |= {name: [f"{row['median']:.1%} ({row['worst']:.0%})" for row in rows] for name, rows in accuracy.items()}
    caption = "held-out sizes, forward and backward, predicted against measured: median error (worst)"
    show_columns(columns, title=title, notes={"sizes": caption})
