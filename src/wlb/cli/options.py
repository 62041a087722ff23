"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.errors import UserError, require
from wlb.token_count import parse_tokens

if TYPE_CHECKING:
    from wlb.simulate import SimulatedJob
    from wlb.workload import Workload

MOST_STEPS = 1_000_000  # of a simulation: days of computing

Lengths = Annotated[
    str,
    typer.Argument(
        help="Document lengths: .json list, .txt, .npy, .parquet (column length), .idx, a token store prefix, "
        "or synthetic:DOCUMENTS:WINDOW:SEED."
    ),
]


def tokens(value: str | int) -> int:
    """A number of tokens on the command line, for Typer, which also gives it defaults."""
    try:
        return parse_tokens(str(value))
    except UserError as error:
        raise typer.BadParameter(str(error)) from None


ContextWindow = Annotated[
    int,
    typer.Option("--context-window", metavar="TOKENS", parser=tokens, help="Tokens attention may span, such as 128K."),
]
MicroBatches = Annotated[
    int,
    typer.Option("--micro-batches", min=1, metavar="N", help="Micro-batches of a step, over all data-parallel ranks."),
]
Dp = Annotated[int, typer.Option("--dp", min=1, metavar="N", help="Data-parallel size.")]
Pp = Annotated[int, typer.Option("--pp", min=1, metavar="N", help="Pipeline-parallel size.")]
Tp = Annotated[
    int | None,
    typer.Option(
        "--tp", min=1, metavar="N", help="Tensor-parallel size; default: up to 8, with 512 columns left on each GPU."
    ),
]
Cp = Annotated[
    int | None,
    typer.Option(
        "--cp",
        min=1,
        metavar="N",
        help="Context-parallel size; default: one rank for every 65,536 tokens of the window.",
    ),
]
DEFAULT_MODEL = "llama3-8b"
Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Model preset (llama3-8b, 7b, ...), or a Hugging Face model: its directory or its config.json.",
    ),
]
Hardware = Annotated[
    str,
    typer.Option(
        "--hardware",
        metavar="NAME",
        help="Hardware preset: a100, h100, h200, b200, mi300x, cpu; with newer attention kernels h100-fa3 and others.",
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Workload profile measured by wlb profile, instead of --model and --hardware.",
    ),
]
Methods = Annotated[str | None, typer.Option("--methods", metavar="A,B,...", help="Packing methods; see above.")]
MaxDelay = Annotated[
    int | None,
    typer.Option(
        "--max-delay", min=0, metavar="STEPS", help="Most steps that a document is delayed before it goes first."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
PREFILL_ONLY, SEARCH_ONLY, DRY_RUN_ONLY = (f"Only with {option}" for option in ("--prefill", "--search", "--dry-run"))
Steps = Annotated[
    int | None,
    typer.Option("--steps", min=1, max=MOST_STEPS, metavar="N", help="Use only as many documents as fill N steps."),
]

_PICTURES = (".png", ".pdf", ".svg")


def check_writable(path: Path) -> None:
    """Refuse, before any work is done, a file that could not be written afterwards."""
    try:
        if path.is_dir():
            raise UserError(f"{path} is a directory; name a file in it")
        if not path.parent.is_dir():
            raise UserError(f"directory {path.parent} of {path} does not exist; make it first")
        if path.exists() and not os.access(path, os.W_OK):
            raise UserError(f"{path} is not writable")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def check_picture(path: Path) -> None:
    """Refuse, before any work is done, a picture that could not be drawn afterwards."""
    if path.suffix.lower() not in _PICTURES:
        raise UserError(f"picture {path} must end in one of {', '.join(_PICTURES)}")
    check_writable(path)
    require("matplotlib", "plot")


def refuse_unused(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse options, by their parameters' ``names``, that were given and would not be read; ``why`` follows them."""
    by_name = {parameter.name: parameter for parameter in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            parameter, value = by_name[name], context.params[name]
            if isinstance(value, bool):
                value = (parameter.opts if value else parameter.secondary_opts)[0]
            given = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            spelled = "/".join((*parameter.opts, *parameter.secondary_opts))
            raise UserError(f"{spelled} {why} (got {given}); leave it out")


def names_in(option: str, listed: str | None, default: Iterable[str]) -> list[str]:
    """The names that ``option`` lists, separated by commas, or the default ones where it was not given."""
    if listed is None:
        return list(default)
    names = [name.strip() for name in listed.split(",")]
    if not all(names):
        raise UserError(f"{option} {listed!r} has an empty name; list names as a,b,c")
    return names


_COLUMNS_PER_GPU = 512
_TOKENS_PER_GPU = 65_536
_GPUS_PER_NODE = 8


def job_from(
    context: typer.Context,
    model: str,
    hardware: str,
    tp: int | None,
    cp: int | None,
    context_window: int,
    profile: Path | None,
    *,
    micro_batches: int,
    dp: int,
    pp: int,
) -> tuple[SimulatedJob, dict[str, str | int]]:
    """The job, with the defaults of [packing] and [sharding], that the options name, and a description of it.

    ``micro_batches`` counts all data-parallel ranks. With a measured profile ``hardware`` says its links. Raises
    ``UserError`` for a layout that cannot run, and for an option that the profile replaces.
    """
    from wlb.simulate import simulated_job
    from wlb.workload.profile import read_profile

    if micro_batches % dp:
        raise UserError(
            f"--micro-batches {micro_batches} counts all data-parallel ranks; make it a multiple of --dp {dp}"
        )
    _, priced_by = workload_from(
        context, model, hardware, tp, cp, context_window, profile, pp=pp, used_with_profile=frozenset({"hardware"})
    )
    measured = None if profile is None else read_profile(profile)
    own: dict[str, Any] = {name: priced_by[name] for name in ("tp", "cp") if name in priced_by}
    if measured is not None:
        own = {"tp": measured.tp, "profile": measured, "packed_by": measured.workload()}
    own |= {"hardware": hardware, "micro_batches": micro_batches // dp, "dp": dp, "pp": pp}
    job = simulated_job(measured.model if measured else model, context_window, **own)
    return job, priced_by | {"hardware": hardware} | ({"sharding": job.sharding.strategy} if job.layout.cp > 1 else {})


def workload_from(
    context: typer.Context,
    model: str,
    hardware: str,
    tp: int | None,
    cp: int | None,
    context_window: int,
    profile: Path | None,
    *,
    pp: int = 1,
    used_with_profile: frozenset[str] = frozenset(),
) -> tuple[Workload, dict[str, str | int]]:
    """The workload model that the options name, and a description of it for the output.

    Raises ``UserError`` where the model has fewer layers than ``pp`` stages, and for an option that a measured profile
    replaces, unless the command has a use of its own for it (``used_with_profile``).
    """
    from wlb.schedules.layer_split import split_layers
    from wlb.settings import MOST_RANKS
    from wlb.sharding import check_group_size
    from wlb.workload import make_workload
    from wlb.workload.profile import read_profile
    from wlb.workload.published import model_shape

    if profile is not None:
        priced = {"model", "hardware", "tp", "cp"} - used_with_profile
        refuse_unused(context, sorted(priced), "has no effect with --profile, which says it")
        measured = read_profile(profile)
        split_layers(measured.model, pp)
        return measured.workload(), {"profile": profile.name}
    shape = model_shape(model)
    split_layers(shape, pp)
    if tp is None:
        tp = max(size for size in (1, 2, 4, _GPUS_PER_NODE) if size == 1 or shape.hidden // size >= _COLUMNS_PER_GPU)
        tp = math.gcd(tp, shape.kv_heads)
    if cp is None:
        cp = min(max(1, context_window // _TOKENS_PER_GPU), MOST_RANKS)
    check_group_size(cp)
    return make_workload(shape, hardware, tp=tp, cp=cp), {"model": model, "hardware": hardware, "tp": tp, "cp": cp}
