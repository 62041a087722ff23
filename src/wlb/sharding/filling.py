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
_PLACES = np.arange(_CUTS + 1)

Row = tuple[int, int, int]
Share = tuple[int, float]  # rank and seconds


def fill_ranks(
    cut: list[int],
    lengths: NDArray[np.int64],
    load_seconds: NDArray[np.float64],
    space: NDArray[np.int64],
    token_seconds: float,
    workload: Workload,
) -> tuple[list[int], Table]:
    """Share the ``cut`` segments among ranks that hold ``load_seconds`` and have ``space`` tokens free.

    ``lengths`` (tokens) are those of all segments; a token costs ``token_seconds`` beside its attention. Returns the
    rank of every piece and the pieces (segment, start, stop), empty ones among them. Space is aimed at, not guaranteed.
    """
    segments = sorted(cut, key=lambda segment: (-int(lengths[segment]), segment))
    sizes = lengths[segments]
    seconds = workload.attention_seconds(sizes) + token_seconds * sizes
    left: list[int] = space.tolist()
    ranks: list[int] = []
    rows: list[Row] = []
    for segment, shares in zip(segments, _pour(seconds, sizes, load_seconds, space), strict=True):
        for rank, start, stop in _cut(int(lengths[segment]), shares, left, token_seconds, workload):
            ranks.append(rank)
            rows.append((segment, start, stop))
            left[rank] -= stop - start
    return ranks, np.array(rows, dtype=np.int64)


def _pour(
    seconds: NDArray[np.float64],
    sizes: NDArray[np.int64],
    load_seconds: NDArray[np.float64],
    space: NDArray[np.int64],
) -> list[list[Share]]:
    """The shares of every document, longest first, each spanning as few ranks as it can."""
    gaps = _gaps(float(seconds.sum()), load_seconds, space * (seconds.sum() / sizes.sum()))
    # The longest documents have the dearest tokens: they go to ranks that have more seconds left than space.
    tightness = gaps / np.maximum(space, 1)
    filled = np.flatnonzero((gaps > 0) | (gaps == gaps.max()))
    ranks = filled[np.argsort(-tightness[filled], kind="stable")].tolist()
    rank_ends = np.cumsum(gaps[ranks]).tolist()
    document_ends = np.cumsum(seconds).tolist()
    rank_ends[-1] = document_ends[-1]  # whatever rounding made of it
    shares: list[list[Share]] = []
    current, poured = 0, 0.0
    for end in document_ends:
        shares.append([])
        while poured < end:
            level = min(end, rank_ends[current])
            if level > poured:
                shares[-1].append((ranks[current], level - poured))
                poured = level
            if poured >= rank_ends[current] and poured < document_ends[-1]:
                current += 1
    return shares


def _gaps(seconds: float, loads: NDArray[np.float64], most: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of ``seconds`` each rank takes, at most ``most``, so that all rise to the lowest common level."""
    levels = np.sort(np.concatenate([loads, loads + most]))
    volumes = np.clip(levels[:, None] - loads, 0.0, most).sum(axis=1)
    gaps: NDArray[np.float64] = np.clip(np.interp(seconds, volumes, levels) - loads, 0.0, most)
    return gaps


def _cut(
    length: int, shares: list[Share], space: list[int], token_seconds: float, workload: Workload
) -> list[tuple[int, int, int]]:
    """Pieces (rank, start, stop) of one document: the largest share takes the tail, the others nested pairs."""
    outer, _ = max(shares, key=lambda share: share[1])
    inner = [share for share in shares if share[0] != outer]
    if not inner:
        return [(outer, 0, length)]
    inner_seconds = sum(seconds for _, seconds in inner)
    most = max(0, min([int(space[rank] * (inner_seconds / seconds)) for rank, seconds in inner]))
    stops = _PLACES * length // _CUTS
    starts = np.maximum(stops - most, 0)
    until_stop, until_start = workload.attention_seconds(np.array((stops, starts)))
    stop = round(float(np.interp(inner_seconds, until_stop - until_start + token_seconds * (stops - starts), stops)))
    start = max(stop - most, 0)
    pieces = [(outer, 0, start), (outer, stop, length)]
    head, tail, done = start, stop, 0.0
    for rank, seconds in inner:
        done += seconds
        taken = round((stop - start) * done / inner_seconds)
        next_head, next_tail = start + (taken + 1) // 2, stop - taken // 2
        pieces += [(rank, head, next_head), (rank, next_tail, tail)]
        head, tail = next_head, next_tail
    return pieces
