"""Hybrid sharding: documents stay whole on one rank where they fit, and only the others are cut.

Cutting a document balances the ranks but moves its keys and values between them; a whole document moves nothing.
For a permitted level of seconds per rank, documents are dealt whole, dearest first, to the rank with the least work.
One that would lift its rank above the level is cut: the longest because they are more than a rank's share, and towards
the end a few short ones that no longer fit. Cut documents then fill all ranks up to one height (``filling``). A higher
level cuts less and balances less; several are tried.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.adaptive import adaptive_pieces
from wlb.sharding.filling import fill_ranks
from wlb.sharding.latency import price_pieces
from wlb.sharding.plan import Table, split_by_rank
from wlb.workload.base import Workload

MEMORY_FACTOR = 1.25  # tokens a rank may hold, over its even share
TOLERANCE = 0.01  # of the fastest slowest rank, given up for gathering less
# Tried, over perfectly even ranks. What higher ones save is gathering alone, of which the execution hides a part.
LEVELS = (1.0, 1.005, 1.01, 1.02, 1.04, 1.08)


class Candidate(NamedTuple):
    """Pieces of every rank, and what they cost."""

    slowest_seconds: float
    gathered_tokens: int
    pieces: tuple[Table, ...]


def hybrid_pieces(
    lengths: NDArray[np.int64],
    cp_size: int,
    workload: Workload,
    memory_factor: float = MEMORY_FACTOR,
    adaptive: Candidate | None = None,
) -> tuple[Table, ...]:
    """Cut as few documents as make the slowest rank (W_a + W_l + gathering) fastest.

    Of all results within ``TOLERANCE`` of the fastest the one that gathers the fewest tokens is taken, because gathered
    keys and values also cost memory and bandwidth that the prediction does not see; never one slower than adaptive
    sharding, whose price and pieces may be given. No rank holds more than ``memory_factor`` times its even share of
    the tokens, rounded up.
    """
    total = int(lengths.sum())
    room = max(int(memory_factor * total / cp_size), -(-total // cp_size))
    token_seconds = float(workload.linear_seconds(total)) / total
    seconds = workload.attention_seconds(lengths) + token_seconds * lengths
    even = float(seconds.sum()) / cp_size
    adaptive = adaptive or _candidate(adaptive_pieces(lengths, cp_size, workload), workload)
    candidates = [adaptive]
    fastest = adaptive.slowest_seconds
    makes_a_difference = 0.0
    for level in LEVELS:
        if level * even < makes_a_difference:
            continue
        owners, load_seconds, load_tokens, makes_a_difference = _deal(lengths, seconds, cp_size, level * even, room)
        cut = np.flatnonzero(owners < 0)
        whole = np.flatnonzero(owners >= 0)
        ranks, rows = owners[whole], np.stack([whole, np.zeros_like(whole), lengths[whole]], axis=1)
        if len(cut):
            filled = fill_ranks(cut.tolist(), lengths, load_seconds, room - load_tokens, token_seconds, workload)
            ranks, rows = np.concatenate([filled[0], ranks]), np.concatenate([filled[1], rows])
        if np.bincount(ranks, rows[:, 2] - rows[:, 1]).max() > room:
            continue
        candidates.append(_candidate(split_by_rank(ranks, rows, cp_size), workload))
        fastest = min(fastest, candidates[-1].slowest_seconds)
        if len(cut) == 0:
            break  # a higher level is only less even
    limit = min((1 + TOLERANCE) * fastest, adaptive.slowest_seconds)
    near = [candidate for candidate in candidates if candidate.slowest_seconds <= limit]
    return min(near, key=lambda candidate: (candidate.gathered_tokens, candidate.slowest_seconds)).pieces


def _candidate(pieces: tuple[Table, ...], workload: Workload) -> Candidate:
    latency = price_pieces(pieces, workload)
    return Candidate(latency.slowest, latency.gathered_tokens, pieces)


def _deal(
    lengths: NDArray[np.int64], seconds: NDArray[np.float64], cp_size: int, level: float, room: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], float]:
    """Deal segments whole, dearest first, to the rank with the least seconds that has room for their tokens.

    Returns each segment's rank, -1 where it fits nowhere under ``level`` seconds, each rank's seconds and tokens, and
    the lowest level that gives another result.
    """
    prices, sizes = seconds.tolist(), lengths.tolist()
    owners = [-1] * len(sizes)
    load_tokens = [0] * cp_size
    next_level = float("inf")
    heap = [(0.0, rank) for rank in range(cp_size)]
    for segment in np.argsort(-seconds, kind="stable").tolist():
        full: list[tuple[float, int]] = []
        while heap and load_tokens[heap[0][1]] + sizes[segment] > room:
            full.append(heappop(heap))
        if heap and heap[0][0] + prices[segment] <= level:
            load, rank = heappop(heap)
            owners[segment] = rank
            load_tokens[rank] += sizes[segment]
            heappush(heap, (load + prices[segment], rank))
        elif heap:
            next_level = min(next_level, heap[0][0] + prices[segment])
        for entry in full:
            heappush(heap, entry)
    load_seconds = np.empty(cp_size)
    for load, rank in heap:
        load_seconds[rank] = load
    return np.array(owners), load_seconds, np.array(load_tokens), next_level
