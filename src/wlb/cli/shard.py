"""``wlb shard``: what each sharding strategy would do to your documents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, print_table, progress_bar, stdout

if TYPE_CHECKING:
    from rich.table import Table

    from wlb.sharding.compare import StrategyResult


def shard(
    context: typer.Context,
    lengths: options.Lengths,
    context_window: options.ContextWindow,
    cp: Annotated[
        int, typer.Option("--cp", min=1, metavar="N", help="Context-parallel size: ranks that share a micro-batch.")
    ],
    tp: options.Tp = None,
    model: options.Model = options.DEFAULT_MODEL,
    hardware: options.Hardware = "h100",
    profile: options.Profile = None,
    strategies: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Of per_sequence, per_document, adaptive, hybrid, elastic; default: all."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, max=options.MOST_STEPS, metavar="N", help="Micro-batches to shard, drawn at random.")
    ] = 200,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the draw.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also draw every rank's attended area of one micro-batch: .png, .pdf or .svg."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Compare sharding strategies on micro-batches of a list of document lengths.

    Packs the documents sequentially, divides sampled micro-batches over context-parallel ranks with every strategy and
    prints how even the ranks are and how many keys and values they exchange.

    Example: wlb shard synthetic:20000:128K:0 --context-window 128K --cp 8
    """
    from wlb.documents.lengths import read_lengths
    from wlb.sharding import STRATEGIES, check_group_size
    from wlb.sharding.compare import compare_strategy, sample_micro_batches

    if plot is not None:
        options.check_picture(plot)
    check_group_size(cp)
    # Shards are priced one by one, so the workload is that of a GPU without context parallelism.
    workload, priced_by = options.workload_from(
        context, model, hardware, tp, 1, context_window, profile, used_with_profile=frozenset({"cp"})
    )
    priced_by = {name: value for name, value in priced_by.items() if name != "cp"}
    micro_batches = sample_micro_batches(read_lengths(lengths), context_window, samples, seed)
    names = options.names_in("--strategies", strategies, STRATEGIES)
    results: list[StrategyResult] = []
    with progress_bar() as bar:
        for name in names:
            task = bar.add_task(name, total=len(micro_batches))
            results.append(
                compare_strategy(name, micro_batches, cp, workload, on_progress=lambda task=task: bar.advance(task))  # type: ignore[misc]
            )
    title = f"window {context_window:,}, cp {cp}, {len(micro_batches)} micro-batches\npredicted for " + ", ".join(
        f"{key} {value}" for key, value in priced_by.items()
    )
    if plot is not None:
        from wlb.report.plots import plot_shards
        from wlb.sharding import make_shard_plan

        plot_shards([make_shard_plan(micro_batches[0], cp, name, workload=workload) for name in names], plot)
    if json:
        emit_json(
            {
                "strategies": [result.to_json() for result in results],
                "workload": priced_by,
                "context_window": context_window,
                "cp": cp,
                "samples": len(micro_batches),
                "seed": seed,
            }
        )
        return
    print_table(_table(results, title), _table(results, title, narrow=True))
    if plot is not None:
        stdout.print(f"picture: {plot}")


_WIDE_ONLY = ("group,\nseconds", "planning\nms", "chosen\nper document")  # a narrow terminal goes without


def _table(results: list[StrategyResult], title: str, *, narrow: bool = False) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        caption="means over micro-batches; imbalance: largest over mean rank\n"
        "group: predicted seconds, forward and backward; ranks wait in every layer\n"
        "K/V gathered: tokens whose keys and values another rank attends",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    best = min(result.slowest_seconds for result in results)
    columns = {
        "group over\nbest": [f"{r.slowest_seconds / best:.3f}x" for r in results],
        "group,\nseconds": [f"{r.slowest_seconds:.4f}" for r in results],
        "attention\nimbalance": [f"{r.attention_imbalance:.4f}" for r in results],
        "latency\nimbalance": [f"{r.latency_imbalance:.4f}" for r in results],
        "token\nimbalance": [f"{r.token_imbalance:.4f}" for r in results],
        "K/V\ngathered": [f"{r.kv_gather_fraction:.1%}" for r in results],
        "planning\nms": [f"{r.planning_ms:.2f}" for r in results],
        "chosen\nper document": [f"{r.chosen['per_document']:.0%}" if r.chosen else "" for r in results],
    }
    if narrow:
        columns = {heading: cells for heading, cells in columns.items() if heading not in _WIDE_ONLY}
    table.add_column("strategy", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in zip([r.strategy for r in results], *columns.values(), strict=True):
        table.add_row(*row)
    return table
