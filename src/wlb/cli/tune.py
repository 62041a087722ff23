"""``wlb tune``: outlier thresholds and L_max for your documents, beside packing that needs no thresholds."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.compare import compare_packers, note_many_steps, show_comparison, title_of
from wlb.cli.console import emit_json, print_table, progress_bar, stdout

if TYPE_CHECKING:
    from rich.table import Table

    from wlb.documents.segments import Segment
    from wlb.packing.packer import PackingTask
    from wlb.packing.tuning import Trial
    from wlb.simulate.compare import MethodResult

_TUNED, _UNTUNED = "variable_length, tuned", "makespan"
_AS_FAST = 0.99  # of the tuned setting's speed: thresholds tuned on these documents fit others less well


def tune(
    context: typer.Context,
    lengths: options.Lengths,
    context_window: options.ContextWindow,
    micro_batches: options.MicroBatches,
    dp: options.Dp = 1,
    pp: options.Pp = 4,
    tp: options.Tp = None,
    cp: options.Cp = None,
    model: options.Model = options.DEFAULT_MODEL,
    hardware: options.Hardware = "h100",
    profile: options.Profile = None,
    max_length_factor: Annotated[
        float,
        typer.Option(
            min=1.0, max=1000.0, metavar="X", help="Largest L_max to consider, in context windows: what memory allows."
        ),
    ] = 2.0,
    max_token_delay: Annotated[
        float, typer.Option(min=0.0, metavar="STEPS", help="Bound on the mean token delay.")
    ] = 0.35,
    max_delay: options.MaxDelay = None,
    methods: options.Methods = None,
    steps: options.Steps = None,
    json: options.Json = False,
) -> None:
    """Choose outlier thresholds and L_max for variable_length packing, and see whether it is worth it.

    Packs a sample of the documents with many settings, keeps those within the bounds on token delay and memory, and
    prints the trade-off between balance and delay. Compares the tuned setting with other methods (--methods, as in
    compare; default: sequential) and with makespan, which has no thresholds, at the same L_max. Recommends makespan if
    it keeps the bound on token delay and is at most 1% slower at equal work.

    Example: wlb tune synthetic:20000:128K:0 --context-window 128K --micro-batches 4
    """
    from wlb.documents.filling import documents_for
    from wlb.documents.lengths import read_lengths
    from wlb.packing.packer import PackingTask
    from wlb.packing.tuning import MAX_LENGTH_FACTORS, trade_off
    from wlb.simulate.compare import comparison_json, packer_for

    job, priced_by = options.job_from(
        context, model, hardware, tp, cp, context_window, profile, micro_batches=micro_batches, dp=dp, pp=pp
    )
    tokens = read_lengths(lengths)
    if steps is None:
        note_many_steps(tokens, job)
    documents, _ = documents_for(tokens, micro_batches, context_window, steps=steps)
    trials = _trials(
        documents,
        PackingTask(micro_batches, context_window, job.pricing.packed_by or job.workload),
        sorted({*(factor for factor in MAX_LENGTH_FACTORS if factor < max_length_factor), max_length_factor}),
        max_token_delay,
        max_delay,
    )
    best, curve = trials[0], trade_off(trials)
    shared = {"max_length_factor": best.max_length_factor, "max_delay": max_delay}
    packers = {
        name: packer_for(name, job, max_delay=max_delay)
        for name in options.names_in("--methods", methods, ["sequential"])
    }
    packers[_TUNED] = packer_for("variable_length", job, **shared, outlier_thresholds=best.outlier_thresholds)
    packers[_UNTUNED] = packer_for(_UNTUNED, job, **shared)
    results = compare_packers(packers.items(), documents, job)
    recommended = _recommended(best, results, max_token_delay, max_delay)
    if json:
        emit_json(
            {
                "best": asdict(best),
                "trade_off": [asdict(trial) for trial in curve],
                "trials": len(trials),
                "methods": comparison_json(results),
                "recommended": recommended,
                "max_token_delay": max_token_delay,
                "workload": priced_by,
            }
        )
        return
    print_table(_trade_off_table(curve, best))
    show_comparison(results, title_of(job, priced_by))
    stdout.print(_verdict(results), markup=False, highlight=False)
    stdout.print("recommended configuration:\n")
    lines = (f"{name} = {json_module.dumps(value)}" for name, value in recommended.items())
    stdout.print("\n".join(["[packing]", *lines]), markup=False, highlight=False)


def _trials(
    documents: Sequence[Segment],
    task: PackingTask,
    factors: Sequence[float],
    max_token_delay: float,
    max_delay: int | None,
) -> list[Trial]:
    """Settings of variable_length, the best first."""
    from wlb.packing import packer_options
    from wlb.packing.tuning import search
    from wlb.packing.variable_length import VariableLengthOptions

    with progress_bar() as bar:
        tried = bar.add_task("trying settings")
        return search(
            [document.length for document in documents],
            task,
            VariableLengthOptions.model_validate(packer_options("variable_length", {"max_delay": max_delay})),
            factors=factors,
            max_token_delay=max_token_delay,
            on_trial=lambda done, total: bar.update(tried, completed=done, total=total),
        )


def _recommended(
    best: Trial, results: Sequence[MethodResult], max_token_delay: float, max_delay: int | None
) -> dict[str, Any]:
    """Settings of [packing]; ``max_delay`` where it is not the default."""
    by_name = {result.method: result for result in results}
    tuned, untuned = by_name[_TUNED], by_name[_UNTUNED]
    as_fast = untuned.arranged.work_rate >= _AS_FAST * tuned.arranged.work_rate
    shared = {"max_length_factor": best.max_length_factor}
    if max_delay is not None:
        shared["max_delay"] = max_delay
    if as_fast and untuned.mean_token_delay <= max_token_delay:
        return {"method": _UNTUNED, **shared}
    return {"method": "variable_length", **shared, "outlier_thresholds": list(best.outlier_thresholds)}


def _verdict(results: Sequence[MethodResult]) -> str:
    by_name = {result.method: result for result in results}
    tuned, untuned = by_name[_TUNED], by_name[_UNTUNED]
    speed = untuned.arranged.work_rate / tuned.arranged.work_rate
    return (
        f"{_UNTUNED}, with nothing to tune but L_max, has {speed:.3f} times the tuned setting's speed at equal work, "
        f"an imbalance degree of {untuned.imbalance_degree:.3f} ({tuned.imbalance_degree:.3f}) and a token delay of "
        f"{untuned.mean_token_delay:.2f} ({tuned.mean_token_delay:.2f})"
    )


def _trade_off_table(curve: Sequence[Trial], best: Trial) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title="variable_length: trade-off of balance against delay",
        caption="simulated, without the documents left over at the end; the tuned setting is highlighted",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in (
        "outlier\nthresholds",
        "L_max\nfactor",
        "imbalance\ndegree",
        "token\ndelay",
        "longest\ndelay",
        "step\nspread",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in curve:
        table.add_row(
            ", ".join(map(str, trial.outlier_thresholds)) or "none",
            f"{trial.max_length_factor:g}",
            f"{trial.imbalance_degree:.4f}",
            f"{trial.mean_token_delay:.3f}",
            f"{trial.longest_delay}",
            f"{trial.tokens_per_step_cv:.1%}",
            style="bold green" if trial == best else None,
        )
    return table
