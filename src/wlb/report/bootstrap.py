"""How much faster one series of steps is than another, and how sure that is.

A moving-block bootstrap redraws steps with replacement in blocks of neighbours, because a document that one step leaves
over is in the next. Both series are redrawn at the same places, where they hold nearly the same documents. The interval
covers which documents happen to arrive. It does not cover errors of the workload model or of machines.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BLOCK = 8  # steps, or more where that makes too many blocks
_MOST_BLOCKS = 128
_DRAWS = 2000
_COVERED = (2.5, 97.5)  # percentiles


@dataclass(frozen=True)
class Gain:
    """The rate of one series over the rate of another, with the 95% interval of the bootstrap."""

    factor: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.factor:.2f}x ({self.low:.2f} to {self.high:.2f})"


def gain(before: ArrayLike, before_seconds: ArrayLike, after: ArrayLike, after_seconds: ArrayLike) -> Gain:
    """The rate of ``after`` (work or tokens per second) over the rate of ``before``.

    ``before`` and ``after`` have the work or tokens of each step, shape (steps,). They may differ in length; all steps
    count.
    """
    series = [np.array(columns, np.float64) for columns in ((before, before_seconds), (after, after_seconds))]
    blocks = max(-(-columns.shape[1] // _block_size(columns.shape[1])) for columns in series)
    places = np.random.default_rng(0).random((_DRAWS, blocks))
    drawn_before, drawn_after = (_redrawn_rates(columns, places) for columns in series)
    low, high = np.percentile(drawn_after / drawn_before, _COVERED)
    return Gain(_rate(series[1]) / _rate(series[0]), float(low), float(high))


def _block_size(steps: int) -> int:
    return min(max(_BLOCK, -(-steps // _MOST_BLOCKS)), max(1, steps // 4))


def _rate(columns: NDArray[np.float64]) -> float:
    done, seconds = columns.sum(axis=1)
    return float(done / seconds)


def _redrawn_rates(columns: NDArray[np.float64], places: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rate of each draw; ``places``, shape (draws, blocks or more), are where blocks begin, from 0 to 1."""
    steps = columns.shape[1]
    block = _block_size(steps)
    ends = np.cumsum(np.concatenate([np.zeros((2, 1)), columns, columns[:, : block - 1]], axis=1), axis=1)
    block_sums = ends[:, block:] - ends[:, :-block]  # of the block from every step on, around the end
    starts = (places[:, : -(-steps // block)] * steps).astype(np.int64)
    done, seconds = block_sums[:, starts].sum(axis=2)
    rates: NDArray[np.float64] = done / seconds
    return rates
