"""Megatron-Core: ``dp_balanced`` packing, and dynamic context parallelism as shipped and as its ``dev`` branch has it.

Source: NVIDIA/Megatron-LM, ``core/datasets/data_schedule.py`` (``dp_balanced``), ``data_schedule_utils.py``
(``next_hdp_group_packing_aware``, ``align_sample_id_groups``) and ``core/pipeline_parallel/hybrid_cp_schedule.py``
(``BalancedCPScheduler``), read for what they do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from wlb.errors import UserError
from wlb.studies.policies.filling import Integers, in_order, longest_first, power_of_two
from wlb.studies.policies.plan import Group, GroupPlan, Ranks

SLACK = 0.05  # between ranks, with which a round is even enough to be closed; and over the cap of a packed round
_BUCKET_EXCESS = 1.1  # of a bucket's even share of the work


def dp_balanced(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Fixed groups: micro-batches filled in arrival order up to the token cap, then as many for each group.

    Where the number is no multiple of the groups (with interleaved stages, of groups x pp), single documents leave the
    last micro-batches, from the end, for micro-batches of their own. Costs are not looked at. Groups are as large as a
    window needs.
    """
    size = power_of_two(ranks.needed(int(ranks.window)))
    groups = ranks.count // size
    packed = in_order(range(len(lengths)), lengths, ranks.capacity * size)
    multiple = groups * ranks.micro_batch_multiple
    place = len(packed) - 1
    while len(packed) % multiple:
        if place < 0:
            raise UserError(f"{len(lengths)} documents make no multiple of {multiple} micro-batches; give more a step")
        if len(packed[place]) > 1:
            packed.append([packed[place].pop()])
        else:
            place -= 1
    return GroupPlan.of_fixed_groups(lengths, packed, ranks, size)


@dataclass
class _Open:
    """A group of a round that is being filled."""

    size: int
    load: float = 0.0
    tokens: int = 0
    documents: list[int] = field(default_factory=list)

    def add(self, document: int, length: int) -> None:
        self.documents.append(document)
        self.tokens += length
        self.load += length**2 / self.size

    def remove_last(self, length: int) -> int:
        self.tokens -= length
        self.load -= length**2 / self.size
        return self.documents.pop()


