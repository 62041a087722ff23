"""Hybrid sharding: documents stay whole on one rank where they fit, and only the others are cut.

Cutting a document balances the ranks but moves its keys and values between them; a whole document moves nothing.
For a permitted level of seconds per rank, documents are dealt whole, dearest first, to the rank with the least work.
One that would lift its rank above the level is cut: the longest because they are more than a rank's share, and towards
the end a few short ones that no longer fit. Cut documents then fill all ranks up to one height (``filling``). A higher
level cuts less and balances less; several are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.adaptive import faster_static, static_candidates
from wlb.sharding.candidates import Candidates, Prices, joined, pieces_of_plans, price
from wlb.sharding.filling import fill_ranks
from wlb.sharding.pieces import Integers, MicroBatches, Pieces, merged
from wlb.sharding.plan import Table
from wlb.workload.base import Workload

MEMORY_FACTOR = 1.25  # tokens a rank may hold, over its even share
TOLERANCE = 0.01  # of the fastest group's seconds, given up for gathering less
LEVELS = (1.0, 1.02, 1.04, 1.08)  # of seconds, over perfectly even ranks
# Tokens, over an even share. Ranks of uneven tokens are even in forward and backward together, but not in each of them;
# ranks of even tokens are, and cut more for it.
EVEN_TOKENS = 1.01


def hybrid(micro_batches: MicroBatches, cp_size: int, workload: Workload) -> Pieces:
    """Cut as few documents as make the group fastest.

    No rank holds more than ``MEMORY_FACTOR`` times its even share of the tokens, rounded up.
    """
    levelled = _levelled_candidates(micro_batches, cp_size, workload)
    candidates = joined([*static_candidates(micro_batches, cp_size), levelled], micro_batches, cp_size)
    prices = price(candidates, micro_batches, cp_size, workload)
    chosen = _choose(faster_static(prices, micro_batches), levelled.micro_batch, prices)
    return pieces_of_plans(chosen, candidates, micro_batches, cp_size)


def _choose(adaptive: Integers, of_levelled: Integers, prices: Prices) -> Integers:
    """Of each micro-batch's ``adaptive`` plan and its levelled ones, the last of ``prices``, the one to take.

    Of those within ``TOLERANCE`` of the fastest that is the one that gathers the fewest tokens, because gathered keys
    and values also cost memory, and bandwidth that others would use; never one slower than adaptive sharding.
    """
    plans = np.concatenate([adaptive, np.arange(len(of_levelled)) + len(prices.seconds) - len(of_levelled)])
    micro_batch = np.concatenate([np.arange(len(adaptive)), of_levelled])
    seconds, gathered = prices.seconds[plans], prices.gathered[plans]
    fastest = np.full(len(adaptive), np.inf)
    np.minimum.at(fastest, micro_batch, seconds)
    limit = np.minimum((1 + TOLERANCE) * fastest, prices.seconds[adaptive])
    best_first = np.lexsort((seconds, gathered, seconds > limit[micro_batch], micro_batch))
    _, first = np.unique(micro_batch[best_first], return_index=True)
    return plans[best_first][first]


def _levelled_candidates(micro_batches: MicroBatches, cp_size: int, workload: Workload) -> Candidates:
    """The levelled plans of every micro-batch."""
    of_plans: list[int] = []
    lanes, tables, segments = [], [], 0
    for index, lengths in enumerate(np.split(micro_batches.sizes, micro_batches.first[1:])):
        for ranks, table in _levelled(lengths, cp_size, workload):
            lanes.append(ranks + len(of_plans) * cp_size)
            tables.append(table + np.array([segments, 0, 0]))
            of_plans.append(index)
            segments += len(lengths)
    if not of_plans:
        nothing = np.empty(0, np.int64)
        return Candidates(nothing, Pieces(nothing, nothing, nothing, nothing))
    lane, (segment, start, stop) = np.concatenate(lanes), np.concatenate(tables).T
    order = np.lexsort((start, segment))
    return Candidates(np.array(of_plans), merged(lane[order], segment[order], start[order], stop[order]))


def _levelled(lengths: Integers, cp_size: int, workload: Workload) -> Iterator[tuple[Integers, Table]]:
    """Ranks and pieces (segment, start, stop), empty ones among them, for every level that makes another plan.

    With uneven tokens; and for the lowest level with even ones.
    """
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
                yield ranks, rows
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
