"""``wlb compare``: what each packing method would do to your documents."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, print_table, progress_bar, stdout
from wlb.cli.prefill import prefill as simulate_prefill
from wlb.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

    from wlb.documents.segments import Segment
    from wlb.packing.packer import Packer
    from wlb.simulate import SimulatedJob
    from wlb.simulate.compare import ComparedRow, MethodResult

_PREFILL_ONLY = ("token_budget", "chunked", "load", "lock_step", "seed")
_PACKING_ONLY = (
    *("context_window", "micro_batches", "max_length_factor", "max_delay"),
    *("steps", "overlong", "solver_seconds", "plot"),
)
_MANY_STEPS = 2000  # which take the methods together about half a minute


def compare(
    context: typer.Context,
    lengths: options.Lengths,
    context_window: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", parser=options.tokens, help="Tokens attention may span, such as 128K. \\[required]"
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Micro-batches of a step, over all data-parallel ranks. \\[required]"),
    ] = None,
    dp: options.Dp = 1,
    pp: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Pipeline-parallel size; default: 4, with --prefill 1.")
    ] = None,
    tp: options.Tp = None,
    cp: options.Cp = None,
    model: options.Model = options.DEFAULT_MODEL,
    hardware: options.Hardware = "h100",
    profile: options.Profile = None,
    methods: options.Methods = None,
    max_length_factor: Annotated[
        float, typer.Option(min=1.0, max=1000.0, metavar="X", help="L_max of variable_length and makespan, in windows.")
    ] = 1.5,
    max_delay: options.MaxDelay = None,
    steps: options.Steps = None,
    overlong: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="Documents over the context window: split, truncate, drop or error. cut: every document where a "
            "window of the stream ends, so that all methods train the same segments.",
        ),
    ] = "split",
    solver_seconds: Annotated[
        float, typer.Option(min=0.01, metavar="X", help="Time limit of a solve of fixed_solver.")
    ] = 10.0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the comparison: .png, .pdf or .svg.")
    ] = None,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Take the lengths as prompts; simulate a serving system's prefill.")
    ] = False,
    token_budget: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            parser=options.tokens,
            rich_help_panel=options.PREFILL_ONLY,
            help="Tokens of a rank in one pass. \\[required]",
        ),
    ] = None,
    chunked: Annotated[
        bool,
        typer.Option(
            "--chunked/--whole", rich_help_panel=options.PREFILL_ONLY, help="Cut prompts into chunks, or not."
        ),
    ] = True,
    load: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="X",
            rich_help_panel=options.PREFILL_ONLY,
            help="Rate of arrivals, as a share of what ranks can sustain; 0: all at once.",
        ),
    ] = 0.0,
    lock_step: Annotated[
        bool,
        typer.Option(
            "--lock-step/--independent",
            rich_help_panel=options.PREFILL_ONLY,
            help="Ranks start passes together, or each at its own pace.",
        ),
    ] = True,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", rich_help_panel=options.PREFILL_ONLY, help="Seed of the arrivals.")
    ] = 0,
    json: options.Json = False,
) -> None:
    """Compare packing methods on a list of document lengths.

    Packs the documents with every method and prints speed at equal work, balance and token delay, simulated.

    Methods: sequential, fixed_greedy, fixed_solver, variable_length, makespan, elastic. fixed_greedy:4 packs 4 global
    batches together; variable_length:1 has one outlier queue, variable_length:auto tunes its thresholds as documents
    arrive, variable_length:paper is the paper's Algorithm 1, without early release.

    With --prefill the lengths are prompts, and the command does what wlb prefill does.

    Example: wlb compare synthetic:20000:128K:0 --context-window 128K --micro-batches 4
    """
    from wlb.documents.filling import documents_for
    from wlb.documents.lengths import read_lengths
    from wlb.simulate.compare import DEFAULT_METHODS, comparison_json, packer_for

    if prefill:
        options.refuse_unused(context, _PACKING_ONLY, "has no effect with --prefill, which packs no steps")
        if token_budget is None:
            raise UserError("--prefill needs --token-budget: the most tokens a rank prefills in one pass")
        simulate_prefill(
            context,
            lengths,
            token_budget,
            dp=dp,
            pp=pp or 1,
            tp=tp,
            cp=cp or 1,
            model=model,
            hardware=hardware,
            profile=profile,
            methods=methods,
            chunked=chunked,
            load=load,
            lock_step=lock_step,
            seed=seed,
            json=json,
        )
        return
    options.refuse_unused(context, _PREFILL_ONLY, "has no effect without --prefill")
    context_window = _given("--context-window", context_window)
    micro_batches = _given("--micro-batches", micro_batches)
    if plot is not None:
        options.check_picture(plot)
    job, priced_by = options.job_from(
        context,
        model,
        hardware,
        tp,
        cp,
        context_window,
        profile,
        micro_batches=micro_batches,
        dp=dp,
        pp=pp or 4,
    )
    tokens = read_lengths(lengths)
    if steps is None:
        note_many_steps(tokens, job)
    documents, report = documents_for(tokens, micro_batches, context_window, overlong=overlong, steps=steps)
    own = {"max_length_factor": max_length_factor, "max_delay": max_delay, "solver_seconds": solver_seconds}
    names = options.names_in("--methods", methods, DEFAULT_METHODS)
    results = compare_packers([(name, packer_for(name, job, **own)) for name in names], documents, job)
    title = title_of(job, priced_by)
    if plot is not None:
        from wlb.report.plots import plot_comparison

        plot_comparison(results, plot, title=title)
    if json:
        sizes = {
            "context_window": context_window,
            "micro_batches": micro_batches,
            "dp": job.layout.dp,
            "pp": job.layout.pp,
        }
        compared = {"methods": comparison_json(results), "workload": priced_by}
        emit_json(compared | sizes | {"overlong": {"policy": overlong, **asdict(report)}})
        return
    show_comparison(results, title)
    if report.documents:
        stdout.print(
            f"{report.documents} documents over the context window ({overlong}): "
            f"{report.pieces} pieces, {report.tokens_dropped} tokens dropped"
        )
    if plot is not None:
        stdout.print(f"picture: {plot}")


def _given(option: str, value: int | None) -> int:
    if value is None:
        raise UserError(f"missing option {option}; only --prefill does not need it")
    return value


def note_many_steps(lengths: NDArray[np.int64], job: SimulatedJob) -> None:
    """Say on stderr what to do where all of the documents take minutes to plan."""
    filled = int(lengths.sum()) // (job.global_batch * job.context_window)
    if filled > _MANY_STEPS:
        print(f"wlb: note: the documents fill {filled:,} steps; --steps N takes as many as fill N", file=sys.stderr)


def title_of(job: SimulatedJob, priced_by: dict[str, str | int]) -> str:
    sizes = f"{job.packing.micro_batches} micro-batches a step, dp {job.layout.dp}, pp {job.layout.pp}"
    price = ", ".join(f"{key} {value}" for key, value in priced_by.items())
    return f"window {job.context_window:,}, {sizes}\nsimulated with {price}"


def compare_packers(
    packers: Iterable[tuple[str, Packer[Any]]], documents: Sequence[Segment], job: SimulatedJob
) -> list[MethodResult]:
    """A row for each packer, by the name it is shown with, with a progress bar of its own."""
    from wlb.simulate.compare import compare_packer

    results = []
    with progress_bar() as bar:
        for name, packer in packers:
            advance = partial(bar.advance, bar.add_task(name, total=len(documents)))
            results.append(compare_packer(name, packer, documents, job, on_progress=advance))
    return results


def show_comparison(results: Sequence[MethodResult], title: str) -> None:
    """Print the table, on a narrow terminal without some of its columns, and whether all documents were trained."""
    print_table(comparison_table(results, title), comparison_table(results, title, narrow=True))
    for r in results:
        if r.documents_in != r.documents_out:
            stdout.print(f"[red]{r.method} trained {r.documents_out:,} of {r.documents_in:,} documents[/red]")
    if all(r.documents_in == r.documents_out for r in results):
        stdout.print(f"every method trained all {results[0].documents_in:,} documents, each token once ✓")


def comparison_table(results: Sequence[MethodResult], title: str, *, narrow: bool = False) -> Table:
    from rich import box
    from rich.table import Table

    from wlb.simulate.compare import compared_rows

    rows = compared_rows(results)
    columns = _columns(rows)
    if narrow:
        columns = {heading: cells for heading, cells in columns.items() if heading not in _WIDE_ONLY}
    table = Table(
        title=title,
        caption="\n".join(note for heading, note in _NOTES.items() if heading in columns),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("method", no_wrap=not narrow)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in zip([_name(row) for row in rows], *columns.values(), strict=True):
        table.add_row(*row)
    return table


# What is explained below the table, by column.
_NOTES = {
    "speed at\nequal work": "speed at equal work: predicted seconds of work done in a second, over row one\n"
    "all rows but the first are arranged: dealt to ranks and ordered by work",
    "token\ndelay": "token delay: mean (longest), in steps",
    "step\nspread": "step spread: of tokens a step",
    "pipeline\ncost": "pipeline cost: a step's seconds over those of a perfectly balanced one",
    "attention\nkept": "attention kept: query-key pairs computed, the others are cut away",
    "tokens/s": "tokens/s: over row one; counts what is cut away as a gain",
}
_WIDE_ONLY = ("step\nspread", "planning\nms/step", "pipeline\ncost")  # a narrow terminal goes without


def _columns(rows: Sequence[ComparedRow]) -> dict[str, list[str]]:
    results = [row.result for row in rows]
    return {
        "speed at\nequal work": [f"{row.speed_at_equal_work:.2f}x" for row in rows],
        "imbalance\ndegree": [f"{r.imbalance_degree:.3f}" for r in results],
        "token\ndelay": [f"{r.mean_token_delay:.2f} ({r.longest_delay})" for r in results],
        "step\nspread": [f"{r.tokens_per_step_cv:.1%}" for r in results],
        "planning\nms/step": [f"{r.planning_ms_per_step:.2f}" for r in results],
        "pipeline\ncost": [f"{row.simulated.pipeline_cost:.3f}" for row in rows],
        "attention\nkept": [f"{r.attention_kept:.0%}" for r in results],
        "tokens/s": [f"{row.speed_in_tokens:.2f}x" for row in rows],
    }


def _name(row: ComparedRow) -> str:
    gap = row.result.optimality_gap
    return row.name + ("" if gap is None else f" (gap {gap:.1%})")
