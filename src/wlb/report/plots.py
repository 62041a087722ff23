"""Pictures of results, drawn with Matplotlib into PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wlb.errors import UserError, require

if TYPE_CHECKING:
    from wlb.simulate.compare import MethodResult

BALANCED, IMBALANCED = "#1b7f5c", "#b8bfc7"


def plot_comparison(results: Sequence[MethodResult], path: Path, *, title: str) -> None:
    """One row a method: imbalance degree, pipeline cost as packed and arranged, token delay."""
    figure, axes = pyplot_without_display().subplots(1, 3, figsize=(13, 1.2 + 0.45 * len(results)), sharey=True)
    names = [result.method for result in results]
    colours = [BALANCED if name.startswith("variable") else IMBALANCED for name in names]
    packed = [r.pipeline_cost for r in results]
    arranged = [r.pipeline_cost_arranged for r in results]
    imbalance = [r.imbalance_degree for r in results]
    delay = [r.mean_token_delay for r in results]
    columns = (
        ("imbalance degree (1 is perfect)", imbalance, 1.0, [f"{value:.3f}" for value in imbalance]),
        (
            "simulated pipeline cost: as packed, ◆ arranged",
            packed,
            1.0,
            [f"{before:.3f}, {after:.3f}" for before, after in zip(packed, arranged, strict=True)],
        ),
        ("mean token delay (steps)", delay, 0.0, [f"{value:.2f}" for value in delay]),
    )
    for axis, (label, values, origin, texts) in zip(axes, columns, strict=True):
        bars = axis.barh(names, [value - origin for value in values], left=origin, color=colours)
        axis.bar_label(bars, texts, padding=6)
        reach = max(max(values) - origin, 0.01)
        axis.set_xlim(
            min(origin, *arranged, *packed) - 0.02 * reach if values is packed else origin, origin + 1.4 * reach
        )
        axis.set_title(label, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].scatter(arranged, names, marker="D", s=24, color="black", zorder=3)
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
