"""Hybrid sharding: documents stay whole on one rank where they fit, and only the others are cut.

Cutting a document balances the ranks but moves its keys and values between them; a whole document moves nothing.
For a permitted level of seconds per rank, documents are dealt whole, dearest first, to the rank with the least work.
One that would lift its rank above the level is cut: the longest because they are more than a rank's share, and towards
the end a few short ones that no longer fit. Cut documents then fill all ranks up to one height (``filling``). A higher
level cuts less and balances less; several are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.adaptive import adaptive_choices, fastest
from wlb.sharding.filling import fill_ranks
from wlb.sharding.latency import Candidate, priced
from wlb.sharding.plan import Table, split_by_rank
from wlb.workload.base import Workload

MEMORY_FACTOR = 1.25  # tokens a rank may hold, over its even share
TOLERANCE = 0.01  # of the fastest group's seconds, given up for gathering less
LEVELS = (1.0, 1.02, 1.04, 1.08)  # of seconds, over perfectly even ranks
# Tokens, over an even share. Ranks of uneven tokens are even in forward and backward together, but not in each of them;
# ranks of even tokens are, and cut more for it.
EVEN_TOKENS = 1.01


def hybrid_pieces(lengths: NDArray[np.int64], cp_size: int, workload: Workload) -> tuple[Table, ...]:
    """Cut as few documents as make the group fastest.

    No rank holds more than ``MEMORY_FACTOR`` times its even share of the tokens, rounded up.
    """
    plans = [*adaptive_choices(lengths, cp_size), *hybrid_choices(lengths, cp_size, workload)]
    per_document, per_sequence, *others = priced(plans, [len(lengths)] * len(plans), workload)
    return hybrid_choice(fastest([per_document, per_sequence]), others).pieces


def hybrid_choice(adaptive: Candidate, others: Sequence[Candidate]) -> Candidate:
    """Of ``others``, priced ``hybrid_choices``, and adaptive sharding the one to take.

    Of those within ``TOLERANCE`` of the fastest that is the one that gathers the fewest tokens, because gathered keys
    and values also cost memory, and bandwidth that others would use; never one slower than adaptive sharding.
    """
    candidates = [adaptive, *others]
    limit = min((1 + TOLERANCE) * fastest(candidates).slowest_seconds, adaptive.slowest_seconds)
    near = [candidate for candidate in candidates if candidate.slowest_seconds <= limit]
    return min(near, key=lambda candidate: (candidate.gathered_tokens, candidate.slowest_seconds))


def hybrid_choices(lengths: NDArray[np.int64], cp_size: int, workload: Workload) -> Iterator[tuple[Table, ...]]:
    """Plans for every level that makes another one, with uneven tokens; and for the lowest with even ones."""
    total = int(lengths.sum())
    token_seconds = float(workload.linear_seconds(total)) / total
    seconds = workload.attention_seconds(lengths) + token_seconds * lengths
    even = float(seconds.sum()) / cp_size
    most_tokens = max(int(MEMORY_FACTOR * total / cp_size), -(-total // cp_size))
    for most_aimed_at, levels in ((int(EVEN_TOKENS * total / cp_size), LEVELS[:1]), (most_tokens, LEVELS)):
        makes_a_difference = 0.0
        for level in levels:
            if level * even < makes_a_difference:
                continue
            owners, load_seconds, load_tokens, makes_a_difference = _deal(
                lengths, seconds, cp_size, level * even, most_aimed_at
            )
            cut, whole = np.flatnonzero(owners < 0), np.flatnonzero(owners >= 0)
            ranks, rows = owners[whole], np.stack([whole, np.zeros_like(whole), lengths[whole]], axis=1)
            if len(cut):
                space = most_aimed_at - load_tokens
                filled = fill_ranks(cut.tolist(), lengths, load_seconds, space, token_seconds, workload)
                ranks, rows = np.concatenate([filled[0], ranks]), np.concatenate([filled[1], rows])
            if np.bincount(ranks, rows[:, 2] - rows[:, 1]).max() <= most_tokens:
                yield split_by_rank(ranks, rows, cp_size)
            if len(cut) == 0:
                break  # a higher level is only less even


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
            load, rank = heap[0]
            owners[segment] = rank
            load_tokens[rank] += sizes[segment]
            heapreplace(heap, (load + prices[segment], rank))
        elif heap:
            next_level = min(next_level, heap[0][0] + prices[segment])
        for entry in full:
            heappush(heap, entry)
    load_seconds = np.empty(cp_size)
    for load, rank in heap:
        load_seconds[rank] = load
    return np.array(owners), load_seconds, np.array(load_tokens), next_level
