"""How much faster one series of steps is than another, and how sure that is.

Steps are redrawn with replacement in blocks of neighbours (a moving-block bootstrap), as what one step leaves over is
in the next; both series are redrawn at the same places, as their steps there hold nearly the same documents. The
interval covers which documents happen to arrive. It says nothing about errors of the workload model or of machines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCK = 8  # steps, or more where that makes too many blocks
_MOST_BLOCKS = 128
_DRAWS = 2000
_COVERED = (2.5, 97.5)  # percentiles


@dataclass(frozen=True)
class Gain:
    """Tokens per second of one series over another's, and the 95% interval of the bootstrap."""

    factor: float
    low: float
    high: float
    steps: int

    def __str__(self) -> str:
        return f"{self.factor:.2f}x ({self.low:.2f} to {self.high:.2f})"


def gain(
    before_tokens: NDArray[np.int64],
    before_seconds: NDArray[np.float64],
    after_tokens: NDArray[np.int64],
    after_seconds: NDArray[np.float64],
    *,
    seed: int = 0,
) -> Gain:
    """Tokens over seconds of ``after`` over those of ``before``; arrays have shape (steps,), cut to the shorter."""
    steps = min(len(before_tokens), len(after_tokens))
    columns = np.stack(
        [column[:steps] for column in (before_tokens, before_seconds, after_tokens, after_seconds)]
    ).astype(np.float64)
    block = min(max(_BLOCK, -(-steps // _MOST_BLOCKS)), max(1, steps // 4))
    ends = np.cumsum(np.concatenate([np.zeros((4, 1)), columns, columns[:, : block - 1]], axis=1), axis=1)
    block_sums = ends[:, block:] - ends[:, :-block]  # of the block from every step on, around the end
    starts = np.random.default_rng(seed).integers(0, steps, (_DRAWS, -(-steps // block)))
    ratios = _ratio(block_sums[:, starts].sum(axis=2))
    low, high = np.percentile(ratios, _COVERED)
    return Gain(float(_ratio(columns.sum(axis=1))), float(low), float(high), steps)


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    before_tokens, before_seconds, after_tokens, after_seconds = sums
    ratio: NDArray[np.float64] = (after_tokens / after_seconds) / (before_tokens / before_seconds)
    return ratio
