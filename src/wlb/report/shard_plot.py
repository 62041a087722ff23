"""A picture of shard plans: what every context-parallel rank attends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wlb.report.html.shard_chart import attended_areas
from wlb.report.plots import pyplot_without_display, save

if TYPE_CHECKING:
    from wlb.sharding.plan import ShardPlan

_NAMED_DOCUMENTS = 6
_OTHERS = "#c9ced4"


def plot_shards(plans: Sequence[ShardPlan], path: Path) -> None:
    """One panel a plan of the same micro-batch: the attended area of each rank over the mean, by document."""
    pyplot = pyplot_without_display()
    lengths = np.asarray(plans[0].segment_lengths)
    longest = np.argsort(-lengths, kind="stable")[:_NAMED_DOCUMENTS]
    colours = pyplot.get_cmap("viridis")(np.linspace(0.05, 0.9, len(longest)))
    figure, axes = pyplot.subplots(
        1, len(plans), figsize=(1.5 + 3.0 * len(plans), 3.8), sharey=True, squeeze=False, constrained_layout=True
    )
    bars = [_draw(axis, plan, longest, colours) for axis, plan in zip(axes[0], plans, strict=True)]
    axes[0][0].set_ylabel("attended area over the mean rank")
    labels = [f"{lengths[segment]:,} tokens" for segment in longest]
    labels.append(f"{len(lengths) - len(longest)} shorter")
    figure.legend(bars[0], labels, title="document", loc="outside right upper", frameon=False, fontsize=8)
    save(figure, path)


def _draw(axis: Any, plan: ShardPlan, longest: NDArray[np.int64], colours: NDArray[np.float64]) -> list[Any]:
    """Draw one panel; returns the bars of each document in ``longest`` and those of all others."""
    area = attended_areas(plan)
    ranks = np.arange(plan.cp_size)
    base = np.zeros(plan.cp_size)
    bars = []
    for segment, colour in zip(longest, colours, strict=True):
        bars.append(axis.bar(ranks, area[:, segment], bottom=base, color=colour, width=0.85))
        base += area[:, segment]
    bars.append(axis.bar(ranks, area.sum(axis=1) - base, bottom=base, color=_OTHERS, width=0.85))
    axis.axhline(1.0, color="black", linewidth=1)
    axis.set_title(
        f"{plan.strategy}\nlargest {area.sum(axis=1).max():.3f}, K/V gathered {plan.kv_gather_fraction:.0%}", fontsize=9
    )
    axis.set_xlabel("rank")
    axis.set_xticks(ranks if plan.cp_size <= 16 else ranks[:: plan.cp_size // 8])
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    return bars
