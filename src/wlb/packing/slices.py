"""Slices: pipeline steps of micro-batches of equal work, which defer no documents.

The packer deals documents to the pipelines (data-parallel ranks), the most expensive first, each to the pipeline with
the least work, and then to a given number of micro-batches inside each pipeline. A document that costs more than the
mean micro-batch is cut along its sequence into slices of equal work; later slices are shorter, because their tokens
attend more. Slices begin at multiples of a tile of queries. The other documents then go, most expensive first, each to
the lightest micro-batch.

As all micro-batches have about the same work, pipeline bubbles are short however long a document is, and every step
trains its own documents. The slices of a document follow each other. Seconds are whole ticks, so that all machines make
the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from wlb.lightest import into_lightest
from wlb.workload.base import DocumentPrices

Integers = NDArray[np.int64]

TILE = 128  # queries in a tile of FlashAttention-2 and -3; a partial tile costs as much as a full one
_TICKS = 1e9  # per second
_SLACK = 0.05  # of the mean micro-batch: a slice may cost this much more before the document is cut once more


@runtime_checkable
class ColumnPrices(DocumentPrices, Protocol):
    """Prices of documents on one of several equal pipelines."""

    @property
    def columns(self) -> int:
        """Number of pipelines that train a step together: data-parallel ranks."""


class Sliced(NamedTuple):
    """A micro-batch: the numbers of whole ``documents`` of a step, and possibly a slice of a longer one.

    The slice is tokens ``start`` to ``stop`` of document ``sliced``; other micro-batches hold the rest. -1 is no slice.
    """

    documents: tuple[int, ...]
    sliced: int = -1
    start: int = 0
    stop: int = 0


def sliced_columns(
    lengths: Sequence[int], micro_batches: int, max_tokens: int, prices: ColumnPrices
) -> tuple[list[list[Sliced]], list[int]]:
    """The ``micro_batches`` micro-batches of every pipeline in order, and the documents without room.

    ``lengths`` are the tokens of the documents of a step; no micro-batch holds more than ``max_tokens`` tokens.
    """
    tokens = np.asarray(lengths, np.int64)
    ticks = _ticks(prices, tokens)
    falling = np.lexsort((np.arange(len(tokens)), -tokens)).tolist()
    rooms = [micro_batches * max_tokens] * prices.columns
    owners, _ = into_lightest(tokens[falling].tolist(), ticks[falling].tolist(), [0.0] * prices.columns, rooms)
    columns: list[list[Sliced]] = []
    left = [document for document, owner in zip(falling, owners, strict=True) if owner < 0]
    for column in range(prices.columns):
        mine = [document for document, owner in zip(falling, owners, strict=True) if owner == column]
        planned, without_room = _column(mine, tokens, ticks, micro_batches, max_tokens, prices)
        columns.append(planned)
        left += without_room
    return columns, left


def _column(
    documents: Sequence[int],
    tokens: Integers,
    ticks: Integers,
    micro_batches: int,
    max_tokens: int,
    prices: ColumnPrices,
) -> tuple[list[Sliced], list[int]]:
    """The micro-batches of one pipeline: slices of long documents, most expensive first, then whole documents."""
    parts = _parts(ticks[list(documents)].tolist(), tokens[list(documents)].tolist(), micro_batches, max_tokens)
    whole = [document for document, count in zip(documents, parts, strict=True) if count == 1]
    filled: list[Sliced] = []
    left: list[int] = []
    for document, count in zip(documents, parts, strict=True):
        if count == 1:
            continue
        cuts = _cuts(int(tokens[document]), count, max_tokens, prices)
        if len(filled) + len(cuts) - 1 > micro_batches:
            left.append(document)
        else:
            filled += [Sliced((), document, start, stop) for start, stop in pairwise(cuts)]
    filled += [Sliced(())] * (micro_batches - len(filled))
    before, after = (_ticks(prices, np.array([getattr(one, end) for one in filled])) for end in ("start", "stop"))
    loads, rooms = (after - before).astype(float).tolist(), [max_tokens - (one.stop - one.start) for one in filled]
    owners, _ = into_lightest(tokens[whole].tolist(), ticks[whole].tolist(), loads, rooms)
    members: list[list[int]] = [[] for _ in range(micro_batches + 1)]  # the last list has the documents without room
    for document, owner in zip(whole, owners, strict=True):
        members[owner].append(document)
    left += members.pop()
    return [one._replace(documents=tuple(held)) for one, held in zip(filled, members, strict=True)], left


def _parts(ticks: Sequence[int], tokens: Sequence[int], micro_batches: int, max_tokens: int) -> list[int]:
    """Number of slices of each document; all sliced documents together make at most ``micro_batches``.

    As few slices as keep each below the mean micro-batch and within ``max_tokens`` tokens. If these are too many, the
    document whose slices would stay cheapest gets one less, and so on, as far as ``max_tokens`` allows.
    """
    share = sum(ticks) / micro_batches
    least = [1 if each <= max_tokens else -(-each // _whole_tiles(max_tokens)) for each in tokens]
    parts = [max(fewest, math.ceil(each / max(share, 1) - _SLACK)) for each, fewest in zip(ticks, least, strict=True)]
    while sum(count for count in parts if count > 1) > micro_batches:
        fewer = [
            (each / (count - 1), place)
            for place, (each, count, fewest) in enumerate(zip(ticks, parts, least, strict=True))
            if count > fewest
        ]
        if not fewer:
            break
        parts[min(fewer)[1]] -= 1
    return parts


def _cuts(length: int, parts: int, max_tokens: int, prices: ColumnPrices) -> list[int]:
    """Where slices of a document of ``length`` tokens begin and end: 0, tiles that divide its work, ``length``.

    If a slice would have over ``max_tokens`` tokens, it ends earlier, and the slices after it share the remaining work.
    """
    ends = np.append(np.arange(TILE, length, TILE), length)
    work = _ticks(prices, ends)
    cuts, done, place = [0], 0, -1
    while cuts[-1] < length:
        share = (work[-1] - done) / max(1, parts + 1 - len(cuts))
        even = int(np.searchsorted(work, done + share))
        most = int(np.searchsorted(ends, cuts[-1] + max_tokens, side="right")) - 1
        place = max(place + 1, min(even, most))
        cuts.append(int(ends[place]))
        done = int(work[place])
    return cuts


def _whole_tiles(tokens: int) -> int:
    return max(TILE, tokens // TILE * TILE)


def _ticks(prices: ColumnPrices, tokens: Integers) -> Integers:
    return np.rint(prices.document_seconds(tokens) * _TICKS).astype(np.int64)
