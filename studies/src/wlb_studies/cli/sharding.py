"""``wlb-studies sharding``: compare sharding strategies on your documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, show_columns, show_next
from wlb.cli.groups import given_again, names_of
from wlb.report.answer import listed
from wlb_studies.cli.gpu_options import ContextWindow, GpuOptions
from wlb_studies.cli.terminal import with_progress, with_room
from wlb_studies.plots import Plot, check_picture

if TYPE_CHECKING:
    from wlb_studies.sharding import StrategyResult


def sharding(
    context: typer.Context,
    lengths: options.Lengths,
    context_window: ContextWindow,
    cp: Annotated[int, options.number("Context-parallel size: ranks that share a micro-batch.")],
    gpu: GpuOptions,
    strategies: Annotated[
        str | None,
        options.list_of_names("Of per_sequence, per_document, adaptive, balanced; default: all."),
    ] = None,
    samples: Annotated[int, options.number_of_steps("Micro-batches to shard, drawn at random.")] = 200,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the draw.")] = 0,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """Compare sharding strategies on micro-batches of a list of document lengths.

    Packs the documents sequentially and shards sampled micro-batches over context-parallel ranks with every strategy.
    Prints how even the ranks are and how many keys and values they exchange. --plot draws one micro-batch: the attended
    area of every rank.

    Example: wlb-studies sharding synthetic:20000:128K:0 --context-window 128K --cp 8
    """
    from wlb.documents.lengths import read_lengths
    from wlb.sharding import STRATEGIES, check_group_size, make_shard_plan
    from wlb_studies.sharding import compare_strategy, sample_micro_batches

    check_picture(plot)
    check_group_size(cp)
    # Shards are priced one by one, so the workload describes a GPU without context parallelism.
    priced = gpu.priced(context, context_window, 1, reads=["cp"])
    priced_by = {name: value for name, value in priced.described.items() if name != "cp"}
    documents = read_lengths(lengths)
    micro_batches = sample_micro_batches(documents[documents > 0], context_window, samples, seed)
    names = options.names_in("--strategies", strategies, STRATEGIES)
    results = [
        compare_strategy(name, micro_batches, cp, priced.workload, on_progress=advance)
        for name, _, advance in with_progress(zip(names, names, strict=True), len(micro_batches))
    ]
    if plot is not None:
        from wlb_studies.sharding import plot_shards

        plot_shards([make_shard_plan(micro_batches[0], cp, name, workload=priced.workload) for name in names], plot)
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
    sizes = f"window {context_window:,}, cp {cp}, {len(micro_batches)} micro-batches"
    _show(results, f"{sizes}\npredicted for {listed(priced_by)}")
    same = names_of(GpuOptions) + ["context_window"] + ["cp"] * (gpu.profile is None)
    show_next("check", lengths, *given_again(context, same))


def _show(results: Sequence[StrategyResult], title: str) -> None:
    best = min(result.slowest_seconds for result in results)
    columns = {
        "strategy": [r.strategy for r in results],
        "group over\nbest": [f"{r.slowest_seconds / best:.3f}x" for r in results],
        "group,\nseconds": [f"{r.slowest_seconds:.4f}" for r in results],
        "attention\nimbalance": [f"{r.attention_imbalance:.4f}" for r in results],
        "latency\nimbalance": [f"{r.latency_imbalance:.4f}" for r in results],
        "token\nimbalance": [f"{r.token_imbalance:.4f}" for r in results],
        "K/V\ngathered": [f"{r.kv_gather_fraction:.1%}" for r in results],
        "planning\nms": [f"{r.planning_ms:.2f}" for r in results],
        "chosen\nper document": [f"{r.chosen['per_document']:.0%}" if r.chosen else "" for r in results],
    }
    show_columns(
        with_room(columns, ("group,\nseconds", "planning\nms", "chosen\nper document")),
        title=title,
        notes={
            "strategy": "means over micro-batches; imbalance: largest over mean rank",
            "group over\nbest": "group: predicted seconds of both passes; ranks synchronise in every layer",
            "K/V\ngathered": "K/V gathered: tokens whose keys and values another rank attends",
        },
    )
