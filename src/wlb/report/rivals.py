"""Rival policies in a report: a picture of their speeds, and the table of what ``wlb rivals --json`` wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.report.html.charts import bars
from wlb.report.html.markup import Markup, table
from wlb.report.html.page import paragraph
from wlb.report.plots import pyplot_without_display, save
from wlb.rivals.policy import Outcome

_OURS = ("best", "elastic")


def draw_speeds(path: Path, outcomes: Sequence[Outcome], title: str) -> None:
    """Bars of speed at equal work over the first outcome."""
    figure, axis = pyplot_without_display().subplots(figsize=(7, 1 + 0.32 * len(outcomes)), constrained_layout=True)
    speeds = [outcome.work_rate / outcomes[0].work_rate for outcome in outcomes]
    names = [outcome.policy for outcome in outcomes]
    colours = ["#1b7f5c" if name in _OURS else "#6a7fb5" for name in names]
    shown = axis.barh(names[::-1], speeds[::-1], color=colours[::-1])
    axis.bar_label(shown, [f"{speed:.2f}x" for speed in speeds[::-1]], fontsize=8, padding=2)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlabel(f"speed at equal work over {names[0]}, simulated")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=10)
    save(figure, path)


def read_rivals(path: Path) -> dict[str, Any]:
    """What ``wlb rivals --json`` printed. Raises ``UserError`` for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["policies"][0]["speed_at_equal_work"]
    except OSError as error:
        raise UserError(f"rivals {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(f"rivals {path} is not what wlb rivals --json prints; write it anew") from None
    result: dict[str, Any] = found
    return result


def rivals_section(found: dict[str, Any]) -> list[Markup]:
    """Chart and table of ``found``, as ``read_rivals`` gives it."""
    policies = found["policies"]
    rows = [
        (
            p["policy"],
            f"{p['speed_at_equal_work']:.2f}x",
            f"{p['token_delay']:.2f}",
            f"{p['tokens_cv']:.3f}",
            f"{p['exchanged_bytes'] / 1e9:.1f}",
            f"{p['memory_bytes'] / 2**30:.0f}",
            f"{p['planning_seconds']:.2f}",
            p["layout"],
        )
        for p in policies
    ]
    headings = ("policy", "speed", "token delay", "tokens/step CV", "exchange GB", "peak GiB", "planning s", "layout")
    return [
        bars(
            "rivals-chart",
            "Speed at equal work of published policies",
            [(p["policy"], p["speed_at_equal_work"], f"{p['speed_at_equal_work']:.2f}x") for p in policies],
            "times plain-4d, each policy in its best layout",
            f"Simulated, {policies[0]['steps']} steps of {found['model']} on {found['gpus']:,} {found['hardware']} "
            f"GPUs with a window of {found['context_window']:,}; lengths {found['lengths']}.",
            highlights=_OURS,
        ),
        table(headings, rows),
        paragraph(
            "Every policy is this project's reading of what was published; docs/rivals.md has sources and assumptions. "
            "Planning seconds are measured on the machine that ran the comparison, all else is simulated.",
            class_="muted",
        ),
    ]
