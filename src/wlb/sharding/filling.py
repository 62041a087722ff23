"""Levelling ranks with documents that may be cut anywhere.

Ranks already hold some seconds of work; cut documents flow into what is left of them, one document after another, until
all ranks stand at one level. Of the ranks that share a document

- one takes its tail, whose keys and values no other rank needs, and of its head only what the others have no space for;
- the others share what lies between, each a head chunk and the tail chunk that mirrors it, taken from outside in. The
  pair's mean query sees the same keys whatever the pair's size, so any share costs in proportion to its tokens.

Equal shares of one document would be per-document sharding; unequal ones fill uneven gaps with few cuts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.plan import Table
from wlb.workload.base import Workload

_CUTS = 128  # places between which the cut of a document is interpolated

Row = tuple[int, int, int]


def fill_ranks(
    cut: list[int],
    lengths: NDArray[np.int64],
    seconds: NDArray[np.float64],
    load_seconds: NDArray[np.float64],
    space: NDArray[np.int64],
    workload: Workload,
) -> tuple[list[int], Table]:
    """Share the ``cut`` segments among ranks that hold ``load_seconds`` and have ``space`` tokens free.

    ``lengths`` (tokens) and ``seconds`` are those of all segments. Returns the rank of every piece and the pieces
    (segment, start, stop). A rank's space is aimed at, not guaranteed.
    """
    ranks: list[int] = []
    rows: list[Row] = []
    left = space.copy()
    for segment, shares in _pour(cut, lengths, seconds, load_seconds, space):
        for rank, row in _cut(segment, int(lengths[segment]), float(seconds[segment]), shares, left, workload):
            ranks.append(rank)
            rows.append(row)
            left[rank] -= row[2] - row[1]
    return ranks, np.array(rows, dtype=np.int64)


def _pour(
    cut: list[int],
    lengths: NDArray[np.int64],
    seconds: NDArray[np.float64],
    load_seconds: NDArray[np.float64],
    space: NDArray[np.int64],
) -> list[tuple[int, list[tuple[int, float]]]]:
    """The (rank, seconds) shares of every segment in ``cut``, each spanning as few ranks as it can."""
    per_token = seconds[cut].sum() / lengths[cut].sum()
    gaps = _gaps(float(seconds[cut].sum()), load_seconds, space * per_token)
    # The longest documents have the dearest tokens: they go to ranks that have more seconds left than space.
    ranks = sorted(np.flatnonzero(gaps > 0).tolist(), key=lambda rank: (-gaps[rank] / space[rank], rank))
    segments = sorted(cut, key=lambda segment: (-int(lengths[segment]), segment))
    rank_ends = np.cumsum(gaps[ranks])
    segment_ends = np.cumsum(seconds[segments])
    rank_ends[-1] = segment_ends[-1]
    shares: list[tuple[int, list[tuple[int, float]]]] = []
    current, poured = 0, 0.0
    for segment, end in zip(segments, segment_ends.tolist(), strict=True):
        parts = []
        while poured < end:
            upto = min(end, float(rank_ends[current]))
            parts.append((ranks[current], upto - poured))
            poured = upto
            current += poured >= rank_ends[current] and current + 1 < len(ranks)
        shares.append((segment, parts))
    return shares


def _gaps(seconds: float, loads: NDArray[np.float64], most: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of ``seconds`` each rank takes, at most ``most``, so that all rise to the lowest common level."""
    levels = np.sort(np.concatenate([loads, loads + most]))
    volumes = np.clip(levels[:, None] - loads, 0.0, most).sum(axis=1)
    gaps: NDArray[np.float64] = np.clip(np.interp(seconds, volumes, levels) - loads, 0.0, most)
    return gaps


def _cut(
    segment: int,
    length: int,
    price: float,
    shares: list[tuple[int, float]],
    space: NDArray[np.int64],
    workload: Workload,
) -> list[tuple[int, Row]]:
    """Cut one segment by ``shares`` (rank, seconds): the largest gets the tail, the others nested pairs before it."""
    outer, _ = max(shares, key=lambda share: share[1])
    inner = [share for share in shares if share[0] != outer]
    if not inner:
        return [(outer, (segment, 0, length))]
    inner_seconds = sum(part for _, part in inner)
    most = min(int(space[rank] * inner_seconds / part) for rank, part in inner)
    stops = np.arange(_CUTS + 1) * length // _CUTS
    starts = np.maximum(stops - most, 0)
    until_stop, until_start, _ = attention = workload.attention_seconds(np.stack([stops, starts, stops * 0 + length]))
    linear_rate = (price - attention[2, 0]) / length
    volumes = until_stop - until_start + linear_rate * (stops - starts)
    stop = round(float(np.interp(inner_seconds, volumes, stops)))
    start = max(stop - most, 0)
    pieces = [(outer, (segment, 0, start)), (outer, (segment, stop, length))]
    middle, done = stop - start, 0.0
    head, tail = start, stop
    for rank, part in inner:
        done += part
        taken = round(middle * done / inner_seconds)
        next_head, next_tail = start + (taken + 1) // 2, stop - taken // 2
        pieces += [(rank, (segment, head, next_head)), (rank, (segment, next_tail, tail))]
        head, tail = next_head, next_tail
    return pieces
