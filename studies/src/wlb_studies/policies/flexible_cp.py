"""Flexible context parallelism: groups of any number of ranks, planned anew for every micro-batch.

Source: arXiv 2602.21788 (its first version called DHP), at second hand. Tensor- and pipeline-parallel sizes stay. In
every micro-batch best fit packs documents into groups of the fewest ranks whose memory holds them. A dynamic program
over groups and ranks then hands out the remaining ranks so that the slowest group is as fast as possible.

Assumed: as few micro-batches as hold all documents, even in predicted seconds. Its estimate of the exchange is left
out, so giving ranks one by one to the slowest group finds the same; groups of one wait for no other rank.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from wlb.errors import UserError
from wlb_studies.policies.filling import Integers, even_bins
from wlb_studies.policies.plan import Group, GroupPlan, Ranks


class Atomic(NamedTuple):
    """Documents that run together and the fewest ranks that hold them."""

    least: int
    documents: list[int]


def any_degree(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """As few micro-batches as the ranks can hold, even in predicted seconds; groups of one come largest first.

    Raises ``UserError`` for a document that all ranks together cannot hold.
    """
    if ranks.needed(int(lengths.max())) > ranks.count:
        raise UserError(
            f"{ranks.count} ranks of {ranks.capacity} tokens cannot hold a document of {lengths.max()}; give more GPUs"
        )
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
    """Longest first: a document over the capacity of a rank starts a group; others go where they leave least room."""
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
    """Ranks of every group, at least ``least``, that minimise the largest cost per rank.

    Cost falls with every rank, so giving ranks one by one to the slowest group matches the dynamic program.
    """
    sizes = [*least]
    slowest = [(-of_group / size, index) for index, (of_group, size) in enumerate(zip(cost, sizes, strict=True))]
    heapify(slowest)
    for _ in range(ranks - sum(sizes)):
        index = slowest[0][1]
        sizes[index] += 1
        heapreplace(slowest, (-cost[index] / sizes[index], index))
    return sizes
