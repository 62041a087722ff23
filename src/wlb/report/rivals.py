"""Rival policies in a report: chart and table of what ``wlb rivals --json`` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.report.html.charts import bars
from wlb.report.html.markup import Markup, table
from wlb.report.html.page import paragraph

_OURS = ("best", "elastic")


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
