"""Finds ranks that are slow for their work.

Measured over predicted seconds says how fast a rank gets through its work. The workload model may be wrong by any
constant, so each rank is held against others. A rank that takes far more than the median for several steps in a row
is named once, and again only if it recovered in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb.training.observe.imbalance import RankSteps

_STEPS = 5  # looked at together: one slow step may be a page fault or a neighbour's burst
_PEERS = 3  # ranks of a pipeline stage that can tell which of them is the odd one out
_WORTH_SAYING = 0.1  # of the time that a slow rank took
_RECOVERED = 0.9  # of the factor; a rank that hovers around it is not reported again and again


@dataclass(frozen=True)
class RankName:
    """Where a rank runs."""

    host: str
    process: int
    device: str

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}, {self.device}"


class StragglerWatch:
    """Looks at the seconds of all ranks, step after step; ``names`` are in rank order, pipeline stage after stage."""

    def __init__(self, names: Sequence[RankName], stages: int, factor: float) -> None:
        self._names = names
        self._stages = stages
        self._factor = factor
        self._window: deque[RankSteps] = deque(maxlen=_STEPS)
        self.slow: frozenset[int] = frozenset()

    def observe(self, rows: RankSteps) -> list[str]:
        """Take in a measured step; returns what to report, a line a rank. ``slow`` are the ranks slow at present."""
        self._window.append(rows)
        if len(self._window) < _STEPS:
            return []
        took, foreseen, waited = (
            np.mean([rows[name] for rows in self._window], axis=0)
            for name in ("compute_seconds", "predicted_seconds", "core_wait_seconds")
        )
        expected = expected_seconds(took, foreseen, self._stages)
        over = took / np.maximum(expected, np.finfo(np.float64).tiny)
        stays = over > self._factor * np.where(np.isin(np.arange(len(over)), list(self.slow)), _RECOVERED, 1.0)
        before, self.slow = self.slow, frozenset(np.flatnonzero(stays).tolist())
        return [
            f"rank {rank} ({self._names[rank]}) is slow: {took[rank]:.3g} s of compute a step where "
            f"{expected[rank]:.3g} s is expected of it" + _because(waited[rank], took[rank])
            for rank in sorted(self.slow - before)
        ]


def _because(waited: float, took: float) -> str:
    return f"; {waited:.3g} s of it waiting for a core that others have" if waited > _WORTH_SAYING * took else ""


def expected_seconds(measured: NDArray[np.float64], predicted: NDArray[np.float64], stages: int) -> NDArray[np.float64]:
    """What each rank's compute should take, in the measured clock's seconds: predicted, times the median rank's pace.

    Where a pipeline stage has enough ranks they are compared with each other only, as the workload model may be wrong
    by another factor for another stage. Of two ranks in the middle the faster counts, so that of two one can be slow.
    Arrays have shape (ranks,), stage after stage.
    """
    pace = measured / np.maximum(predicted, np.finfo(np.float64).tiny)
    groups = np.sort(pace.reshape(stages if len(pace) >= _PEERS * stages else 1, -1), axis=1)
    typical = groups[:, (groups.shape[1] - 1) // 2]
    return predicted * np.repeat(typical, groups.shape[1])
