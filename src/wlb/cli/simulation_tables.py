"""How ``wlb simulate`` shows its results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from wlb.cli.console import emit_json, stdout

if TYPE_CHECKING:
    from wlb.simulate import SimulationResult
    from wlb.simulate.search import SearchResult

_FINALISTS_SHOWN = 12


def simulation_table(title: str, results: dict[str, SimulationResult], shown: dict[str, Any]) -> Table:
    from wlb.simulate import CAUSES

    first = next(iter(results.values()))
    priced = f"profile {shown['profile']}, links of {shown['hardware']}" if shown["profile"] else shown["hardware"]
    table = Table(
        title=f"{title} on {first.job.gpus:,} GPUs\nsimulated ({priced})",
        caption=f"{first.steps} steps of {first.job.packing.micro_batches} micro-batches, lengths {shown['lengths']}\n"
        "seconds of a step · imbalance: slowest over mean\n"
        "attention kept: the rest is cut away",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("where the time goes", no_wrap=True)
    for name in results:
        table.add_column(name, justify="right", no_wrap=True)
    for cause in CAUSES:
        cells = [f"{r.where[cause]:.3f} {r.where[cause] / r.mean_step_seconds:6.1%}" for r in results.values()]
        if any(abs(r.where[cause]) > 5e-4 for r in results.values()):
            table.add_row(cause, *cells)
    table.add_section()
    table.add_row("step", *(f"{r.mean_step_seconds:.3f} {1:6.1%}" for r in results.values()))
    table.add_row("tokens/s", *(f"{r.tokens_per_second:,.0f}" for r in results.values()))
    for key, name in (
        ("gpus", "imbalance: GPUs"),
        ("micro_batches", "micro-batches"),
        ("cp", "cp ranks"),
        ("dp", "dp ranks"),
    ):
        table.add_row(name, *(f"{r.imbalance[key]:.3f}" for r in results.values()))
    table.add_row("attention kept", *(f"{r.attention_kept:.0%}" for r in results.values()))
    return table


def report_search(found: SearchResult, json: bool) -> None:
    """Print the ranking and why its first is first."""
    from wlb.simulate.search import explanation, layout_of, packing_of

    others = [("plain-4d in its layout", found.plain)]
    others = [*([("the runner-up", found.ranking[1])] if len(found.ranking) > 1 else []), *others]
    rows = [*found.ranking[:_FINALISTS_SHOWN], found.plain]
    if json:
        emit_json(
            {
                "layouts": found.layouts,
                "too_large": found.too_large,
                "ranking": [_described(result) for result in found.ranking],
                "plain": _described(found.plain),
                "saved": {name: dict(explanation(found.winner, other)) for name, other in others},
            }
        )
        return
    job = found.winner.job
    table = Table(
        title=f"{job.gpus:,} GPUs, {job.packing.micro_batches} windows of {job.context_window:,} tokens a step\n"
        f"simulated ({found.layouts} layouts fit the memory, {found.too_large} do not)",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("layout", no_wrap=True)
    table.add_column("check-\npointing", no_wrap=True)
    table.add_column("packing and sharding")
    for heading in ("tokens/s", "step s\n", "attention\nkept"):
        table.add_column(heading, justify="right", no_wrap=True)
    for r in rows:
        table.add_row(
            layout_of(r.job),
            r.job.activation_checkpointing,
            packing_of(r.job),
            f"{r.tokens_per_second:,.0f}",
            f"{r.mean_step_seconds:.2f}",
            f"{r.attention_kept:.0%}",
        )
    stdout.print(table)
    for name, other in others:
        gain = found.winner.tokens_per_second / other.tokens_per_second
        saved = explanation(found.winner, other)
        told = ", ".join(f"{cause} {seconds:+.2f}" for cause, seconds in saved if abs(seconds) >= 0.005)
        stdout.print(
            f"{gain:.3f}x {name} ({layout_of(other.job)}, {packing_of(other.job)}); seconds saved a step: {told}"
        )


def _described(result: SimulationResult) -> dict[str, Any]:
    job = result.job
    layout = {name: getattr(job, name) for name in ("tp", "cp", "pp", "dp", "virtual_pp", "schedule")}
    return result.to_json() | {
        "parallel": layout,
        "activation_checkpointing": job.activation_checkpointing,
        "packing": job.packing.in_use(),
        "sharding": job.sharding.model_dump(),
    }
