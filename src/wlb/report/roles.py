"""Who is who in a picture, in PNG files and pages alike: baselines are grey, what balances workloads is green."""

from __future__ import annotations

BASELINE, BALANCED = "#aab3bd", "#1b7f5c"  # on light paper

_BASELINES = ("sequential", "fixed_greedy", "fixed_solver")  # the packing of the paper's plain-4D and fixed-4D


def is_baseline(method: str) -> bool:
    """Whether packing ``method``, ``NAME`` or ``NAME:ARGUMENT``, is what others are compared with."""
    return method.partition(":")[0] in _BASELINES


def colour_of(method: str) -> str:
    return BASELINE if is_baseline(method) else BALANCED
