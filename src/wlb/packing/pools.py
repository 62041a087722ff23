"""Elastic pools: how the ranks that hold the same weights are grouped to run micro-batches together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Grouping = Literal["even", "alike"]


@dataclass(frozen=True)
class Pools:
    """Pools of ``size`` of a pipeline stage's dp x cp ranks, each of which runs ``micro_batches`` a step.

    ``global_batch`` counts the context windows that a step trains, whatever the pools; documents of a micro-batch are
    chosen by ``grouping`` (``wlb.packing.elastic``), and with ``delays`` they may wait for another step. What is "auto"
    is yet to be decided (``wlb.simulate.decide``).
    """

    size: int | Literal["auto"]
    micro_batches: int | Literal["auto"]
    grouping: Grouping | Literal["auto"]
    global_batch: int
    delays: bool = False
