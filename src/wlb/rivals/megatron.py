"""Megatron-Core: ``dp_balanced`` packing, and dynamic context parallelism as shipped and as its ``dev`` branch has it.

Source: NVIDIA/Megatron-LM, ``core/datasets/data_schedule.py`` (``dp_balanced``, ``next_hdp_group_packing_aware``) and
``core/pipeline_parallel/hybrid_cp_schedule.py`` (``BalancedCPScheduler``), read for what they do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from wlb.rivals.filling import Integers, in_order, longest_first, power_of_two
from wlb.rivals.plan import Group, GroupPlan, Ranks

SLACK = 0.05  # between ranks, with which a round is even enough to be closed
_BUCKET_EXCESS = 1.1  # of a bucket's even share of the work


def dp_balanced(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Fixed groups: micro-batches filled in arrival order up to the token cap, then as many for each group.

    Where the number is no multiple of the groups, the micro-batches of most documents are halved. Costs are not looked
    at. Groups are as large as a window needs.
    """
    size = power_of_two(ranks.needed(int(ranks.window)))
    groups = ranks.count // size
    packed = in_order(range(len(lengths)), lengths, ranks.capacity * size)
    wanted = -(-len(packed) // (groups * ranks.job.pp)) * groups * ranks.job.pp
    while len(packed) < wanted:
        packed.sort(key=len, reverse=True)
        largest = packed[0]
        if len(largest) < 2:
            break
        packed[:1] = [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return GroupPlan.of_fixed_groups(lengths, packed, ranks, size)


@dataclass
class _Open:
    """A group of a round that is being filled."""

    size: int
    load: float = 0.0
    documents: list[int] = field(default_factory=list)


def dynamic(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Groups of as many ranks as a document needs, a power of two; rounds with a barrier after each.

    A document costs s^2 over its ranks. Longest first, each goes to free ranks or to the lightest group of its size; a
    round is closed once all ranks are within ``SLACK``, and its smallest groups grow onto ranks left empty. Documents
    of a group run one after another, each a micro-batch of its own.
    """
    waiting = longest_first(lengths)
    groups: list[Group] = []
    barriers, slot = [], 0
    while waiting:
        opened, waiting = _round(waiting, lengths, ranks)
        barriers.append(slot)
        first = 0
        for group in opened:
            members = tuple(range(first, first + group.size))
            groups += [Group(slot + place, members, (document,)) for place, document in enumerate(group.documents)]
            first += group.size
        slot += max(len(group.documents) for group in opened)
    return GroupPlan(lengths, tuple(groups), frozenset(barriers))


def _round(waiting: list[int], lengths: Integers, ranks: Ranks) -> tuple[list[_Open], list[int]]:
    """The groups of the next round, and the documents that are left for later ones."""
    sizes = {document: power_of_two(ranks.needed(int(lengths[document]))) for document in waiting}
    cost = {document: float(lengths[document]) ** 2 / sizes[document] for document in waiting}
    buckets = _buckets(waiting, sizes, cost)
    opened: list[_Open] = []
    free, first_size = ranks.count, sizes[waiting[0]]
    while buckets:
        bucket = next((b for b in buckets if sizes[b[0]] <= free or any(g.size == sizes[b[0]] for g in opened)), None)
        if bucket is None:
            break
        document = bucket.popleft()
        size = sizes[document]
        if size <= free:
            opened.append(_Open(size))
            free -= size
            group = opened[-1]
        else:
            group = min((g for g in opened if g.size == size), key=lambda g: g.load)
        group.documents.append(document)
        group.load += cost[document]
        buckets = [b for b in buckets if b]
        if buckets and size < first_size and not free and _slack(opened) <= SLACK:
            break
    left = [document for bucket in buckets for document in bucket]
    if not free:
        left += _trimmed(opened, cost)
    _grow(opened, free, lengths, ranks.count)
    return opened, sorted(left, key=lambda document: -lengths[document])


def _buckets(waiting: list[int], sizes: dict[int, int], cost: dict[int, float]) -> list[deque[int]]:
    """Runs of documents of about equal work, as many as there are group sizes."""
    count = len(set(sizes.values()))
    share = sum(cost.values()) / count
    buckets: list[deque[int]] = [deque()]
    work = 0.0
    for document in waiting:
        if buckets[-1] and work + cost[document] > _BUCKET_EXCESS * share:
            buckets.append(deque())
            work = 0.0
        buckets[-1].append(document)
        work += cost[document]
    return buckets


def _slack(opened: list[_Open]) -> float:
    """Of the heaviest group's load, what the lightest lacks."""
    loads = [group.load for group in opened]
    return 1 - min(loads) / max(loads)


def _trimmed(opened: list[_Open], cost: dict[int, float]) -> list[int]:
    """Take the last documents of the heaviest groups away while that makes ranks more even; returns them."""
    taken = []
    while len(opened) > 1 and _slack(opened) > SLACK:
        loads = sorted(group.load for group in opened)
        heaviest = max(opened, key=lambda group: group.load)
        if len(heaviest.documents) < 2:
            break
        lighter = heaviest.load - cost[heaviest.documents[-1]]
        if max(loads[-2], lighter) - min(loads[0], lighter) >= loads[-1] - loads[0]:
            break
        heaviest.load = lighter
        taken.append(heaviest.documents.pop())
    return taken


def _grow(opened: list[_Open], free: int, lengths: Integers, ranks: int) -> None:
    """Double the smallest group, again and again, while ranks are free for it."""
    while free:
        smallest = min(opened, key=lambda group: group.size)
        more = min(2 * smallest.size, ranks) - smallest.size
        if not 0 < more <= free:
            return
        smallest.size += more
        smallest.load = float((lengths[smallest.documents].astype(np.float64) ** 2).sum()) / smallest.size
        free -= more


def packing_aware(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """As ``dynamic``, but a group runs its documents packed, up to the token cap, as one micro-batch of a pipeline.

    A document whose s^2 over its ranks is over the mean rank's share of the round gets twice the ranks, while there are
    any. Linear work is not looked at.
    """
    waiting = longest_first(lengths)
    groups: list[Group] = []
    slot = 0
    while waiting:
        opened, waiting = _packed_round(waiting, lengths, ranks)
        first = 0
        for group in opened:
            groups.append(Group(slot, tuple(range(first, first + group.size)), tuple(group.documents)))
            first += group.size
        slot += 1
    return GroupPlan(lengths, tuple(groups), frozenset(range(slot)))


def _packed_round(waiting: list[int], lengths: Integers, ranks: Ranks) -> tuple[list[_Open], list[int]]:
    sizes = lengths[waiting].astype(np.float64)
    rounds = max(1, -(-int(sizes.sum()) // (ranks.count * ranks.capacity)))
    share = float((sizes**2).sum()) / ranks.count / rounds  # of a rank in this round
    opened: list[_Open] = []
    loads, rooms = np.full(ranks.count, np.inf), np.zeros(ranks.count)  # of each group
    width = np.ones(ranks.count)
    free, left, place = ranks.count, [], 0
    while place < len(waiting):
        document, length = waiting[place], float(sizes[place])
        size = power_of_two(ranks.needed(int(length)))
        while length**2 / size > share and 2 * size <= free:
            size *= 2
        if size <= free:
            index = len(opened)
            opened.append(_Open(size))
            loads[index], rooms[index], width[index] = 0.0, size * ranks.capacity, size
            free -= size
        else:
            most = max(share, float(loads.min()))
            fitting = np.minimum(rooms, np.sqrt(width * np.maximum(0.0, most - loads)))
            if length > fitting.max():  # go on with the longest document that fits a group, or needs fewer ranks
                longest = max(float(fitting.max()), float(free * ranks.capacity))
                following = max(place + 1, int(np.searchsorted(-sizes, -longest)))
                left += waiting[place:following]
                place = following
                continue
            index = int(np.where(fitting >= length, loads, np.inf).argmin())
        opened[index].documents.append(document)
        loads[index] += length**2 / width[index]
        rooms[index] -= length
        place += 1
    _grow(opened, free, lengths, ranks.count)
    return opened, left
