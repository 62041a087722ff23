"""The seconds of all ranks in a step, and how much goes into waiting, by the dimension along which ranks wait.

After the backward passes every rank tells all others its share of the loss and its seconds: a row of a few numbers, of
the same size for any number of micro-batches and ranks.

Waiting propagates from TP to CP to PP to DP (WLB-LLM, Figure 1): ranks of a tensor- or context-parallel group wait for
their slowest in every layer, a pipeline runs at the pace of its slowest stage, and data-parallel ranks meet at the end
of the step. So each factor compares the seconds that count along one dimension with those that the one below it left:

    tp   what counts for a tensor-parallel group, mean over groups, over the mean rank
    cp   what counts for a context-parallel group over what counts for its tensor-parallel groups, means
    pp   a pipeline's slowest stage over its mean stage, means over pipelines
    dp   the slowest of these slowest stages over their mean

Each is at least 1, and their product is the slowest over the mean rank, as in the paper's figure, with what the slowest
waits inside its own groups counted as its. Over several steps the seconds are added first.

Where context-parallel ranks run micro-batches of their own, and wait for each other at the end of the step as
data-parallel ranks do, what counts for their group is what its slowest rank takes for the step.

``micro_batches`` comes on top: the largest micro-batch of a stage over its mean one, means over stages. While a
pipeline fills and empties its stages wait for the largest, about pp - 1 times a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RankStep(NamedTuple):
    """One rank in one step; measured fields are NaN in a step that was not measured.

    Ranks of a tensor- or context-parallel group wait for each other inside every layer. What counts for the group is
    therefore the slowest of its ranks in each micro-batch: two ranks that are slow in turn cost as much as one that
    always is. Of level steps, in which ranks of a context-parallel group run micro-batches of their own, each has its
    own seconds there.
    """

    loss_share: float
    data_wait_seconds: float  # how long training stood still for the loader
    predicted_seconds: float  # this rank's compute by the workload model, forward and backward of all micro-batches
    predicted_cp_seconds: float  # what counts for its context-parallel group; tensor-parallel ranks are predicted equal
    predicted_largest_seconds: float  # of which the largest micro-batch
    compute_seconds: float = np.nan  # this rank's compute as measured, without collectives
    tp_seconds: float = np.nan  # what counts for its tensor-parallel group
    cp_seconds: float = np.nan  # and, of those, for its context-parallel group
    largest_seconds: float = np.nan  # of which the largest micro-batch
    core_wait_seconds: float = np.nan  # of this rank's compute_seconds, how long other processes had its core


RankSteps = NDArray[np.void]  # a RankStep of every rank, shape (ranks,), by field name: steps["compute_seconds"]
Imbalance = dict[str, dict[str, float | None]]  # dimension -> "predicted", "measured"

_FIELDS = {
    "predicted": ("predicted_seconds", "predicted_seconds", "predicted_cp_seconds", "predicted_largest_seconds"),
    "measured": ("compute_seconds", "tp_seconds", "cp_seconds", "largest_seconds"),
}


def rank_steps(rows: NDArray[np.float64]) -> RankSteps:
    """``rows`` of shape (ranks, fields of a RankStep) by field name."""
    fields = np.dtype([(name, np.float64) for name in RankStep._fields])
    return np.ascontiguousarray(rows).view(fields)[:, 0]


def imbalance_of(steps: Sequence[RankSteps], mesh_shape: tuple[int, ...], micro_batches: int | None) -> Imbalance:
    """The factors over ``steps``, as predicted and as measured; None where there is nothing to compare.

    ``mesh_shape`` is (pp, dp, cp, tp) and ``micro_batches`` their number on each data-parallel rank;
    None where ranks differ in it, whose micro-batches are not compared.
    """
    by_kind = {
        kind: _factors(np.sum([_ladder(rows, fields, mesh_shape) for rows in steps], axis=0), micro_batches)
        for kind, fields in _FIELDS.items()
    }
    return {name: {kind: by_kind[kind][name] for kind in _FIELDS} for name in ("tp", "cp", "pp", "dp", "micro_batches")}


def _ladder(rows: RankSteps, fields: tuple[str, ...], mesh_shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Mean seconds that count for a rank, TP group, CP group, pipeline; for the step; mean largest micro-batch."""
    rank, tp, cp, largest = (rows[name].reshape(mesh_shape) for name in fields)
    groups = cp[:, :, :, 0].max(axis=2)  # all ranks of a group have the same, but for those of level steps
    pipelines = groups.max(axis=0)
    return np.array([rank.mean(), tp.mean(), groups.mean(), pipelines.mean(), pipelines.max(), largest.mean()])


def _factors(ladder: NDArray[np.float64], micro_batches: int | None) -> dict[str, float | None]:
    names = ("tp", "cp", "pp", "dp", "micro_batches")
    if not ladder[0] > 0:  # also NaN: not measured
        return dict.fromkeys(names)
    largest = None if micro_batches is None else float(ladder[5] * micro_batches / ladder[2])
    return dict(zip(names, [*(ladder[1:5] / ladder[:4]).tolist(), largest], strict=True))
