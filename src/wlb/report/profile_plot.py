"""The picture of a measured profile: seconds and achieved FLOP/s over lengths (as WLB-LLM's Figure 10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from wlb.report.plots import pyplot_without_display, save
from wlb.workload.base import Phase
from wlb.workload.flops import ATTENTION_BACKWARD_FACTOR, attention_flops
from wlb.workload.profile import WorkloadProfile

_COLOURS: dict[Phase, str] = {"forward": "#1b7f5c", "backward": "#c2571a"}


def plot_profile(profile: WorkloadProfile, path: Path) -> None:
    """Left the seconds of a document's attention and of the linear part, right the FLOP/s that attention reaches.

    Raises ``UserError`` if Matplotlib is missing or ``path`` cannot be written.
    """
    figure, (seconds, rates) = pyplot_without_display().subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    for phase, colour in _COLOURS.items():
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
