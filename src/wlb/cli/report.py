"""``wlb report``: one HTML file that shows what a job loses to imbalance and what each remedy gives."""

from __future__ import annotations

from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, progress_bar, stdout
from wlb.errors import UserError
from wlb.schedules.operations import TRAINED_SCHEDULES
from wlb.token_count import parse_count

if TYPE_CHECKING:
    from wlb.report.evidence import Evidence

_SIZES = ("dp", "pp", "cp", "tp", "virtual_pp")
_SIMULATED_ONLY = (
    *("model", "hardware", *_SIZES, "schedule", "parallel"),
    *("context_window", "micro_batches", "steps", "rivals"),
)


def report(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="LENGTHS|STORE|RUN_DIR",
            help="Document lengths as in compare, or metrics.dir of a training job: then measured, not simulated.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The HTML file to write.")] = Path("report.html"),
    model: options.Model = options.DEFAULT_MODEL,
    hardware: options.Hardware = "h100",
    dp: options.Dp = 1,
    pp: options.Pp = 4,
    cp: Annotated[int, typer.Option("--cp", min=1, metavar="N", help="Context-parallel size.")] = 2,
    tp: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Tensor-parallel size.")] = 8,
    virtual_pp: Annotated[int, typer.Option(min=1, metavar="N", help="Model chunks per pipeline rank.")] = 1,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Pipeline schedule: {' or '.join(TRAINED_SCHEDULES)}.")
    ] = None,
    parallel: Annotated[
        str | None, typer.Option(hidden=True, help="The sizes in one option: dp=4,pp=4,cp=2,tp=8.")
    ] = None,
    context_window: Annotated[
        int, typer.Option(metavar="TOKENS", parser=options.tokens, help="Tokens attention may span, such as 128K.")
    ] = 131_072,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Micro-batches of a step, over all data-parallel ranks; default: dp x pp."
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(min=1, max=options.MOST_STEPS, metavar="N", help="Steps to simulate, as far as the documents go."),
    ] = 64,
    rivals: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What wlb rivals --json printed, for a section on published policies."),
    ] = None,
    before: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="An earlier job to compare a training job with.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a report as one HTML file that works offline: what imbalance costs, where, and what to set.

    Example: wlb report synthetic:20000:128K:0 --model 7b --dp 4 --pp 4 --cp 2 --tp 8 --out report.html
    """
    from wlb.report.html.page import write_page

    options.check_writable(out)
    if before is not None or isdir(source):  # reading complains of a directory without a job
        options.refuse_unused(
            context, _SIMULATED_ONLY, "has no effect on the report of a training run, which is measured"
        )
        text, summary = _measured(Path(source), before)
    else:
        sizes = _layout(context, schedule, parallel, {"dp": dp, "pp": pp, "cp": cp, "tp": tp, "virtual_pp": virtual_pp})
        text, summary = _predicted(source, model, hardware, sizes, context_window, micro_batches, steps, rivals)
    write_page(out, text)
    if json:
        emit_json({"out": str(out), **summary})
    else:
        stdout.print(f"{out}  ({len(text.encode('utf-8', errors='replace')) / 1e6:.2f} MB)", markup=False)


def _layout(
    context: typer.Context, schedule: str | None, parallel: str | None, sizes: dict[str, Any]
) -> dict[str, Any]:
    """Keywords of ``simulated_job``, from one option each or all from --parallel."""
    if schedule not in (None, *TRAINED_SCHEDULES):
        raise UserError(
            f"--schedule {schedule!r} is not a schedule of the trainer; choose {' or '.join(TRAINED_SCHEDULES)}"
        )
    if parallel is None:
        return sizes if schedule is None else sizes | {"schedule": schedule}
    options.refuse_unused(context, (*_SIZES, "schedule"), "has no effect with --parallel, which says it")
    return parallel_sizes(parallel)


def parallel_sizes(text: str) -> dict[str, Any]:
    """``dp=4,pp=4`` as keywords of ``simulated_job``. Raises ``UserError`` for anything else."""
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name == "schedule" and value in TRAINED_SCHEDULES:
            sizes[name] = value
        elif name in _SIZES and (size := parse_count(value)):
            sizes[name] = size
        else:
            raise UserError(
                f"--parallel {text!r}: {part.strip()!r} is not a size or schedule; give dp=4,pp=4,cp=2,tp=8, "
                f"virtual_pp=N or schedule={' or '.join(TRAINED_SCHEDULES)}"
            )
    return sizes


def _measured(path: Path, before: Path | None) -> tuple[str, dict[str, Any]]:
    from dataclasses import asdict

    from wlb.report.measured import gain_at_equal_work, measured_report
    from wlb.report.run_directory import read_run

    run, earlier = read_run(path), None if before is None else read_run(before)
    summary: dict[str, Any] = {"kind": "measured", "steps": run.steps, "tokens_per_second": run.tokens_per_second}
    if earlier is not None:
        summary["speed_at_equal_work"] = asdict(gain_at_equal_work(earlier, run))
        summary["gain"] = run.tokens_per_second / earlier.tokens_per_second
    return measured_report(run, earlier), summary


def _predicted(
    source: str,
    model: str,
    hardware: str,
    sizes: dict[str, Any],
    context_window: int,
    micro_batches: int | None,
    steps: int,
    rivals: Path | None,
) -> tuple[str, dict[str, Any]]:
    from wlb.documents.lengths import read_lengths
    from wlb.documents.store.index import index_path
    from wlb.report.evidence import gather_evidence
    from wlb.report.predicted import predicted_report
    from wlb.report.rivals import read_rivals
    from wlb.simulate import SimulatedJob, simulated_job

    packing = None if micro_batches is None else {"micro_batches": micro_batches}

    def job(preset: str) -> SimulatedJob:
        return simulated_job(model, context_window, preset, hardware=hardware, packing=packing, **sizes)

    compared = None if rivals is None else read_rivals(rivals)
    lengths = read_lengths(source)
    with progress_bar() as bar:
        task = bar.add_task("reading", total=None)
        evidence = gather_evidence(lengths, job, steps, on_progress=lambda what: bar.update(task, description=what))
    store = source if index_path(Path(source)).exists() else None
    text = predicted_report(evidence, source=source, model=model, hardware=hardware, store=store, rivals=compared)
    return text, _summary(evidence)


def _summary(evidence: Evidence) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "kind": "simulated",
        "speed_at_equal_work": {name: asdict(gain) for name, gain in evidence.gains.items()},
        "gain": {name: asdict(gain) for name, gain in evidence.gains_in_tokens.items()},
        "imbalance": {name: system.imbalance["gpus"] for name, system in evidence.systems.items()},
        "tokens_per_second": {name: system.tokens_per_second for name, system in evidence.systems.items()},
        "recommended": asdict(evidence.recommended)
        | {"activation_checkpointing": evidence.job.activation_checkpointing},
        "tried": [asdict(one) for one in evidence.tried],
        "fits": evidence.fits,
        "steps": evidence.systems["best"].steps,
    }
