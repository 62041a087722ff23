"""FlexSP: an integer program chooses sequence-parallel groups of different sizes for every micro-batch.

Source: FlexSP (ASPLOS '25, arXiv 2412.01523), section 4, and the branch ``flexsp`` of PKU-DAIR/Hetu-Galvatron.
Documents are sorted and cut into M micro-batches of similar lengths and even tokens, with M from the smallest that
memory allows to four more. In each, lengths are rounded up to 16 buckets, and the program chooses how many groups of
each power-of-two size there are and which bucket runs where, to make the slowest group as fast as possible.

We solve the program for all groups of a size together, with a bisected bound on the seconds. Documents are then dealt
to the groups of their size by cost, and by best fit if one finds no room. That leaves out a few thousand variables of
the published program and keeps its constraints: memory, ranks, sizes, and seconds of computing plus communication.
Documents whose tokens fit a group together may not fit one by one. Then the program counts documents instead of
tokens, and a micro-batch without any solution is halved.

Assumed: the simplifications above; one layout is tried; pipeline size 1.
"""

import math
from importlib import import_module
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb_studies.policies.exchange import all_to_all_of_heads
from wlb_studies.policies.filling import Integers, lightest, longest_first, split_evenly
from wlb_studies.policies.plan import Group, GroupPlan, Ranks

BUCKETS = 16
NODES = 200  # branch-and-bound nodes per solve; the same on every machine
_MICRO_BATCHES_TRIED = 5
_BISECTIONS = 5
_GAP = 0.05
_HOPELESS = 5.0  # times the seconds that even ranks would need


class _Grouped(NamedTuple):
    """The groups of a micro-batch and the seconds of the slowest group."""

    seconds: float
    groups: list[Group]


