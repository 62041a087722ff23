"""What every rank tells all others after the backward passes of a step: its share of the loss, and its seconds.

A row of a few numbers, of the same size for any number of micro-batches and ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RankStep(NamedTuple):
    """One rank in one step; measured fields are NaN in a step that was not measured.

    Ranks of a tensor- or context-parallel group wait for each other inside every layer. What counts for the group is
    therefore the slowest of its ranks in each micro-batch: two ranks that are slow in turn cost as much as one that
    always is.
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


def rank_steps(rows: NDArray[np.float64]) -> RankSteps:
    """``rows`` of shape (ranks, fields of a RankStep) by field name."""
    fields = np.dtype([(name, np.float64) for name in RankStep._fields])
    return np.ascontiguousarray(rows).view(fields)[:, 0]
