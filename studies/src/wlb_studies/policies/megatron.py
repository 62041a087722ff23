"""Megatron-Core: ``dp_balanced`` packing, and dynamic context parallelism as released and on its ``dev`` branch.

Source: NVIDIA/Megatron-LM, ``core/datasets/data_schedule.py`` (``dp_balanced``), ``data_schedule_utils.py``
(``next_hdp_group_packing_aware``, ``align_sample_id_groups``) and ``core/pipeline_parallel/hybrid_cp_schedule.py``
(``BalancedCPScheduler``), read for what they do.

Assumed of both dynamic policies: ring exchange is hidden as ours is. Assumed of megatron-dynamic, in its favour:
synchronising with the host and broadcasting for each document cost nothing.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb_studies.policies.filling import Integers, in_order, longest_first, power_of_two
from wlb_studies.policies.plan import Group, GroupPlan, Ranks

SLACK = 0.05  # slack between ranks at which a round may close; also over the cap of a packed round
_BUCKET_EXCESS = 1.1  # of a bucket's even share of the work


def dp_balanced(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Fixed groups: fill micro-batches in arrival order up to the token cap, then deal equally many to each group.

    If their number is not a multiple of the groups (with interleaved stages, of groups x pp), single documents move
    from the last micro-batches into micro-batches of their own. Costs are ignored. Groups are as large as a window
    needs.
    """
    size = power_of_two(ranks.needed(int(ranks.window)))
    groups = ranks.count // size
    packed = in_order(range(len(lengths)), lengths, ranks.capacity * size)
    multiple = groups * ranks.micro_batch_multiple
    place = len(packed) - 1
    while len(packed) % multiple:
        if place < 0:
            raise UserError(
                f"{len(lengths)} documents cannot fill a multiple of {multiple} micro-batches; give more in a step"
            )
        if len(packed[place]) > 1:
            packed.append([packed[place].pop()])
        else:
            place -= 1
    return GroupPlan.of_fixed_groups(lengths, packed, ranks, size)


@dataclass
class _Open:
    """A group of a round that is being filled."""

    size: int
    documents: list[int] = field(default_factory=list)
    tokens: int = 0
    squares: int = 0  # of the lengths, summed

    @property
    def load(self) -> float:
        return self.squares / self.size

    def add(self, document: int, length: int) -> None:
        self.documents.append(document)
        self.tokens += length
        self.squares += length**2


_Rounds = list[list[_Open]]


