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

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from wlb.lightest import into_lightest
from wlb.packing.exchanges import members_of
from wlb.packing.plan import Integers, PlannedMicroBatch
from wlb.workload.base import TICKS, DocumentPrices, in_ticks
from wlb.workload.costs import QUERY_TILE

_SLACK = 0.05  # a slice may cost this much more than the mean micro-batch; this share of tokens may wait for that


def sliced_pipelines(
    lengths: ArrayLike, pipelines: int, micro_batches: int, max_tokens: int, prices: DocumentPrices
) -> tuple[list[list[PlannedMicroBatch]], list[int]]:
    """The ``micro_batches`` micro-batches of each of ``pipelines`` in order, and the documents without room.

    ``lengths`` are the tokens of the documents of a step; no micro-batch holds more than ``max_tokens`` tokens.
    """
    tokens = np.asarray(lengths, np.int64)
    ticks = in_ticks(prices.document_seconds(tokens))
    falling = np.argsort(-tokens, kind="stable")
    rooms = [micro_batches * max_tokens] * pipelines
    owners = into_lightest(tokens[falling].tolist(), ticks[falling].tolist(), [0.0] * pipelines, rooms)
    planned, left = [], falling[owners < 0].tolist()
    for mine in members_of(falling, owners, pipelines):
        own = np.stack([mine, tokens[mine], ticks[mine]]), micro_batches, max_tokens, prices
        of_pipeline, without_room = _pipeline(*own, _SLACK)
        if tokens[without_room].sum() > _SLACK * tokens[mine].sum():  # fewer slices leave more room to whole documents
            fewest = _pipeline(*own, micro_batches)
            of_pipeline, without_room = min((of_pipeline, without_room), fewest, key=lambda one: tokens[one[1]].sum())
        planned.append(of_pipeline)
        left += without_room
    return planned, left


def _pipeline(
    own: Integers, micro_batches: int, max_tokens: int, prices: DocumentPrices, slack: float
) -> tuple[list[PlannedMicroBatch], list[int]]:
    """The micro-batches of one pipeline: slices of long documents, most expensive first, then whole documents."""
    documents, tokens, ticks = own
    parts = _parts(ticks, tokens, micro_batches, max_tokens, slack)
    slices: list[tuple[int, int, int]] = []  # document, start, stop
    left: list[int] = []
    for place in np.flatnonzero(parts > 1).tolist():
        document, cuts = int(documents[place]), _cuts(int(tokens[place]), int(parts[place]), max_tokens, prices)
        if len(slices) + len(cuts) - 1 > micro_batches:
            left.append(document)
        else:
            slices += [(document, start, stop) for start, stop in pairwise(cuts)]
    slices += [(-1, 0, 0)] * (micro_batches - len(slices))
    _, start, stop = np.array(slices).T
    loads = (in_ticks(prices.document_seconds(stop)) - in_ticks(prices.document_seconds(start))).astype(float).tolist()
    whole = parts == 1
    owners = into_lightest(tokens[whole].tolist(), ticks[whole].tolist(), loads, (max_tokens - stop + start).tolist())
    left += documents[whole][owners < 0].tolist()
    filled = zip(members_of(documents[whole], owners, micro_batches), loads, slices, strict=True)
    return [PlannedMicroBatch(tuple(held.tolist()), load / TICKS, (), *one) for held, load, one in filled], left


def _parts(ticks: Integers, tokens: Integers, micro_batches: int, max_tokens: int, slack: float) -> Integers:
    """Number of slices of each document; all sliced documents together make at most ``micro_batches``.

    As few slices as keep each below the mean micro-batch and within ``max_tokens`` tokens. If these are too many, the
    document whose slices would stay cheapest gets one less, and so on, as far as ``max_tokens`` allows. A slice may
    cost ``1 + slack`` mean micro-batches.
    """
    share = max(int(ticks.sum()) / micro_batches, 1)
    whole_tiles = max(QUERY_TILE, max_tokens // QUERY_TILE * QUERY_TILE)
    least = np.where(tokens <= max_tokens, 1, -(-tokens // whole_tiles))
    parts = np.maximum(least, np.ceil(ticks / share - slack).astype(np.int64))
    while parts[parts > 1].sum() > micro_batches and len(fewer := np.flatnonzero(parts > least)):
        parts[fewer[np.argmin(ticks[fewer] / (parts[fewer] - 1))]] -= 1
    return parts


def _cuts(length: int, parts: int, max_tokens: int, prices: DocumentPrices) -> list[int]:
    """Where slices of a document of ``length`` tokens begin and end: 0, tiles that divide its work, ``length``.

    If a slice would have over ``max_tokens`` tokens, it ends earlier, and the slices after it share the remaining work.
    """
    ends = np.append(np.arange(QUERY_TILE, length, QUERY_TILE), length)
    work = in_ticks(prices.document_seconds(ends))
    cuts, done, place = [0], 0, -1
    while cuts[-1] < length:
        share = (work[-1] - done) / max(1, parts + 1 - len(cuts))
        even = int(np.searchsorted(work, done + share))
        most = int(np.searchsorted(ends, cuts[-1] + max_tokens, side="right")) - 1
        place = max(place + 1, min(even, most))
        cuts.append(int(ends[place]))
        done = int(work[place])
    return cuts
