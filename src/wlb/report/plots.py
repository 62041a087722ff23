"""Pictures of results, drawn with Matplotlib into PNG files, and who is who in them.

In every picture, of files and of the HTML report alike, baselines are grey and what balances workloads is green.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError, require
from wlb.report.html.diagrams import attended_areas
from wlb.sharding.plan import ShardPlan
from wlb.simulate.compare import MethodResult, compared_rows
from wlb.workload.base import Phase
from wlb.workload.flops import ATTENTION_BACKWARD_FACTOR, attention_flops
from wlb.workload.profile import WorkloadProfile

BASELINE, BALANCED = "#aab3bd", "#1b7f5c"  # on light paper

_BASELINES = ("sequential", "fixed_greedy", "fixed_solver")  # the packing of the paper's plain-4D and fixed-4D
_PHASE_COLOURS: dict[Phase, str] = {"forward": "#1b7f5c", "backward": "#c2571a"}
_NAMED_DOCUMENTS = 6
_OTHER_DOCUMENTS = "#c9ced4"


def is_baseline(method: str) -> bool:
    """Whether packing ``method``, ``NAME`` or ``NAME:ARGUMENT``, is what others are compared with."""
    return method.partition(":")[0] in _BASELINES


def colour_of(method: str) -> str:
    return BASELINE if is_baseline(method) else BALANCED


def plot_comparison(results: Sequence[MethodResult], path: Path, *, title: str) -> None:
    """The rows of ``wlb compare``: speed at equal work, imbalance degree, pipeline cost, token delay."""
    rows = compared_rows(results)
    colours = [colour_of(row.result.method) for row in rows]
    panels = (
        ("speed at equal work", [row.speed_at_equal_work for row in rows], 0.0, "{:.2f}x"),
        ("imbalance degree (1 is perfect)", [row.result.imbalance_degree for row in rows], 1.0, "{:.3f}"),
        ("pipeline cost over perfect balance", [row.simulated.pipeline_cost for row in rows], 1.0, "{:.3f}"),
        ("mean token delay (steps)", [row.result.mean_token_delay for row in rows], 0.0, "{:.2f}"),
    )
    figure, axes = pyplot_without_display().subplots(
        1, len(panels), figsize=(16, 1.8 + 0.42 * len(rows)), sharey=True, constrained_layout=True
    )
    for axis, (label, values, origin, shown) in zip(axes, panels, strict=True):
        axis.barh(range(len(rows)), [value - origin for value in values], left=origin, color=colours)
        for place, value in enumerate(values):
            right_of = (max(value, origin), place)
            axis.annotate(shown.format(value), right_of, (4, 0), textcoords="offset points", va="center")
        reach = max(*(value - origin for value in values), 0.01)
        axis.set_xlim(min(origin, *values), origin + 1.25 * reach)
        axis.set_title(label, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows])
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def plot_profile(profile: WorkloadProfile, path: Path) -> None:
    """Left the seconds of a document's attention and of the linear part, right the FLOP/s that attention reaches.

    Raises ``UserError`` if Matplotlib is missing or ``path`` cannot be written.
    """
    figure, (seconds, rates) = pyplot_without_display().subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    for phase, colour in _PHASE_COLOURS.items():
        attention, linear = (getattr(part, f"{phase}_seconds") for part in (profile.attention, profile.linear))
        seconds.plot(profile.attention.tokens, attention, "o-", ms=3, color=colour, label=f"attention, {phase}")
        seconds.plot(profile.linear.tokens, linear, "s--", ms=3, color=colour, label=f"everything else, {phase}")
        flops = attention_flops(profile.model, profile.attention.tokens, phase) / profile.tp
        rates.plot(profile.attention.tokens, flops / attention, "o-", ms=3, color=colour, label=f"documents, {phase}")
        _plot_prefix(rates, profile, phase, colour)
    seconds.set(yscale="log", title="seconds, all layers", xlabel="tokens of the document or micro-batch")
    rates.set(ylim=(0, None), title="achieved FLOP/s of attention", xlabel="tokens of the document, or queries")
    for axis in (seconds, rates):
        axis.set_xscale("log", base=2)
        axis.legend(frameon=False, fontsize=8)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    measured = f"{profile.dtype}, measured with {profile.clock}" if profile.clock else profile.dtype
    figure.suptitle(f"{profile.machine}, tp {profile.tp}, {measured}", fontsize=11)
    save(figure, path)


def _plot_prefix(axis: Any, profile: WorkloadProfile, phase: Phase, colour: str) -> None:
    """Queries over the most keys that come before them: what a short chunk of a long document reaches."""
    table = profile.prefix_attention
    if table is None:
        return
    shape = profile.model
    work = ATTENTION_BACKWARD_FACTOR if phase == "backward" else 1.0
    flops_per_pair = work * 4.0 * shape.layers * shape.heads * shape.head_dim / profile.tp
    seconds = np.array(getattr(table, f"{phase}_seconds"))[:, -1]
    rates = flops_per_pair * np.array(table.queries) * table.keys[-1] / seconds
    axis.plot(table.queries, rates, "^:", ms=4, color=colour, label=f"queries over {table.keys[-1]:,} keys, {phase}")


def plot_shards(plans: Sequence[ShardPlan], path: Path) -> None:
    """One panel a plan of the same micro-batch: the attended area of each rank over the mean, by document."""
    pyplot = pyplot_without_display()
    lengths = np.asarray(plans[0].segment_lengths)
    longest = np.argsort(-lengths, kind="stable")[:_NAMED_DOCUMENTS]
    colours = pyplot.get_cmap("viridis")(np.linspace(0.05, 0.9, len(longest)))
    figure, axes = pyplot.subplots(
        1, len(plans), figsize=(1.5 + 3.0 * len(plans), 3.8), sharey=True, squeeze=False, constrained_layout=True
    )
    bars = [_draw_shards(axis, plan, longest, colours) for axis, plan in zip(axes[0], plans, strict=True)]
    axes[0][0].set_ylabel("attended area over the mean rank")
    labels = [f"{lengths[segment]:,} tokens" for segment in longest]
    labels.append(f"{len(lengths) - len(longest)} shorter")
    figure.legend(bars[0], labels, title="document", loc="outside right upper", frameon=False, fontsize=8)
    save(figure, path)


def _draw_shards(axis: Any, plan: ShardPlan, longest: NDArray[np.int64], colours: NDArray[np.float64]) -> list[Any]:
    """Draw one panel; returns the bars of each document in ``longest`` and those of all others."""
    area = attended_areas(plan)
    ranks = np.arange(plan.cp_size)
    base = np.zeros(plan.cp_size)
    bars = []
    for segment, colour in zip(longest, colours, strict=True):
        bars.append(axis.bar(ranks, area[:, segment], bottom=base, color=colour, width=0.85))
        base += area[:, segment]
    bars.append(axis.bar(ranks, area.sum(axis=1) - base, bottom=base, color=_OTHER_DOCUMENTS, width=0.85))
    axis.axhline(1.0, color="black", linewidth=1)
    axis.set_title(
        f"{plan.strategy}\nlargest {area.sum(axis=1).max():.3f}, K/V gathered {plan.kv_gather_fraction:.0%}", fontsize=9
    )
    axis.set_xlabel("rank")
    axis.set_xticks(ranks if plan.cp_size <= 16 else ranks[:: plan.cp_size // 8])
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    return bars


def save(figure: Any, path: Path) -> None:
    """Write ``figure`` to ``path``, or say in one line why that is not possible."""
    try:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise UserError(f"picture {path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        pyplot_without_display().close(figure)


def pyplot_without_display() -> Any:
    require("matplotlib", "plot").use("Agg")
    return require("matplotlib.pyplot", "plot")
