"""``wlb rivals``: published balancing policies beside ours, each in its best layout, on your documents."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, print_table, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

    from wlb.simulate.search import SearchSpace
    from wlb.studies.policies.policy import Outcome

_STEPS = 2  # as many as ``wlb reproduce rivals`` simulates, so that both give one figure


def rivals(
    lengths: options.Lengths,
    gpus: Annotated[int, typer.Option("--gpus", min=1, metavar="N", help="GPUs that every policy gets.")],
    context_window: options.ContextWindow = 131_072,
    model: options.Model = options.DEFAULT_MODEL,
    hardware: options.Hardware = "h100",
    batch_tokens: Annotated[
        int,
        typer.Option("--batch-tokens", metavar="TOKENS", parser=options.tokens, help="Global batch, such as 16M."),
    ] = 2**24,
    policies: Annotated[
        str | None, typer.Option("--policies", metavar="A,B,...", help="Policies; default: all (docs/rivals.md).")
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            min=1,
            max=options.MOST_STEPS,
            metavar="N",
            help="Steps of each policy in its best layout.",
        ),
    ] = _STEPS,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw the speeds: .png, .pdf or .svg.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Compare balancing policies on the same documents, model, GPUs and global batch, each in its best layout.

    Everything is simulated, with one model of computing, links and pipelines for all; planning seconds are measured
    here. Speed at equal work is over plain-4d, which is always included.

    Example: wlb rivals synthetic:20000:128K:0 --gpus 64 --context-window 128K --policies distca,bytescale,best
    """
    from wlb.documents.lengths import read_lengths
    from wlb.simulate.search import search_space
    from wlb.studies.policies import chosen, compare, epochs
    from wlb.studies.policies.grid import draw_speeds

    if plot is not None:
        options.check_picture(plot)
    names = chosen(policies)
    space = search_space(model, gpus, context_window, hardware=hardware, batch_tokens=batch_tokens, steps=steps)
    documents = read_lengths(lengths, keep_empty=True)
    with progress_bar() as bar:
        task = bar.add_task("", total=len(names))
        done = -1

        def show(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=name, completed=done)

        outcomes, without = compare(names, space, documents, on_progress=show)
    passes = epochs(names, space, documents)
    title = f"{gpus:,} GPUs, {model}, {space.micro_batches} windows of {context_window:,} tokens a step"
    if plot is not None:
        draw_speeds(plot, outcomes, title)
    if json:
        emit_json(
            {
                "gpus": gpus,
                "model": model,
                "hardware": hardware,
                "context_window": context_window,
                "batch_tokens": space.micro_batches * context_window,
                "lengths": lengths,
                "epochs": passes,
                "policies": [outcome.to_json(outcomes[0]) for outcome in outcomes],
                "without_layout": without,
            }
        )
        return
    print_table(rivals_table(outcomes, title, space))
    print_table(layouts_table(outcomes))
    if passes > 1:
        print(f"wlb: note: the documents fill fewer steps and are repeated: up to {passes} passes", file=sys.stderr)
    for name, why in without.items():
        print(f"wlb: note: {name}: {why}", file=sys.stderr)


def rivals_table(outcomes: Sequence[Outcome], title: str, space: SearchSpace) -> Table:
    """What each policy comes to; fits 80 columns."""
    from rich import box
    from rich.table import Table

    base = outcomes[0]
    table = Table(
        title=f"{title}\nsimulated; planning measured here",
        caption=f"speed at equal work: over {base.policy}; {space.steps} step{'s' * (space.steps > 1)}\n"
        "exchange: received per GPU and step for attention and switching",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True)
    headings = (
        "speed at\nequal work",
        "token\ndelay",
        "tokens/\nstep CV",
        "exchange\nGB/GPU",
        "peak\nGiB",
        "planning\ns/step",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            outcome.policy,
            f"{outcome.work_rate / base.work_rate:.2f}x",
            f"{outcome.token_delay:.2f}",
            f"{outcome.tokens_cv:.3f}",
            f"{outcome.exchanged_bytes / 1e9:.1f}",
            f"{outcome.memory_bytes / 2**30:.0f}",
            f"{outcome.planning_seconds:.2f}",
        )
    return table


def layouts_table(outcomes: Sequence[Outcome]) -> Table:
    """In which layout, of how many that were tried."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("tried", justify="right", no_wrap=True)
    table.add_column("its best layout")
    for outcome in outcomes:
        table.add_row(outcome.policy, f"{outcome.tried}", outcome.layout)
    return table
