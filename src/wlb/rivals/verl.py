"""verl, as slime and prime-rl: Karmarkar-Karp over data-parallel ranks, then over each rank's micro-batches.

Source: verl-project/verl, ``verl/utils/seqlen_balancing.py``. A reinforcement-learning step must train what it sampled,
so nothing waits. Groups are fixed; a micro-batch holds at most a group's token cap, and all ranks run equally many.
"""

from __future__ import annotations

from wlb.rivals.filling import Integers, karmarkar_karp, power_of_two
from wlb.rivals.plan import Group, GroupPlan, Ranks


def karmarkar_karp_twice(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Documents cost their predicted seconds, as verl's c L + L^2 stands for."""
    size = power_of_two(ranks.needed(ranks.window))
    groups, most = ranks.count // size, ranks.capacity * size
    cost = ranks.job.sharding_workload.document_seconds(lengths)
    of_ranks = karmarkar_karp(cost, groups)
    tokens = max(int(lengths[documents].sum()) for documents in of_ranks)
    count = max(1, -(-tokens // most))
    while True:
        parts = [karmarkar_karp(cost[documents], count) for documents in of_ranks]
        micro_batches = [
            [[of_rank[i] for i in part] for part in of_parts] for of_rank, of_parts in zip(of_ranks, parts, strict=True)
        ]
        if all(lengths[part].sum() <= most for of_rank in micro_batches for part in of_rank if part):
            break
        count += 1
    return GroupPlan(
        lengths,
        tuple(
            Group(slot, tuple(range(rank * size, (rank + 1) * size)), tuple(documents))
            for rank, of_rank in enumerate(micro_batches)
            for slot, documents in enumerate(of_rank)
            if documents
        ),
    )
