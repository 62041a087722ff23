"""How ``wlb simulate`` shows its results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from wlb.cli.console import emit_json, print_table, stdout

if TYPE_CHECKING:
    from wlb.simulate import SimulationResult
    from wlb.simulate.search import SearchResult

_FINALISTS_SHOWN = 12
_WORTH_TELLING = 0.002  # of a step
_DESCRIPTIONS = ("layout", "check-\npointing", "packing and sharding")  # columns of words
_WIDE_ONLY = ("check-\npointing", "step s", "attention\nkept")  # a narrow terminal goes without
_BASE = "plain-4d"  # what speeds are compared with, where it is simulated


def simulation_json(results: dict[str, SimulationResult]) -> list[dict[str, Any]]:
    base = results[_base_of(results)]
    return [
        {"system": name} | result.to_json() | {"speed_at_equal_work": result.speed_at_equal_work(base)}
        for name, result in results.items()
    ]


def simulation_table(
    title: str, results: dict[str, SimulationResult], shown: dict[str, Any], *, narrow: bool = False
) -> Table:
    """Where the time of each system's steps goes, in seconds and shares; ``narrow`` leaves the seconds out."""
    from wlb.simulate import CAUSES

    first = next(iter(results.values()))
    base = _base_of(results)
    priced = f"profile {shown['profile']}, links of {shown['hardware']}" if shown["profile"] else shown["hardware"]
    table = Table(
        title=f"{title} on {first.job.layout.world_size:,} GPUs\nsimulated ({priced})",
        caption=f"{first.steps} steps of {first.job.packing.micro_batches} micro-batches, lengths {shown['lengths']}\n"
        f"{_repeated(results.values())}"
        f"speed at equal work: predicted seconds of work done in a second, over {base}\n"
        "tokens/s counts attention that is cut away, and documents still delayed, as gains\n"
        + ("shares" if narrow else "seconds")
        + " of a step · imbalance: slowest over mean",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for name in results:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("speed at equal work", *(f"{r.speed_at_equal_work(results[base]):.3f}x" for r in results.values()))
    table.add_row("tokens/s", *(f"{r.tokens_per_second:,.0f}" for r in results.values()))
    table.add_section()
    for cause in CAUSES:
        cells = [_part(r.where[cause], r.mean_step_seconds, narrow) for r in results.values()]
        if any(abs(r.where[cause]) > 5e-4 for r in results.values()):
            table.add_row(cause, *cells)
    table.add_section()
    if narrow:
        table.add_row("step, seconds", *(f"{r.mean_step_seconds:.3f}" for r in results.values()))
    else:
        table.add_row("step", *(_part(r.mean_step_seconds, r.mean_step_seconds) for r in results.values()))
    for key, name in (
        ("gpus", "imbalance: GPUs"),
        ("micro_batches", "micro-batches"),
        ("cp", "cp ranks"),
        ("dp", "dp ranks"),
    ):
        table.add_row(name, *(f"{r.imbalance[key]:.3f}" for r in results.values()))
    table.add_row("token delay, steps", *(f"{r.token_delay:.3f}" for r in results.values()))
    table.add_row("tokens per step, CV", *(f"{r.tokens_cv:.3f}" for r in results.values()))
    table.add_row("attention kept", *(f"{r.attention_kept:.0%}" for r in results.values()))
    return table


def _part(seconds: float, of_step: float, narrow: bool = False) -> str:
    share = f"{seconds / of_step:6.1%}"
    return share if narrow else f"{seconds:.3f} {share}"


def _repeated(results: Iterable[SimulationResult]) -> str:
    """A line where the documents did not fill the steps."""
    epochs = max(result.epochs for result in results)
    return f"the documents fill fewer steps and are repeated: {epochs} passes over them began\n" if epochs > 1 else ""


def _base_of(results: dict[str, SimulationResult]) -> str:
    """The system that the others are compared with: plain-4d, or the first where that was not simulated."""
    return _BASE if _BASE in results else next(iter(results))


def report_search(found: SearchResult, json: bool) -> None:
    """Print the ranking and why its first is first."""
    from wlb.simulate.search import explanation, layout_of, packing_of

    others = [("plain-4d in its layout", found.plain)]
    others = [*([("the runner-up", found.ranking[1])] if len(found.ranking) > 1 else []), *others]
    if json:
        emit_json(
            {
                "layouts": found.layouts,
                "too_large": found.too_large,
                "ranking": [_described(result, found.plain) for result in found.ranking],
                "plain": _described(found.plain, found.plain),
                "saved": {name: dict(explanation(found.winner, other)) for name, other in others},
            }
        )
        return
    print_table(search_table(found), search_table(found, narrow=True))
    for name, other in others:
        gain = found.winner.speed_at_equal_work(other)
        saved = explanation(found.winner, other)
        worth_telling = _WORTH_TELLING * found.winner.mean_step_seconds
        told = ", ".join(f"{cause} {seconds:+.2g}" for cause, seconds in saved if abs(seconds) >= worth_telling)
        stdout.print(
            f"{gain:.3f}x {name} at equal work ({layout_of(other.job)}, {packing_of(other.job)}); "
            f"seconds saved a step: {told or 'none'}",
            highlight=False,
        )


def search_table(found: SearchResult, *, narrow: bool = False) -> Table:
    """The ranking and plain-4d below it; ``narrow`` leaves columns out and folds the others."""
    from wlb.simulate.search import layout_of, packing_of

    job, rows = found.winner.job, [*found.ranking[:_FINALISTS_SHOWN], found.plain]
    table = Table(
        title=f"{job.layout.world_size:,} GPUs, {job.packing.micro_batches} windows of {job.context_window:,} tokens "
        f"a step\nsimulated ({found.layouts} layouts fit the memory, {found.too_large} do not)",
        caption=f"{_repeated(rows)}speed at equal work: over plain-4d in the fastest layout, the last row",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    columns = {
        "layout": [layout_of(r.job) for r in rows],
        "check-\npointing": [r.job.activation_checkpointing for r in rows],
        "packing and sharding": [packing_of(r.job) for r in rows],
        "speed at\nequal work": [f"{r.speed_at_equal_work(found.plain):.3f}x" for r in rows],
        "tokens/s": [f"{r.tokens_per_second:,.0f}" for r in rows],
        "step s": [f"{r.mean_step_seconds:.3g}" for r in rows],
        "attention\nkept": [f"{r.attention_kept:.0%}" for r in rows],
    }
    if narrow:
        columns = {heading: cells for heading, cells in columns.items() if heading not in _WIDE_ONLY}
    for heading in columns:
        described = heading in _DESCRIPTIONS
        table.add_column(heading, justify="left" if described else "right", no_wrap=not (narrow and described))
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _described(result: SimulationResult, plain: SimulationResult) -> dict[str, Any]:
    job = result.job
    layout = {name: getattr(job.layout, name) for name in ("tp", "cp", "pp", "dp", "virtual_pp", "schedule")}
    return result.to_json() | {
        "speed_at_equal_work": result.speed_at_equal_work(plain),
        "parallel": layout,
        "activation_checkpointing": job.activation_checkpointing,
        "packing": job.packing.in_use(),
        "sharding": job.sharding.model_dump(),
    }
