"""``wlb-studies packing``: compare packing methods on your documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, note, show_columns, show_next, stdout
from wlb.cli.groups import refuse_unused
from wlb.report.answer import listed
from wlb.terminal import number_of
from wlb_studies.cli.packed_options import AskedJob, PackedOptions
from wlb_studies.cli.terminal import with_progress, with_room
from wlb_studies.plots import Plot, check_picture

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wlb.documents.segments import OverlongReport, Segment
    from wlb.job.job import Job
    from wlb.packing.packer import Packer
    from wlb_studies.packing import MethodResult

_ALL = "all"
_MANY_STEPS = 2000  # all methods together take about half a minute for this
_DEFAULT_METHODS = (
    *("sequential", "fixed_greedy", "fixed_greedy:2", "fixed_greedy:4", "fixed_greedy:8"),
    *("variable_length", "balanced"),
)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(PackedOptions):
    """The job that methods are compared on, and their own settings."""

    max_length_factor: Annotated[
        float, typer.Option(min=1.0, max=1000.0, metavar="X", help="L_max of variable_length and balanced, in windows.")
    ] = 1.5
    overlong: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="Documents over the context window: split, truncate, drop or error. cut: every document where a "
            "window of the stream ends, so that all methods train the same segments.",
        ),
    ] = "split"
    solver_seconds: Annotated[
        float, typer.Option(min=0.01, metavar="X", help="Time limit of a solve of fixed_solver.")
    ] = 10.0
    plot: Plot = None


def packing(
    context: typer.Context, lengths: options.Lengths, asked: CompareOptions, json: options.Json = False
) -> None:
    """Compare packing methods on a list of document lengths; wlb check compares presets.

    Packs the documents with every method of sequential, fixed_greedy, fixed_solver, variable_length, balanced, or
    "all". fixed_greedy:4 packs 4 global batches together; variable_length:1 has one outlier queue.

    Example: wlb-studies packing synthetic:20000:128K:0 --context-window 128K --micro-batches 4
    """
    from wlb.documents.lengths import read_lengths

    check_picture(asked.plot)
    tokens = read_lengths(lengths, column=asked.length_column)
    found = asked.job(context, lengths, tokens)
    compared, show = _compared_methods(context, tokens[tokens > 0], asked, found)
    if json:
        emit_json(compared)
        return
    show()
    show_next("check", lengths, *asked.given_again(context, found.job))


def _compared_methods(
    context: typer.Context, tokens: NDArray[np.int64], asked: CompareOptions, found: AskedJob
) -> tuple[dict[str, Any], Callable[[], None]]:
    """The comparison of packing methods as JSON, and what prints it."""
    from wlb_studies.packing import comparison_json, options_read_by, packer_for

    job = found.job
    documents, overlong = documents_of(tokens, asked.steps, job, asked.overlong)
    own = {name: getattr(asked, name) for name in ("max_length_factor", "max_delay", "solver_seconds")}
    listed = None if asked.methods == _ALL else asked.methods
    names = options.names_in("--methods", listed, _DEFAULT_METHODS)
    refuse_unused(context, own.keys() - options_read_by(names), f"has no effect on {', '.join(names)}")
    results = compare_packers([(name, packer_for(name, job, **own)) for name in names], documents, job)
    title = title_of(job, found.priced_by)
    if asked.plot is not None:
        from wlb_studies.packing import plot_comparison

        plot_comparison(results, asked.plot, title=title)

    def show() -> None:
        show_comparison(results, title)
        if overlong.documents:
            stdout.print(
                f"{number_of(overlong.documents, 'document')} over the context window ({asked.overlong}): "
                f"{number_of(overlong.pieces, 'piece')}, {number_of(overlong.tokens_dropped, 'token')} dropped"
            )

    return {
        "methods": comparison_json(results),
        "workload": found.priced_by,
        "context_window": job.context_window,
        "micro_batches": job.step_micro_batches,
        "dp": job.layout.dp,
        "pp": job.layout.pp,
        "overlong": {"policy": asked.overlong, **asdict(overlong)},
    }, show


def documents_of(
    tokens: NDArray[np.int64], steps: int | None, job: Job, overlong: str = "split"
) -> tuple[Sequence[Segment], OverlongReport]:
    """The documents of the requested steps; planning many documents takes minutes."""
    from wlb_studies.filling import documents_for

    filled = int(tokens.sum()) // (job.global_batch * job.context_window)
    if steps is None and filled > _MANY_STEPS:
        note(f"the documents fill {filled:,} steps; --steps N takes as many as fill N")
    return documents_for(tokens, job.global_batch, job.context_window, overlong=overlong, steps=steps)


def title_of(job: Job, priced_by: Mapping[str, str | int]) -> str:
    from wlb_studies.policies.layouts import layout_of

    micro_batches = number_of(job.step_micro_batches, "micro-batch")
    sizes = f"window {job.context_window:,}, {micro_batches} a step, {layout_of(job)}"
    return f"{sizes}\nsimulated with {listed(priced_by)}"


def compare_packers(
    packers: Iterable[tuple[str, Packer]], documents: Sequence[Segment], job: Job
) -> list[MethodResult]:
    """A row for each packer, by the name it is shown with."""
    from wlb_studies.packing import compare_packer

    return [
        compare_packer(name, packer, documents, job, on_progress=advance)
        for name, packer, advance in with_progress(packers, len(documents))
    ]


# What is explained below the table, by column.
_NOTES = {
    "speedup": "speedup: tokens per second over row one\n"
    "all rows but the first are arranged: dealt to ranks and ordered by work",
    "token\ndelay": "token delay: mean (longest), in steps that tokens wait",
    "step\nspread": "step spread: standard deviation over mean of tokens per step",
    "pipeline\ncost": "pipeline cost: a step's seconds over those of a perfectly balanced one",
    "attention\nkept": "attention kept: share of query-key pairs computed; cutting skips the others",
    "at equal\nwork": "at equal work: predicted seconds of work done per second, over row one",
}


def show_comparison(results: Sequence[MethodResult], title: str) -> None:
    """Print the table and whether all documents were trained."""
    from wlb_studies.packing import compared_rows

    rows = compared_rows(results)
    shown = [row.result for row in rows]
    gaps = ["" if r.optimality_gap is None else f" (gap {r.optimality_gap:.1%})" for r in shown]
    columns = {
        "method": [row.name + gap for row, gap in zip(rows, gaps, strict=True)],
        "speedup": [f"{row.speedup:.2f}x" for row in rows],
        "imbalance\ndegree": [f"{r.imbalance_degree:.3f}" for r in shown],
        "token\ndelay": [f"{r.mean_token_delay:.2f} ({r.longest_delay})" for r in shown],
        "step\nspread": [f"{r.tokens_per_step_cv:.1%}" for r in shown],
        "planning\nms/step": [f"{r.planning_ms_per_step:.2f}" for r in shown],
        "pipeline\ncost": [f"{row.simulated.pipeline_cost:.3f}" for row in rows],
        "attention\nkept": [f"{r.attention_kept:.0%}" for r in shown],
        "at equal\nwork": [f"{row.speed_at_equal_work:.2f}x" for row in rows],
    }
    wide_only = ("step\nspread", "planning\nms/step", "pipeline\ncost")
    show_columns(with_room(columns, wide_only), title=title, notes=_NOTES)
    for r in results:
        if r.documents_in != r.documents_out:
            stdout.print(
                f"[red]{r.method} trained {r.documents_out:,} of {r.documents_in:,} documents[/red]", markup=True
            )
    if all(r.documents_in == r.documents_out for r in results):
        stdout.print(f"every method trained all {number_of(results[0].documents_in, 'document')}, each token once ✓")
