"""WLB-LLM without delay, as DistCA's paper runs it; the preset ``wlb-llm`` is the version with delay.

Source: arXiv 2510.18121, section 6 (its own reimplementation, "WLB-ideal"), and ``distca/planner/wlb_planner.py`` of
hao-ai-lab/DistCA, whose behaviour this reproduces; WLB-LLM, arXiv 2503.17924, Algorithm 1 without outlier queues, and
section 5 for adaptive sharding.

Assumed: b is 64,000 tokens up to the width of 8B models and 131,072 beyond, as for 34B; if a micro-batch exceeds a
rank's capacity, there are more micro-batches.
"""

from bisect import bisect_left
from functools import cache

import numpy as np

from wlb.workload.shapes import ModelShape
from wlb_studies.policies.filling import Integers, longest_first, power_of_two
from wlb_studies.policies.plan import GroupPlan, Ranks

# Document length in tokens at which attention costs as much as everything else. Quoted: the values of DistCA's WLB-LLM
# for models of 8B and 34B parameters, with hidden sizes of 4,096 and 8,192.
_BREAKPOINT_8B = 64_000
_BREAKPOINT_34B = 131_072


def without_delay(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """As few micro-batches of fixed groups as hold the documents (by bisection), with adaptive sharding."""
    size = power_of_two(ranks.needed(ranks.window))
    groups = ranks.count // size
    most = ranks.capacity * size
    fewest = -(-int(lengths.sum()) // (most * groups * ranks.job.layout.pp)) * groups * ranks.job.layout.pp

    @cache
    def members(more: int) -> list[list[int]]:
        return evened(lengths, fewest + more * groups, breakpoint_tokens(ranks.job.shape))

    def fits(more: int) -> bool:
        return max(int(lengths[documents].sum()) for documents in members(more)) <= most

    above = 1
    while not fits(above - 1):
        above *= 2
    more = bisect_left(range(above), True, lo=above // 2, key=fits)
    return GroupPlan.of_fixed_groups(lengths, members(more), ranks, size, sharding="adaptive")


def evened(
    lengths: Integers, micro_batches: int, breakpoint_tokens: int, length_factor: float = 1.0
) -> list[list[int]]:
    """Documents of each of ``micro_batches``: longest first, each to the micro-batch with room and the least work.

    Work is (s / breakpoint)² + s / breakpoint, summed over documents of s tokens. L_max is ``length_factor`` times the
    mean micro-batch. If the micro-batch with the least work has no room, the one with the fewest tokens is tried.
    Documents that fit neither come last and go to the least work, over L_max.
    """
    work, tokens = np.zeros(micro_batches), np.zeros(micro_batches)
    most = length_factor * float(lengths.sum()) / micro_batches
    relative = lengths / breakpoint_tokens
    members: list[list[int]] = [[] for _ in range(micro_batches)]
    overflow = []

    def put(document: int, place: int) -> None:
        members[place].append(document)
        work[place] += relative[document] ** 2 + relative[document]
        tokens[place] += lengths[document]

    for document in longest_first(lengths):
        places = (int(work.argmin()), int(tokens.argmin()))
        place = next((place for place in places if tokens[place] + lengths[document] <= most), None)
        if place is None:
            overflow.append(document)
        else:
            put(document, place)
    for document in overflow:
        put(document, int(work.argmin()))
    return members


def breakpoint_tokens(shape: ModelShape) -> int:
    """The breakpoint of any model: assumed to be that of the next wider published one."""
    return _BREAKPOINT_8B if shape.hidden <= 4096 else _BREAKPOINT_34B
