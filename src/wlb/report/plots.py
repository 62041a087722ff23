"""Pictures of results, drawn with Matplotlib into PNG files, and who is who in them.

In every picture, of files and of the HTML report alike, baselines are grey and what balances workloads is green.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wlb.errors import UserError, require
from wlb.report.html.diagrams import areas_by_document
from wlb.report.packing import MethodResult, compared_rows
from wlb.sharding.plan import ShardPlan
from wlb.workload.flops import ATTENTION_BACKWARD_FACTOR, attention_flops
from wlb.workload.profile import WorkloadProfile

BASELINE, BALANCED = "#aab3bd", "#1b7f5c"  # on light paper

_BASELINES = ("sequential", "fixed_greedy", "fixed_solver")  # the packing of the paper's plain-4D and fixed-4D
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


def profile_lines(profile: WorkloadProfile) -> dict[str, dict[str, tuple[Sequence[float], Sequence[float]]]]:
    """What a profile's picture shows, panel by panel: lines of (tokens, values).

    Seconds of a document's attention and of the linear part; then the FLOP/s that attention of documents reaches, and
    of queries over the most keys that come before them: a short chunk of a long document.
    """
    seconds: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    rates: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    shape, table = profile.model, profile.prefix_attention
    for phase in ("forward", "backward"):
        attention, linear = (getattr(part, f"{phase}_seconds") for part in (profile.attention, profile.linear))
        seconds[f"attention, {phase}"] = profile.attention.tokens, attention
        seconds[f"everything else, {phase}"] = profile.linear.tokens, linear
        flops = attention_flops(shape, profile.attention.tokens, phase) / profile.tp
        rates[f"documents, {phase}"] = profile.attention.tokens, (flops / attention).tolist()
        work = ATTENTION_BACKWARD_FACTOR if phase == "backward" else 1.0
        pairs = np.array(table.queries) * table.keys[-1] * work / profile.tp
        of_table = np.array(getattr(table, f"{phase}_seconds"))[:, -1]
        reached = 4.0 * shape.layers * shape.heads * shape.head_dim * pairs / of_table
        rates[f"queries over {table.keys[-1]:,} keys, {phase}"] = table.queries, reached.tolist()
    return {"seconds, all layers": seconds, "achieved FLOP/s of attention": rates}


def plot_shards(plans: Sequence[ShardPlan], path: Path) -> None:
    """One panel a plan of the same micro-batch: the attended area of each rank over the mean, by document."""
    pyplot = pyplot_without_display()
    documents, areas = areas_by_document(plans)
    colours = [*pyplot.get_cmap("viridis")(np.linspace(0.05, 0.9, len(documents) - 1)), _OTHER_DOCUMENTS]
    figure, axes = pyplot.subplots(
        1, len(plans), figsize=(1.5 + 3.0 * len(plans), 3.8), sharey=True, squeeze=False, constrained_layout=True
    )
    for axis, plan, area in zip(axes[0], plans, areas, strict=True):
        ranks, tops = np.arange(plan.cp_size), area.cumsum(axis=1)
        bars = [
            axis.bar(ranks, area[:, n], bottom=tops[:, n] - area[:, n], color=colour, width=0.85)
            for n, colour in enumerate(colours)
        ]
        axis.axhline(1.0, color="black", linewidth=1)
        largest = f"largest {tops[:, -1].max():.3f}, K/V gathered {plan.kv_gather_fraction:.0%}"
        axis.set_title(f"{plan.strategy}\n{largest}", fontsize=9)
        axis.set_xlabel("rank")
        axis.set_xticks(ranks if plan.cp_size <= 16 else ranks[:: plan.cp_size // 8])
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("attended area over the mean rank")
    figure.legend(bars, documents, title="document", loc="outside right upper", frameon=False, fontsize=8)
    save(figure, path)


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
