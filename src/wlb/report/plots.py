"""Pictures of results, drawn with Matplotlib into PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wlb.errors import UserError, require
from wlb.report.roles import colour_of

if TYPE_CHECKING:
    from wlb.simulate.compare import MethodResult


def plot_comparison(results: Sequence[MethodResult], path: Path, *, title: str) -> None:
    """The rows of ``wlb compare``: speed at equal work, imbalance degree, pipeline cost, token delay."""
    from wlb.simulate.compare import compared_rows

    rows = compared_rows(results)
    colours = [colour_of(row.result.method) for row in rows]
    panels = (
        ("speed at equal work", [row.speed_at_equal_work for row in rows], 0.0, "{:.2f}x"),
        ("imbalance degree (1 is perfect)", [row.result.imbalance_degree for row in rows], 1.0, "{:.3f}"),
        ("pipeline cost over perfect balance", [row.pipeline_cost for row in rows], 1.0, "{:.3f}"),
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