def dynamic(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Groups of as many ranks as a document needs, a power of two; rounds with a barrier after each.

    A document costs s^2 over its ranks. Longest first, each goes to free ranks or to the lightest group of its size.
    Once a document of a smaller size was placed, the round is closed as soon as all ranks are within ``SLACK``, and its
    smallest groups grow onto ranks left empty. What is left over goes to the next round bucket by bucket, then what
    was taken out again. Documents of a group run one after another, each a micro-batch of its own.
    """
    waiting = longest_first(lengths)
    groups: list[Group] = []
    barriers, slot = [], 0
    while waiting:
        opened, waiting = _round(waiting, lengths, ranks, packs=False)
        barriers.append(slot)
        for group, members in _side_by_side(opened):
            groups += [Group(slot + place, members, (document,)) for place, document in enumerate(group.documents)]
        slot += max(len(group.documents) for group in opened)
    return GroupPlan(lengths, tuple(groups), frozenset(barriers))


def dynamic_packed(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """As ``dynamic``, but a group runs a round's documents packed, up to the token cap, as one micro-batch.

    So ``dev`` had it when NVIDIA measured ``examples/dynamic_context_parallel`` (June 2026): a round also ends with the
    first document for which no group has room, nothing is taken out of a round, and no barrier stands between rounds.
    """
    waiting = longest_first(lengths)
    rounds: list[list[_Open]] = []
    while waiting:
        opened, waiting = _round(waiting, lengths, ranks, packs=True)
        rounds.append(opened)
    return _packed(rounds, lengths)


@dataclass
class _Round:
    """A round that is being filled: its groups, and how many ranks are in none yet; ``packs`` up to the token cap."""

    ranks: Ranks
    packs: bool
    free: int
    opened: list[_Open] = field(default_factory=list)

    def takes(self, size: int) -> bool:
        return size <= self.free or any(group.size == size for group in self.opened)

    def group_for(self, length: int, size: int) -> _Open | None:
        """A group of free ranks, or else the lightest of this size; None where no such group has room."""
        if size <= self.free:
            self.free -= size
            self.opened.append(_Open(size))
            return self.opened[-1]
        most = size * self.ranks.capacity - length if self.packs else math.inf
        alike = [group for group in self.opened if group.size == size and group.tokens <= most]
        return min(alike, key=lambda group: group.load, default=None)

    def is_even(self) -> bool:
        return not self.free and _slack(self.opened) <= SLACK


def _round(waiting: list[int], lengths: Integers, ranks: Ranks, *, packs: bool) -> tuple[list[_Open], list[int]]:
    """The groups of the next round, and the documents that are left for later ones."""
    sizes = {document: _least_size(int(lengths[document]), ranks) for document in waiting}
    buckets = _buckets(waiting, sizes, lengths)
    filled = _Round(ranks, packs, ranks.count)
    largest, may_close = sizes[waiting[0]], False
    while bucket := next((b for b in buckets if b and filled.takes(sizes[b[0]])), None):
        length, size = int(lengths[bucket[0]]), sizes[bucket[0]]
        group = filled.group_for(length, size)
        if group is None:
            break
        group.add(bucket.popleft(), length)
        may_close |= size < largest
        if may_close and filled.is_even():
            break
    left = [document for bucket in buckets for document in bucket]
    if not filled.free and not packs:
        left += _trimmed(filled.opened, lengths)
    _grow(filled.opened, filled.free, lengths, ranks.count)
    return filled.opened, left


def _least_size(length: int, ranks: Ranks) -> int:
    """The least power of two of ranks that hold a document."""
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
    """Of the heaviest group's load, what the lightest lacks."""
    loads = [group.load for group in opened]
    return 1 - min(loads) / max(loads)


def _trimmed(opened: list[_Open], lengths: Integers) -> list[int]:
    """Take the last documents of the heaviest groups away while that makes ranks more even; returns them."""
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
        taken.append(heaviest.remove_last(last))
    return taken


def _grow(opened: list[_Open], free: int, lengths: Integers, ranks: int) -> int:
    """Double the smallest group, again and again, while ranks are free for it; returns how many stay free."""
    while free:
        smallest = min(opened, key=lambda group: group.size)
        more = min(2 * smallest.size, ranks) - smallest.size
        if not 0 < more <= free:
            break
        smallest.size += more
        smallest.load = float((lengths[smallest.documents].astype(np.float64) ** 2).sum()) / smallest.size
        free -= more
    return free


def packing_aware(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Rounds of groups that run their documents packed, up to the token cap, as micro-batches of a pipeline.

    A rank's load, s^2 over the ranks, is capped at that of a rank full of the round's longest document, and ``SLACK``
    more. The longest document gets the least ranks that hold it. Every other one goes where the round's largest load
    grows least, to a group with room or to free ranks, which may be more than it needs; of equals to the smallest
    group, then to the first. Groups grow onto ranks that are left empty; where they cannot, one group of all ranks runs
    the round. With interleaved stages, rounds are split from the end until their number is a multiple of pp. Linear
    work is not looked at, and ranks of different groups do not wait for each other.

    Raises ``UserError`` where no round can be split, and for a document that needs more ranks than there are.
    """
    waiting = longest_first(lengths)
    rounds: list[list[_Open]] = []
    while waiting:
        opened, waiting = _packed_round(waiting, lengths, ranks)
        rounds.append(opened)
    return _packed(_aligned(rounds, lengths, ranks), lengths)


def _packed_round(waiting: list[int], lengths: Integers, ranks: Ranks) -> tuple[list[_Open], list[int]]:
    """The groups of the next round, and the documents that are left for later ones, longest first."""
    sizes = lengths[waiting]
    filled = _PackedRound(ranks, int(sizes[0]))
    filled.open(waiting[0], int(sizes[0]), _least_size(int(sizes[0]), ranks))
    left, place = [], 1
    while place < len(waiting):
        if filled.place(waiting[place], int(sizes[place])):
            place += 1
            continue
        following = max(place + 1, int(np.searchsorted(-sizes, -filled.longest_that_fits())))
        left += waiting[place:following]
        place = following
    if _grow(filled.opened, filled.free, lengths, ranks.count):
        return _on_all_ranks(waiting, lengths, ranks)
    return filled.opened, left


class _PackedRound:
    """A round that is being filled: its groups, and the ranks that are in none yet."""

    def __init__(self, ranks: Ranks, longest: int) -> None:
        self.opened: list[_Open] = []
        self.free = ranks.count
        self._ranks = ranks
        self._cap = longest * ranks.capacity * (1 + SLACK)
        self._loads, self._rooms, self._widths = np.zeros((3, ranks.count))  # of each group

    def open(self, document: int, length: int, size: int) -> None:
        """Put the document on ``size`` free ranks."""
        self.free -= size
        self.opened.append(_Open(size))
        self._add(len(self.opened) - 1, document, length)

    def place(self, document: int, length: int) -> bool:
        """Put the document where the largest load grows least; False where no place is under the cap."""
        choices = [*self._groups_with_room(length), *self._free_ranks(length)]
        if not choices:
            return False
        _, size, _, index = min(choices)
        if index == len(self.opened):
            self.open(document, length, size)
        else:
            self._add(index, document, length)
        return True

    def longest_that_fits(self) -> float:
        """No longer document has a place; rounded up."""
        free = 1 << self.free.bit_length() >> 1  # the largest power of two
        widths = np.append(self._widths[: len(self.opened)], free)
        loads = np.append(self._loads[: len(self.opened)], 0.0)
        rooms = np.append(self._rooms[: len(self.opened)], free * self._ranks.capacity)
        return float(np.minimum(rooms, np.sqrt(widths * np.maximum(0.0, self._cap - loads))).max()) * (1 + 1e-9)

    def _groups_with_room(self, length: int) -> Iterator[tuple[float, int, bool, int]]:
        """The best of the groups: the largest load after it, its size, that it is not new, and its number."""
        count = len(self.opened)
        after = np.maximum(self._loads.max(), self._loads[:count] + length**2 / self._widths[:count])
        after[(self._rooms[:count] < length) | (after > self._cap)] = np.inf
        alike = np.flatnonzero(after == after.min())
        index = int(alike[self._widths[alike].argmin()])
        if after[index] < np.inf:
            yield float(after[index]), self.opened[index].size, False, index

    def _free_ranks(self, length: int) -> Iterator[tuple[float, int, bool, int]]:
        """The same for every size of a new group."""
        size = _least_size(length, self._ranks)
        while size <= self.free:
            after = max(float(self._loads.max()), length**2 / size)
            if after <= self._cap:
                yield after, size, True, len(self.opened)
            size *= 2

    def _add(self, index: int, document: int, length: int) -> None:
        group = self.opened[index]
        group.add(document, length)
        self._loads[index], self._widths[index] = group.load, group.size
        self._rooms[index] = group.size * self._ranks.capacity - group.tokens


def _on_all_ranks(waiting: list[int], lengths: Integers, ranks: Ranks) -> tuple[list[_Open], list[int]]:
    """One group of all ranks with the documents, longest first, that fit it; and the others."""
    group, left = _Open(ranks.count), []
    for document in waiting:
        length = int(lengths[document])
        if group.tokens + length <= ranks.count * ranks.capacity:
            group.add(document, length)
        else:
            left.append(document)
    return [group], left


def _aligned(rounds: list[list[_Open]], lengths: Integers, ranks: Ranks) -> list[list[_Open]]:
    """Rounds, the last ones split between groups, as many as interleaved stages need.

    The half with the larger groups goes to the end; groups grow until each half has all ranks.
    """
    multiple = ranks.micro_batch_multiple
    place, failed = len(rounds) - 1, 0
    while len(rounds) % multiple:
        if failed == len(rounds):
            raise UserError(
                f"{len(rounds)} rounds are no multiple of pp = {multiple}, and each has one group only; lower pp or "
                "run without interleaved stages"
            )
        halves = _halved(rounds[place])
        if halves is None:
            failed += 1
        else:
            for half in halves:
                _grow(half, ranks.count - sum(group.size for group in half), lengths, ranks.count)
            wide, rounds[place] = halves
            rounds.append(wide)
            failed = 0
        place = place - 1 if place else len(rounds) - 1
    return rounds


def _halved(opened: list[_Open]) -> tuple[list[_Open], list[_Open]] | None:
    """Groups on the first half of the ranks, and the others; None for one group."""
    ends = np.cumsum([group.size for group in opened])
    first = 1 + int(np.searchsorted(ends, ends[-1] // 2))
    return (opened[:first], opened[first:]) if first < len(opened) else None


def _packed(rounds: list[list[_Open]], lengths: Integers) -> GroupPlan:
    """Every round a micro-batch, in which each group runs all its documents together."""
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
