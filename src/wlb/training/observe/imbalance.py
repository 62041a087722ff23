"""The seconds of all ranks in a step, and how much goes into waiting, by the dimension along which ranks wait.

Waiting propagates from TP to CP to PP to DP (WLB-LLM, Figure 1): ranks of a tensor- or context-parallel group wait for
their slowest in every layer, a pipeline runs at the pace of its slowest stage, and data-parallel ranks meet at the end
of the step. So each factor compares the seconds that count along one dimension with those that the one below it left:

    tp   what counts for a tensor-parallel group, mean over groups, over the mean rank
    cp   what counts for a context-parallel group over what counts for its tensor-parallel groups, means
    pp   a pipeline's slowest stage over its mean stage, means over pipelines
    dp   the slowest of these slowest stages over their mean

Each is at least 1, and their product is the slowest over the mean rank, with what the slowest waits inside its groups.
In level steps what counts for a context-parallel group is what its slowest rank takes for the step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Imbalance = dict[str, dict[str, float | None]]  # dimension -> "predicted", "measured"


class RankSteps(NamedTuple):
    """What every rank tells all others after the backward passes of a step; arrays of shape (ranks,).

    What counts for a tensor- or context-parallel group is the slowest of its ranks in each micro-batch: two ranks that
    are slow in turn cost as much as one that always is.
    """

    loss_share: Array
    predicted_seconds: Array  # a rank's compute by the workload model, forward and backward of all micro-batches
    predicted_cp_seconds: Array  # what counts for its context-parallel group; tensor-parallel ranks are predicted equal
    compute_seconds: Array  # a rank's compute as measured
    tp_seconds: Array  # what counts for its tensor-parallel group
    cp_seconds: Array  # and, of those, for its context-parallel group


def imbalance_of(steps: RankSteps, mesh_shape: tuple[int, ...]) -> Imbalance:
    """The factors of a step on a mesh of (pp, dp, cp, tp), as predicted and as measured; None without any seconds."""
    imbalance: Imbalance = {name: {} for name in ("tp", "cp", "pp", "dp")}
    for kind, seconds in (
        ("predicted", (steps.predicted_seconds, steps.predicted_seconds, steps.predicted_cp_seconds)),
        ("measured", (steps.compute_seconds, steps.tp_seconds, steps.cp_seconds)),
    ):
        rank, tp, cp = (of_ranks.reshape(mesh_shape) for of_ranks in seconds)
        groups = cp[:, :, :, 0].max(axis=2)  # all ranks of a group have the same, but for those of level steps
        pipelines = groups.max(axis=0)
        counting = [rank.mean(), tp.mean(), groups.mean(), pipelines.mean(), pipelines.max()]
        for factor, (below, above) in zip(imbalance.values(), pairwise(counting), strict=True):
            factor[kind] = float(above / below) if rank.any() else None
    return imbalance
