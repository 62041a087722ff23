"""Flexible context parallelism: groups of any number of ranks, planned anew for every micro-batch.

Source: arXiv 2602.21788 (its first version called DHP), at second hand. The tensor- and pipeline-parallel sizes stay;
in every micro-batch documents are packed by best fit into groups of the fewest ranks whose memory holds them, and a
dynamic program over groups and ranks gives away the ranks that are left, so that the slowest group is fastest.

Assumed: micro-batches as few as hold all, even in predicted seconds; its estimator's exchange left out, so that
giving ranks to the slowest group, one by one, is what the program finds; groups of one wait for nobody else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from wlb.errors import UserError
from wlb_studies.policies.filling import Integers, even_bins
from wlb_studies.policies.plan import Group, GroupPlan, Ranks


class Atomic(NamedTuple):
    """Documents that run together, and the fewest ranks that hold them."""

    least: int
    documents: list[int]


def any_degree(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """As few micro-batches as the ranks hold, even in predicted seconds; groups of one are largest first.

    Raises ``UserError`` for a document that all ranks together do not hold.
    """
    if ranks.needed(int(lengths.max())) > ranks.count:
        raise UserError(f"{ranks.count} ranks of {ranks.capacity} tokens hold no document of {lengths.max()}")
    cost = ranks.job.costs.document_seconds(lengths)
    packed, fewest = None, 1
    while packed is None:
        bins = even_bins(
            lengths, cost, ranks.count * ranks.capacity, multiple=ranks.micro_batch_multiple, fewest=fewest
        )
        of_bins = [atomic_groups(documents, lengths, ranks) for documents in bins if documents]
        packed = of_bins if all(sum(g.least for g in groups) <= ranks.count for groups in of_bins) else None
        fewest = len(bins) + 1
    slots = []
    for slot, groups in enumerate(packed):
        seconds = [float(cost[group.documents].sum()) for group in groups]
        sizes = shared_out([group.least for group in groups], seconds, ranks.count)
        first = 0
        for size, group in sorted(zip(sizes, groups, strict=True), key=lambda pair: -pair[0]):
            slots.append(Group(slot, tuple(range(first, first + size)), tuple(group.documents)))
            first += size
    return GroupPlan(lengths, tuple(slots))


def atomic_groups(documents: Sequence[int], lengths: Integers, ranks: Ranks) -> list[Atomic]:
    """Longest first: a document over one rank's capacity begins a group; any other goes where it leaves least room."""
    groups: list[Atomic] = []
    rooms: list[tuple[int, int]] = []  # of every group, ascending, with its number
    for document in sorted(documents, key=lambda document: -lengths[document]):
        length = int(lengths[document])
        place = bisect_left(rooms, (length, 0)) if length <= ranks.capacity else len(rooms)
        if place == len(rooms):
            least = ranks.needed(length)
            room, index = least * ranks.capacity, len(groups)
            groups.append(Atomic(least, []))
        else:
            room, index = rooms.pop(place)
        groups[index].documents.append(document)
        insort(rooms, (room - length, index))
    return groups


def shared_out(least: Sequence[int], cost: Sequence[float], ranks: int) -> list[int]:
    """Ranks of every group, at least its ``least``, for which the largest cost over ranks is least.

    Cost falls with every rank, so giving rank after rank to the slowest group finds what the dynamic program does.
    """
    sizes = [*least]
    slowest = [(-of_group / size, index) for index, (of_group, size) in enumerate(zip(cost, sizes, strict=True))]
    heapify(slowest)
    for _ in range(ranks - sum(sizes)):
        index = slowest[0][1]
        sizes[index] += 1
        heapreplace(slowest, (-cost[index] / sizes[index], index))
    return sizes
