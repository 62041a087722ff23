"""What ranks exchange after a step, and what is diagnosed from it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.training.observe.diagnosis import RankName, diagnose
from wlb.training.observe.imbalance import RankStep, RankSteps, rank_steps

SHAPE = (2, 2, 2, 1)  # pp, dp, cp, tp
MICRO_BATCHES = 4
NAMES = [RankName("node0", 200 + rank, f"cuda:{rank}") for rank in range(8)]
EVEN = np.ones((*SHAPE, MICRO_BATCHES))


def rows_of(measured: NDArray[np.float64], predicted: NDArray[np.float64] | None = None) -> RankSteps:
    """What ranks would exchange, from seconds of each micro-batch, shape (pp, dp, cp, tp, micro_batches)."""
    rows = []
    for p, d, c, t in np.ndindex(measured.shape[:4]):
        in_tp = measured[p, d, c].max(axis=0)
        in_cp = measured[p, d].max(axis=(0, 1))
        foreseen = measured if predicted is None else predicted
        foreseen_cp = foreseen[p, d].max(axis=(0, 1))
        rows.append(
            RankStep(
                loss_share=0.0,
                data_wait_seconds=0.0,
                predicted_seconds=foreseen[p, d, c, t].sum(),
                predicted_cp_seconds=foreseen_cp.sum(),
                predicted_largest_seconds=foreseen_cp.max(),
                compute_seconds=measured[p, d, c, t].sum(),
                tp_seconds=in_tp.sum(),
                cp_seconds=in_cp.sum(),
                largest_seconds=in_cp.max(),
                core_wait_seconds=0.0,
            )
        )
    return rank_steps(np.array(rows))


def diagnosis_of(rows: RankSteps, step_seconds: float = 5.0, *, pooled: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {"last_step": 30, "step_seconds": step_seconds, "straggler_factor": 1.5}
    diagnosis = diagnose([rows] * 3, NAMES, SHAPE, MICRO_BATCHES, **options, pooled=pooled)
    assert json.loads(json.dumps(diagnosis, allow_nan=False)) == diagnosis
    return diagnosis
