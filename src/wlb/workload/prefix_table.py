"""Measured attention of queries over keys that all come before them, between and beyond the sizes measured.

Seconds are interpolated bilinearly, which is exact for any a q k + b q + c k + d of q queries and k keys. Beyond the
largest sizes they grow in proportion. Fewer queries than were measured cost as much as the fewest: kernels work on
tiles, and a tile that is not full takes as long as a full one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.workload.base import Phase, Seconds

# Knot beyond every document: extrapolation becomes interpolation.
_FAR = 2.0**40


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTable:
    """Seconds over (queries, keys), of every phase; ``prefix_table`` makes it."""

    queries: NDArray[np.float64]  # (query knots,)
    keys: NDArray[np.float64]  # (key knots,)
    seconds: dict[Phase, NDArray[np.float64]]  # (query knots, key knots) each

    def price(self, queries: ArrayLike, keys: ArrayLike, phase: Phase) -> Seconds:
        """Seconds of ``queries`` tokens over ``keys`` tokens; the shape that both broadcast to."""
        q, k = (np.asarray(tokens, dtype=np.float64) for tokens in (queries, keys))
        row, down = _between(self.queries, np.maximum(q, self.queries[0]))
        column, right = _between(self.keys, k)
        table = self.seconds[phase]
        above = (1 - right) * table[row, column] + right * table[row, column + 1]
        below = (1 - right) * table[row + 1, column] + right * table[row + 1, column + 1]
        return np.where(q > 0, (1 - down) * above + down * below, 0.0)


def prefix_table(
    queries: ArrayLike, keys: ArrayLike, forward: NDArray[np.float64], backward: NDArray[np.float64]
) -> PrefixTable:
    """A table of measured seconds, raised where noise made more work look cheaper."""
    q, k = (np.asarray(tokens, dtype=np.float64) for tokens in (queries, keys))
    forward, backward = (_extend(seconds, q, k) for seconds in (forward, backward))
    return PrefixTable(
        np.append(q, _FAR),
        np.concatenate([[0.0], k, [_FAR]]),
        {"forward": forward, "backward": backward, "both": forward + backward},
    )


def _extend(
    seconds: NDArray[np.float64], queries: NDArray[np.float64], keys: NDArray[np.float64]
) -> NDArray[np.float64]:
    rising = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
    far_keys = rising[:, -1:] * (_FAR / keys[-1])
    wide = np.concatenate([np.zeros((len(queries), 1)), rising, far_keys], axis=1)
    return np.concatenate([wide, wide[-1:] * (_FAR / queries[-1])])


def _between(knots: NDArray[np.float64], tokens: NDArray[np.float64]) -> tuple[NDArray[np.int64], Seconds]:
    """The knot before each value, and how far it is on the way to the next."""
    before = np.clip(np.searchsorted(knots, tokens, side="right") - 1, 0, len(knots) - 2)
    return before, (tokens - knots[before]) / (knots[before + 1] - knots[before])