def heterogeneous_groups(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """The number of micro-batches that the program predicts fastest."""
    order = longest_first(lengths)
    least = max(1, -(-int(lengths.sum()) // (ranks.count * ranks.capacity)))
    best: list[_Grouped] = []
    for count in range(least, least + _MICRO_BATCHES_TRIED):
        grouped = _micro_batches(split_evenly(order, lengths, count), lengths, ranks)
        if grouped is None:
            break  # a document that no group holds
        if best and sum(one.seconds for one in grouped) >= sum(one.seconds for one in best):
            break  # more micro-batches would not be faster either
        best = grouped
    if not best:
        raise UserError(
            f"FlexSP finds no groups of {ranks.count} ranks with {ranks.capacity} tokens each for documents of up to "
            f"{lengths.max()}; give more GPUs"
        )
    groups_of_slots = [group._replace(slot=slot) for slot, one in enumerate(best) for group in one.groups]
    return GroupPlan(lengths, tuple(groups_of_slots), frozenset(range(len(best))), exchange="heads")


def group_sizes(ranks: Ranks) -> list[int]:
    """Powers of two up to the query heads of a rank and the number of ranks."""
    most = min(ranks.count, ranks.job.shape.heads // ranks.job.layout.tp)
    return [2**exponent for exponent in range(most.bit_length())]


def _micro_batches(runs: list[list[int]], lengths: Integers, ranks: Ranks) -> list[_Grouped] | None:
    """The groups of all micro-batches, longest documents first; None if no group holds one of the documents."""
    solved = []
    left = runs[::-1]
    while left:
        documents = left.pop()
        one = _Program(documents, lengths, ranks).grouped()
        if one is not None:
            solved.append(one)
        elif len(documents) == 1:
            return None
        else:
            left += split_evenly(documents, lengths, 2)[::-1]
    return solved


class _Program:
    """``documents``, longest first, in buckets of similar lengths.

    ``longest`` is the longest document of each bucket, shape (buckets, 1). ``seconds`` and each of ``shares`` have
    shape (buckets, sizes of groups). A share is the part of a group's memory that a document takes, by its tokens or
    by how many fit; infinite if none fits.
    """

    def __init__(self, documents: list[int], lengths: Integers, ranks: Ranks) -> None:
        self.documents, self.lengths, self.ranks = documents, lengths, ranks
        self.buckets = [part.tolist() for part in np.array_split(documents, min(BUCKETS, len(documents)))]
        self.counts = np.array([len(bucket) for bucket in self.buckets])
        self.longest = np.array([[lengths[bucket].max()] for bucket in self.buckets])
        self.sizes = np.array(group_sizes(ranks))
        self.room = self.sizes * ranks.capacity
        self.seconds = _seconds(self.longest[:, 0], self.sizes, ranks)
        mean = np.array([[lengths[bucket].mean()] for bucket in self.buckets])
        one_by_one = 1 / np.maximum(self.room // self.longest, 1)
        self.shares = [np.where(self.longest <= self.room, part, np.inf) for part in (mean / self.room, one_by_one)]

    def grouped(self) -> _Grouped | None:
        """The fastest groups that the program finds; None if none fit."""
        low = self._least_seconds()
        if low == np.inf:
            return None
        found = self._one_each()
        if found is not None and found.seconds <= (1 + _GAP) * low:
            return found  # within the program's own gap of the optimum
        high = low if found is None else found.seconds
        for _ in range(_BISECTIONS):
            bound = 2 * high if found is None else (low + high) / 2
            solvable, groups = self._within(bound)
            if groups is not None and (found is None or groups.seconds < found.seconds):
                found, high = groups, min(bound, groups.seconds)
            elif found is not None:
                low = bound
            elif solvable or bound <= _HOPELESS * low:
                high = bound
            else:
                return None  # memory rules it out, not seconds
            if found is not None and high <= (1 + 2 * _GAP) * low:
                break
        return found

    def _least_seconds(self) -> float:
        """A lower bound on seconds: all ranks equally busy, and the slowest document alone."""
        possible = np.where(self.longest <= self.room, self.seconds, np.inf)
        even = float(((possible * self.sizes).min(axis=1) * self.counts).sum()) / self.ranks.count
        return max(even, float(possible.min(axis=1).max()))

    def _one_each(self) -> _Grouped | None:
        """Every document on one rank, if possible."""
        if self.lengths[self.documents].max() > self.ranks.capacity:
            return None
        groups, left_over = self._filled(self.documents, 1, self.ranks.count, 0)
        return None if left_over else self._slowest(groups)

    def _within(self, bound: float) -> tuple[bool, _Grouped | None]:
        """Whether the program has a solution within ``bound`` seconds, and the groups that documents fit into."""
        for shares in self.shares:
            solution = self._solution(shares, bound)
            if solution is None:
                return False, None
            groups = self._dealt(*solution)
            if groups is not None:
                return True, groups
        return True, None

    def _solution(self, shares: NDArray[np.float64], bound: float) -> tuple[Integers, Integers] | None:
        """Documents of each bucket in groups of each size, (buckets, sizes), and the number of groups of each size.

        None if impossible. A document takes ``shares`` of a group's memory; infinite shares are forbidden. Columns:
        documents by bucket and size, bucket-major, then groups of each size. Minimises the ranks used.
        """
        optimize = import_module("scipy.optimize")
        buckets, kinds = shares.shape
        allowed = np.isfinite(shares)
        upper = np.concatenate([(allowed * self.counts[:, None]).ravel(), self.ranks.count // self.sizes])
        each = np.hstack([np.kron(np.eye(buckets), np.ones(kinds)), np.zeros((buckets, kinds))])
        time, memory = (
            np.hstack([*map(np.diag, of_document), -np.eye(kinds)])
            for of_document in (self.seconds / bound, np.where(allowed, shares, 0.0))
        )
        used = np.concatenate([np.zeros(buckets * kinds), self.sizes])
        result = optimize.milp(
            used,
            integrality=np.ones(len(used)),
            bounds=optimize.Bounds(0, upper),
            constraints=[
                optimize.LinearConstraint(each, self.counts, self.counts),
                optimize.LinearConstraint(np.concatenate([time, memory]), -np.inf, 0),
                optimize.LinearConstraint(used[None], 0, self.ranks.count),
            ],
            options={"node_limit": NODES, "mip_rel_gap": _GAP},
        )
        if result.x is None:
            return None
        whole = np.rint(result.x).astype(np.int64)
        return whole[:-kinds].reshape(buckets, kinds), whole[-kinds:]

    def _dealt(self, shares: Integers, of_size: Integers) -> _Grouped | None:
        """The groups of a solution; None if documents do not fit one by one."""
        groups: list[Group] = []
        left_over: list[int] = []  # documents of smaller groups may fit into larger ones
        stops = np.cumsum(shares, axis=1)
        for kind, (size, count) in enumerate(zip(self.sizes.tolist(), of_size.tolist(), strict=True)):
            for bucket, taken, stop in zip(self.buckets, shares[:, kind], stops[:, kind], strict=True):
                left_over += bucket[stop - taken : stop]
            if left_over and count:
                filled, left_over = self._filled(left_over, size, count, sum(len(group.ranks) for group in groups))
                groups += filled
        fits = all(self._fits_in_one(document, groups) for document in left_over)
        return self._slowest(groups) if fits else None

    def _filled(self, documents: list[int], size: int, count: int, first: int) -> tuple[list[Group], list[int]]:
        """Up to ``count`` groups of ``size`` ranks from rank ``first``, even in seconds; and the other documents."""
        cost = np.zeros(len(self.lengths))
        cost[documents] = _seconds(self.lengths[documents], np.array([size]), self.ranks)[:, 0]
        members, left_over = lightest(documents, cost, count, self.lengths, size * self.ranks.capacity)
        firsts = range(first, first + count * size, size)
        return [
            Group(0, tuple(range(first, first + size)), tuple(of_group))
            for first, of_group in zip(firsts, filter(None, members), strict=False)
        ], left_over

    def _fits_in_one(self, document: int, groups: list[Group]) -> bool:
        """Add the document to the fullest group with room, if any."""
        rooms = [len(g.ranks) * self.ranks.capacity - int(self.lengths[list(g.documents)].sum()) for g in groups]
        length = int(self.lengths[document])
        room, index = min((room, index) for index, room in enumerate([*rooms, math.inf]) if room >= length)
        if room == math.inf:
            return False
        groups[index] = groups[index]._replace(documents=(*groups[index].documents, document))
        return True

    def _slowest(self, groups: list[Group]) -> _Grouped:
        sizes = ((self.lengths[list(g.documents)], np.array([len(g.ranks)])) for g in groups)
        return _Grouped(max(float(_seconds(*of_group, self.ranks).sum()) for of_group in sizes), groups)


def _seconds(lengths: Integers, sizes: NDArray[np.int64], ranks: Ranks) -> NDArray[np.float64]:
    """For a document of each length in a group of each size: compute seconds per rank, and all-to-all bytes."""
    compute = ranks.job.costs.document_seconds(lengths)[:, None] / sizes
    wire = [
        np.zeros(len(lengths)) if size == 1 else 2 * all_to_all_of_heads(ranks.job, lengths, size)[0]
        for size in sizes.tolist()
    ]
    seconds: NDArray[np.float64] = compute + np.stack(wire, axis=1)
    return seconds
