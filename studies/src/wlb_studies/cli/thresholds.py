"""``wlb-studies thresholds``: find outlier thresholds and L_max for your documents."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.console import counted, emit_json, show_columns, show_next, stdout
from wlb_studies.cli.packed_options import PackedOptions
from wlb_studies.cli.packing import compare_packers, documents_of, show_comparison, title_of

if TYPE_CHECKING:
    from wlb.documents.segments import Segment
    from wlb.job.job import Job
    from wlb_studies.packing import MethodResult
    from wlb_studies.thresholds import Trial

_TUNED, _UNTUNED = "variable_length, tuned", "balanced"
_AS_FAST = 0.99  # of the tuned setting's speed, since tuned thresholds fit other documents less well


@dataclass(frozen=True, kw_only=True)
class TuneOptions(PackedOptions):
    """The job for trials, and the bounds on settings."""

    max_length_factor: Annotated[
        float,
        typer.Option(
            min=1.0, max=1000.0, metavar="X", help="Largest L_max to consider, in context windows, as memory allows."
        ),
    ] = 2.0
    max_token_delay: Annotated[
        float, typer.Option(min=0.0, metavar="STEPS", help="Largest mean token delay, in steps.")
    ] = 0.35


def thresholds(
    context: typer.Context, lengths: options.Lengths, asked: TuneOptions, json: options.Json = False
) -> None:
    """Choose outlier thresholds and L_max for variable_length packing, and see whether it is worth it.

    Packs a sample of the documents with many settings, keeps the settings within the bounds on token delay and memory,
    and prints the trade-off between balance and delay. Compares the best with other methods (--methods, as in
    wlb-studies packing; default: sequential) and with balanced, which has no thresholds, at the same L_max. Recommends
    balanced if it stays within the bound on token delay and is at most 1% slower.

    Example: wlb-studies thresholds synthetic:20000:128K:0 --context-window 128K --micro-batches 4
    """
    from wlb.documents.lengths import read_lengths
    from wlb_studies.packing import comparison_json, packer_for
    from wlb_studies.thresholds import trade_off

    tokens = read_lengths(lengths, column=asked.length_column)
    tokens = tokens[tokens > 0]
    job, priced_by = asked.job(context, lengths, tokens)
    documents, _ = documents_of(tokens, asked.steps, job)
    trials = _trials(documents, asked, job)
    best, curve = trials[0], trade_off(trials)
    shared = {"max_length_factor": best.max_length_factor, "max_delay": asked.max_delay}
    packers = {
        name: packer_for(name, job, max_delay=asked.max_delay)
        for name in options.names_in("--methods", asked.methods, ["sequential"])
    }
    packers[_TUNED] = packer_for("variable_length", job, **shared, outlier_thresholds=best.outlier_thresholds)
    packers[_UNTUNED] = packer_for(_UNTUNED, job, **shared)
    results = compare_packers(packers.items(), documents, job)
    tuned, untuned = results[-2:]
    recommended = _recommended(best, tuned, untuned, asked)
    if json:
        emit_json(
            {
                "best": asdict(best),
                "trade_off": [asdict(trial) for trial in curve],
                "trials": len(trials),
                "methods": comparison_json(results),
                "recommended": recommended,
                "max_token_delay": asked.max_token_delay,
                "workload": priced_by,
            }
        )
        return
    _show_trade_off(curve, best)
    show_comparison(results, title_of(job, priced_by))
    speed = untuned.arranged.tokens_per_second / tuned.arranged.tokens_per_second
    stdout.print(
        f"{_UNTUNED}, with nothing to tune but L_max, has {speed:.3f} times the tuned setting's tokens per second, an "
        f"imbalance degree of {untuned.imbalance_degree:.3f} ({tuned.imbalance_degree:.3f}) and a token delay of "
        f"{untuned.mean_token_delay:.2f} ({tuned.mean_token_delay:.2f})",
    )
    stdout.print("recommended configuration:\n")
    lines = (f"{name} = {json_module.dumps(value)}" for name, value in recommended.items())
    stdout.print("\n".join(["[packing]", *lines, ""]), soft_wrap=True)
    show_next("report", lengths, *asked.given_again(context, job))


def _trials(documents: Sequence[Segment], asked: TuneOptions, job: Job) -> list[Trial]:
    """Settings of variable_length, best first."""
    from wlb.packing.options import PackingOptions
    from wlb_studies.thresholds import MAX_LENGTH_FACTORS, search

    most = asked.max_length_factor
    delay = {} if asked.max_delay is None else {"max_delay": asked.max_delay}
    with counted("trying settings") as on_trial:
        return search(
            [document.length for document in documents],
            job.step_micro_batches,
            job.context_window,
            job.packed_by or job.workload,
            PackingOptions(method="variable_length").changed(**delay),
            factors=sorted({*(factor for factor in MAX_LENGTH_FACTORS if factor < most), most}),
            max_token_delay=asked.max_token_delay,
            on_trial=on_trial,
        )


def _recommended(best: Trial, tuned: MethodResult, untuned: MethodResult, asked: TuneOptions) -> dict[str, Any]:
    """Settings of [packing]; ``max_delay`` where it was given."""
    as_fast = untuned.arranged.tokens_per_second >= _AS_FAST * tuned.arranged.tokens_per_second
    shared: dict[str, Any] = {"max_length_factor": best.max_length_factor}
    if as_fast and untuned.mean_token_delay <= asked.max_token_delay:
        return {"method": _UNTUNED} | shared
    delay = {} if asked.max_delay is None else {"max_delay": asked.max_delay}
    return {"method": "variable_length", "outlier_thresholds": list(best.outlier_thresholds)} | shared | delay


def _show_trade_off(curve: Sequence[Trial], best: Trial) -> None:
    columns = {
        "outlier\nthresholds": [", ".join(map(str, trial.outlier_thresholds)) or "none" for trial in curve],
        "L_max\nfactor": [f"{trial.max_length_factor:g}" for trial in curve],
        "imbalance\ndegree": [f"{trial.imbalance_degree:.4f}" for trial in curve],
        "token\ndelay": [f"{trial.mean_token_delay:.3f}" for trial in curve],
        "longest\ndelay": [f"{trial.longest_delay}" for trial in curve],
        "step\nspread": [f"{trial.tokens_per_step_cv:.1%}" for trial in curve],
    }
    for cells in columns.values():
        cells[curve.index(best)] = f"[bold green]{cells[curve.index(best)]}[/]"
    show_columns(
        columns,
        title="variable_length: trade-off of balance against delay",
        notes={"step\nspread": "simulated, without the documents left over at the end; the best setting is green"},
    )