def dynamic(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Groups sized to their documents (powers of two), in rounds with a barrier after each.

    A document costs s^2 over its ranks. Longest first, each goes to free ranks or to the lightest group of its size.
    After the first document of a smaller size, the round closes as soon as all ranks are within ``SLACK``, and its
    smallest groups grow onto empty ranks. Leftovers go to the next round bucket by bucket, then the documents that were
    taken out. Documents of a group run one after another, each as its own micro-batch.
    """
    groups: list[Group] = []
    barriers, slot = [], 0
    for opened in _rounds(lengths, ranks):
        barriers.append(slot)
        for group, members in _side_by_side(opened):
            groups += [Group(slot + place, members, (document,)) for place, document in enumerate(group.documents)]
        slot += max(len(group.documents) for group in opened)
    return GroupPlan(lengths, tuple(groups), frozenset(barriers))


def _rounds(lengths: Integers, ranks: Ranks) -> _Rounds:
    """The groups of every round."""
    waiting = longest_first(lengths)
    rounds = []
    while waiting:
        filled = _Round(waiting, lengths, ranks)
        waiting = filled.left
        rounds.append(filled.opened)
    return rounds


class _Round:
    """One round: its groups, and the documents left for later rounds."""

    def __init__(self, waiting: list[int], lengths: Integers, ranks: Ranks) -> None:
        self.opened: list[_Open] = []
        self._free = ranks.count
        sizes = {document: _least_size(int(lengths[document]), ranks) for document in waiting}
        buckets = _buckets(waiting, sizes, lengths)
        may_close = False
        while bucket := next((b for b in buckets if b and self._takes(sizes[b[0]])), None):
            length, size = int(lengths[bucket[0]]), sizes[bucket[0]]
            self._group_for(size).add(bucket.popleft(), length)
            may_close |= size < sizes[waiting[0]]
            if may_close and not self._free and _slack(self.opened) <= SLACK:
                break
        self.left = [document for bucket in buckets for document in bucket]
        if not self._free:
            self.left += _trimmed(self.opened, lengths)
        _grow(self.opened, self._free, ranks.count)

    def _takes(self, size: int) -> bool:
        return size <= self._free or any(group.size == size for group in self.opened)

    def _group_for(self, size: int) -> _Open:
        """A group of free ranks, or else the lightest group of this size."""
        if size <= self._free:
            self._free -= size
            self.opened.append(_Open(size))
            return self.opened[-1]
        return min((group for group in self.opened if group.size == size), key=lambda group: group.load)


def _least_size(length: int, ranks: Ranks) -> int:
    size = power_of_two(ranks.needed(length))
    if size > ranks.count:
        raise UserError(
            f"a document of {length} tokens needs {size} ranks of {ranks.capacity} tokens, and there are "
            f"{ranks.count}; give more GPUs or a number that is a power of two"
        )
    return size


def _buckets(waiting: list[int], sizes: dict[int, int], lengths: Integers) -> list[deque[int]]:
    """Runs of documents of about equal work, about as many as there are group sizes."""
    cost = {document: float(lengths[document]) ** 2 / sizes[document] for document in waiting}
    count = len(set(sizes.values()))
    share = sum(cost.values()) / count
    buckets: list[deque[int]] = [deque()]
    work = 0.0
    for place, document in enumerate(waiting):
        needed = len(waiting) - place <= count - 2 * (len(buckets) - 1)  # by the buckets that are still to come
        if buckets[-1] and (needed or work + cost[document] > _BUCKET_EXCESS * share):
            buckets.append(deque())
            work = 0.0
        buckets[-1].append(document)
        work += cost[document]
    return buckets


def _slack(opened: list[_Open]) -> float:
    """How much lighter the lightest group is, as a share of the heaviest group's load."""
    loads = [group.load for group in opened]
    return 1 - min(loads) / max(loads)


def _trimmed(opened: list[_Open], lengths: Integers) -> list[int]:
    """Remove the last documents of the heaviest groups while that evens out ranks; returns them."""
    taken = []
    while len(opened) > 1 and _slack(opened) > SLACK:
        loads = sorted(group.load for group in opened)
        heaviest = max(opened, key=lambda group: group.load)
        if len(heaviest.documents) < 2:
            break
        last = int(lengths[heaviest.documents[-1]])
        lighter = heaviest.load - last**2 / heaviest.size
        if max(loads[-2], lighter) - min(loads[0], lighter) >= loads[-1] - loads[0]:
            break
        taken.append(heaviest.documents.pop())
        heaviest.tokens -= last
        heaviest.squares -= last**2
    return taken


def _grow(opened: list[_Open], free: int, ranks: int) -> int:
    """Keep doubling the smallest group while ranks are free; returns how many stay free."""
    while free:
        smallest = min(opened, key=lambda group: group.size)
        more = min(2 * smallest.size, ranks) - smallest.size
        if not 0 < more <= free:
            break
        smallest.size += more
        free -= more
    return free


def packing_aware(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Rounds of groups that pack their documents up to the token cap, as micro-batches of a pipeline.

    A rank's load, s^2 over the ranks, is capped at that of a rank full of the round's longest document, and ``SLACK``
    more. The longest document gets the fewest ranks that hold it. Every other one goes where the round's largest load
    grows least: to a group with room or to free ranks, perhaps more than it needs; ties go to the smallest, then the
    first group. Groups grow onto empty ranks; if they cannot, one group of all ranks runs the round. With interleaved
    stages, rounds are split from the end until their number is a multiple of pp. Linear work is ignored, and ranks of
    different groups do not wait for each other.

    Raises ``UserError`` if no round can be split, or a document needs more ranks than there are.
    """
    waiting = longest_first(lengths)
    rounds: _Rounds = []
    while waiting:
        opened, waiting = _packed_round(waiting, lengths, ranks)
        rounds.append(opened)
    return _packed(_aligned(rounds, ranks), lengths)


def _packed_round(waiting: list[int], lengths: Integers, ranks: Ranks) -> tuple[list[_Open], list[int]]:
    """The groups of the next round, and the documents left for later rounds, longest first."""
    sizes = lengths[waiting]
    filled = _PackedRound(ranks, int(sizes[0]))
    filled.put(waiting[0], int(sizes[0]), 0, _least_size(int(sizes[0]), ranks))
    left, place = [], 1
    while place < len(waiting):
        if filled.place(waiting[place], int(sizes[place])):
            place += 1
            continue
        following = max(place + 1, int(np.searchsorted(-sizes, -filled.longest_that_fits())))
        left += waiting[place:following]
        place = following
    if _grow(filled.opened, filled.free, ranks.count):
        return _on_all_ranks(waiting, lengths, ranks)
    return filled.opened, left


class _PackedRound:
    """A round being filled: its groups, and how many ranks are still free."""

    def __init__(self, ranks: Ranks, longest: int) -> None:
        self.opened: list[_Open] = []
        self.free = ranks.count
        self._ranks = ranks
        self._cap = longest * ranks.capacity * (1 + SLACK)
        self._loads, self._rooms, self._widths = np.zeros((3, ranks.count))  # of each group

    def place(self, document: int, length: int) -> bool:
        """Put the document where the largest load grows least; returns False if no place is under the cap."""
        least = _least_size(length, self._ranks)
        new = [least << doublings for doublings in range((self.free // least).bit_length())]
        loads, rooms, widths = self._places(new)
        after = np.maximum(self._loads.max(), loads + length**2 / widths)
        after[rooms < length] = np.inf
        best = int(np.lexsort((widths, after))[0])  # ties: the smallest, and groups before free ranks
        if after[best] > self._cap:
            return False
        self.put(document, length, best, int(widths[best]))
        return True

    def put(self, document: int, length: int, index: int, size: int) -> None:
        """Put the document into the group at this index; past the last, into a new group of ``size`` free ranks."""
        if index >= len(self.opened):
            index = len(self.opened)
            self.opened.append(_Open(size))
            self.free -= size
        group = self.opened[index]
        group.add(document, length)
        self._loads[index], self._widths[index] = group.load, group.size
        self._rooms[index] = group.size * self._ranks.capacity - group.tokens

    def longest_that_fits(self) -> float:
        """The length of the longest document that has a place, rounded up."""
        loads, rooms, widths = self._places([1 << self.free.bit_length() >> 1])  # the largest power of two
        return float(np.minimum(rooms, np.sqrt(widths * np.maximum(0.0, self._cap - loads))).max()) * (1 + 1e-9)

    def _places(self, new: list[int]) -> tuple[NDArray[np.float64], ...]:
        """Loads, rooms and widths of all groups, and of ``new`` groups of free ranks."""
        count, width = len(self.opened), np.array(new, np.float64)
        of_new = (np.zeros(len(new)), width * self._ranks.capacity, width)
        held = (self._loads, self._rooms, self._widths)
        return tuple(np.append(column[:count], more) for column, more in zip(held, of_new, strict=True))


def _on_all_ranks(waiting: list[int], lengths: Integers, ranks: Ranks) -> tuple[list[_Open], list[int]]:
    """One group of all ranks with the documents that fit, longest first; and the other documents."""
    group, left = _Open(ranks.count), []
    for document in waiting:
        length = int(lengths[document])
        if group.tokens + length <= ranks.count * ranks.capacity:
            group.add(document, length)
        else:
            left.append(document)
    return [group], left


def _aligned(rounds: _Rounds, ranks: Ranks) -> _Rounds:
    """Split the last rounds between groups until there are as many as interleaved stages need.

    The half with the larger groups comes last; groups grow until each half uses all ranks.
    """
    multiple = ranks.micro_batch_multiple
    place, failed = len(rounds) - 1, 0
    while len(rounds) % multiple:
        if failed == len(rounds):
            raise UserError(
                f"{len(rounds)} rounds are no multiple of pp = {multiple}, and each has one group only; lower pp or "
                "run without interleaved stages"
            )
        failed += 1
        ends = np.cumsum([group.size for group in rounds[place]])
        first = 1 + int(np.searchsorted(ends, ends[-1] // 2))  # groups on the first half of the ranks
        if first < len(ends):
            wide, rounds[place] = rounds[place][:first], rounds[place][first:]
            for half in (wide, rounds[place]):
                _grow(half, ranks.count - sum(group.size for group in half), ranks.count)
            rounds.append(wide)
            failed = 0
        place = place - 1 if place else len(rounds) - 1
    return rounds


def _packed(rounds: _Rounds, lengths: Integers) -> GroupPlan:
    """Each round is one micro-batch, in which each group runs all its documents together."""
    return GroupPlan(
        lengths,
        tuple(
            Group(slot, members, tuple(group.documents))
            for slot, opened in enumerate(rounds)
            for group, members in _side_by_side(opened)
        ),
    )


def _side_by_side(opened: list[_Open]) -> Iterator[tuple[_Open, tuple[int, ...]]]:
    """Groups and their ranks, one group after another."""
    first = 0
    for group in opened:
        yield group, tuple(range(first, first + group.size))
        first += group.size
