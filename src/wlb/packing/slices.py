"""A pipeline's step in which no micro-batch is much heavier than another, and no document waits for a later step.

Documents are dealt to the pipelines (data-parallel ranks), the dearest first, each to the one with least work, and
then within each pipeline to a given number of micro-batches. A document that is dearer than a micro-batch's share is
cut along its sequence into slices of equal work, later ones shorter, as they attend more. Slices begin at multiples of
a tile of queries. Then the other documents go, dearest first, each to the micro-batch that has least work.

As every micro-batch has about as much work, the bubbles of the pipeline are as short as they can be, however long a
document is; and as nothing waits, every step trains its own documents. The slices of a document follow each other.
Seconds are whole ticks, so that all machines plan alike.
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

TILE = 128  # tokens: queries in a tile of FlashAttention-2 and -3; a slice that ends inside one pays for all of it
_TICKS = 1e9  # a second
_SLACK = 0.05  # of a share: a document may be dearer by so much before it is cut once more


@runtime_checkable
class ColumnPrices(DocumentPrices, Protocol):
    """Prices of documents on one of some equal pipelines."""

    @property
    def columns(self) -> int:
        """How many pipelines train a step together: data-parallel ranks."""


class Sliced(NamedTuple):
    """A micro-batch: whole ``documents`` of a step, by number, and the slice of a longer one, if any.

    A slice is the tokens from ``start`` to ``stop`` of document ``sliced``, of which others hold the rest; -1 is none.
    """

    documents: tuple[int, ...]
    sliced: int = -1
    start: int = 0
    stop: int = 0


def sliced_columns(
    lengths: Sequence[int], micro_batches: int, capacity: int, prices: ColumnPrices
) -> tuple[list[list[Sliced]], list[int]]:
    """The ``micro_batches`` micro-batches of every pipeline in order, and the documents for which none had room.

    ``lengths`` are those of a step's documents in tokens; no micro-batch holds more than ``capacity`` tokens.
    """
    tokens = np.asarray(lengths, np.int64)
    ticks = _ticks(prices, tokens)
    falling = np.lexsort((np.arange(len(tokens)), -tokens)).tolist()
    rooms = [micro_batches * capacity] * prices.columns
    owners, _ = into_lightest(tokens[falling].tolist(), ticks[falling].tolist(), [0.0] * prices.columns, rooms)
    columns: list[list[Sliced]] = []
    left = [document for document, owner in zip(falling, owners, strict=True) if owner < 0]
    for column in range(prices.columns):
        mine = [document for document, owner in zip(falling, owners, strict=True) if owner == column]
        planned, without_room = _column(mine, tokens, ticks, micro_batches, capacity, prices)
        columns.append(planned)
        left += without_room
    return columns, left


def _column(
    documents: Sequence[int],
    tokens: Integers,
    ticks: Integers,
    micro_batches: int,
    capacity: int,
    prices: ColumnPrices,
) -> tuple[list[Sliced], list[int]]:
    """One pipeline's micro-batches: slices of long documents, dearest first, then those of whole documents only."""
    parts = dict(zip(documents, _parts(ticks[list(documents)].tolist(), micro_batches), strict=True))
    whole = [document for document in documents if parts[document] == 1]
    filled = [
        Sliced((), document, start, stop)
        for document in documents
        if parts[document] > 1
        for start, stop in pairwise(_cuts(int(tokens[document]), parts[document], prices))
    ]
    filled += [Sliced(())] * (micro_batches - len(filled))
    before, after = (_ticks(prices, np.array([getattr(one, end) for one in filled])) for end in ("start", "stop"))
    loads, rooms = (after - before).astype(float).tolist(), [capacity - (one.stop - one.start) for one in filled]
    owners, _ = into_lightest(tokens[whole].tolist(), ticks[whole].tolist(), loads, rooms)
    members: list[list[int]] = [[] for _ in range(micro_batches + 1)]  # the last of those without room
    for document, owner in zip(whole, owners, strict=True):
        members[owner].append(document)
    left = members.pop()
    return [one._replace(documents=tuple(held)) for one, held in zip(filled, members, strict=True)], left


def _parts(ticks: Sequence[int], micro_batches: int) -> list[int]:
    """Into how many slices each document is cut, all of them together at most ``micro_batches``.

    As few as are not over an even share; of too many, those go that leave the cheapest slices.
    """
    share = sum(ticks) / micro_batches
    parts = [max(1, math.ceil(each / max(share, 1) - _SLACK)) for each in ticks]
    while sum(count for count in parts if count > 1) > micro_batches:
        fewer = [
            (each / (count - 1), place)
            for place, (each, count) in enumerate(zip(ticks, parts, strict=True))
            if count > 1
        ]
        parts[min(fewer)[1]] -= 1
    return parts


def _cuts(length: int, parts: int, prices: ColumnPrices) -> list[int]:
    """Where slices of a document of ``length`` tokens begin and end: 0, tiles up to which work is even, ``length``."""
    tiles = np.arange(TILE, length, TILE)
    work = _ticks(prices, np.append(tiles, length))
    places = np.searchsorted(work, work[-1] * np.arange(1, parts) // parts)
    return [0, *np.unique(tiles[places[places < len(tiles)]]).tolist(), length]


def _ticks(prices: ColumnPrices, tokens: Integers) -> Integers:
    return np.rint(prices.document_seconds(tokens) * _TICKS).astype(np.int64)
