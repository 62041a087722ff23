"""WLB-LLM that delays nothing, as DistCA's paper runs it; with delay it is one of the simulator's own systems.

Source: arXiv 2510.18121, section 6 (its own reimplementation, "WLB-ideal"); WLB-LLM, arXiv 2503.17924, Algorithm 1
without outlier queues, and section 5 for adaptive sharding.
"""

from __future__ import annotations

from wlb.rivals.filling import Integers, lightest, longest_first, power_of_two
from wlb.rivals.plan import GroupPlan, Ranks

LENGTH_FACTOR = 1.5  # L_max over the mean micro-batch, as this project's WLB-LLM has it


def without_delay(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Longest first into the lightest micro-batch with room, of fixed groups; adaptive sharding in each."""
    size = power_of_two(ranks.needed(ranks.window))
    groups = ranks.count // size
    most = ranks.capacity * size
    count = -(-int(LENGTH_FACTOR * lengths.sum()) // most)
    count = -(-count // (groups * ranks.job.pp)) * groups * ranks.job.pp
    cost = ranks.job.sharding_workload.document_seconds(lengths)
    while True:
        members, left_over = lightest(longest_first(lengths), cost, count, lengths, most)
        if not left_over:
            break
        count += groups
    return GroupPlan.of_fixed_groups(lengths, members, ranks, size, sharding="adaptive")
