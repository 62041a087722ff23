"""Pictures of results, drawn with Matplotlib into files, and the colours of all pictures.

In every picture, as in the HTML report of ``wlb report``, baselines are grey and balanced systems are green. In
timelines computing is blue-grey and waiting is red.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from wlb.cli.options import check_writable
from wlb.errors import UserError

Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the result: .png, .pdf or .svg.")]

BASELINE, BALANCED = "#aab3bd", "#1b7f5c"  # on light paper
COMPUTING, WAITING = "#a9bdd0", "#e03131"

QUOTED = "#b8bfc7"
COLOURS = ("#c2571a", "#6a7fb5", BALANCED, "#d4a017", "#a3496f", "#8a7a2b")


def check_picture(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn, before any work is done."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UserError(f"picture {path} must end in one of .png, .pdf, .svg")
    check_writable(path)


def lines_over_tokens(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    *,
    label: str,
    log: Sequence[str] = (),
) -> None:
    """A panel for each of ``panels``, with named lines of (tokens, values); ``log`` names those with a log scale."""
    figure, axes = pyplot_without_display().subplots(
        1, len(panels), figsize=(1 + 5.2 * len(panels), 4.2), squeeze=False, constrained_layout=True
    )
    for axis, (name, lines) in zip(axes[0], panels.items(), strict=True):
        colours = iter(COLOURS * 2)
        for line, (tokens, values) in lines.items():
            if line.startswith("quoted"):
                axis.plot(tokens, values, "D", color="black", ms=6, mfc=QUOTED, label=line, zorder=3)
            else:
                axis.plot(tokens, values, "o-", ms=3.5, color=next(colours), label=line)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}")
        axis.set(xlabel=label, title=name, yscale="log" if name in log else "linear")
        tidy(axis)
    if len(panels) > 1:
        figure.suptitle(title, fontsize=11)
    save(figure, path)


def tidy(axis: Any) -> None:
    """A grid, a legend, and no frame."""
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Write ``figure`` to ``path``, or say in one line why that is not possible."""
    try:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise UserError(f"picture {path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        pyplot_without_display().close(figure)


def pyplot_without_display() -> Any:
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    return import_module("matplotlib.pyplot")
