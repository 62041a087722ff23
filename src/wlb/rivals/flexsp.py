"""FlexSP: sequence-parallel groups of different sizes, chosen by an integer program for every micro-batch.

Source: FlexSP (ASPLOS '25, arXiv 2412.01523), section 4, and the branch ``flexsp`` of PKU-DAIR/Hetu-Galvatron.
Documents are sorted and cut into M micro-batches of like lengths and even tokens, M from the least that memory allows
to four more. In each, lengths are rounded up to 16 buckets, and the program chooses how many groups of each
power-of-two size there are and which bucket runs where, so that the slowest group is fastest.

The program is solved here for all groups of a size together, at a bound on the seconds that is bisected; documents are
then dealt to the groups of their size, by cost and, where one finds no room, by best fit. That leaves a few thousand
variables of the published program out and keeps its constraints: memory, ranks, sizes, and seconds of computing plus
communication. Tokens of many documents together may fit a group that does not hold them one by one; then the program
counts documents of a group in place of tokens, and a micro-batch for which it finds no groups at all is halved.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError, require
from wlb.rivals.exchange import all_to_all_of_heads
from wlb.rivals.filling import Integers, lightest, longest_first, split_evenly
from wlb.rivals.plan import Group, GroupPlan, Ranks

BUCKETS = 16
NODES = 200  # of branch and bound, in each solve; the same on every machine
_MICRO_BATCHES_TRIED = 5
_BISECTIONS = 5
_GAP = 0.05
_HOPELESS = 5.0  # times the seconds that even ranks would need


def heterogeneous_groups(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """The fastest number of micro-batches by the program's own seconds. Raises ``UserError`` without SciPy."""
    require("scipy.optimize", "solver")
    order = longest_first(lengths)
    least = max(1, -(-int(lengths.sum()) // (ranks.count * ranks.capacity)))
    best: tuple[float, list[list[Group]]] | None = None
    for count in range(least, least + _MICRO_BATCHES_TRIED):
        groups = _micro_batches(split_evenly(order, lengths, count), lengths, ranks)
        if groups is None:
            break  # a document that no group holds
        seconds = sum(of_one[0] for of_one in groups)
        if best is not None and seconds >= best[0]:
            break  # nor would more micro-batches be faster
        best = seconds, [of_one[1] for of_one in groups]
    if best is None:
        raise UserError(
            f"FlexSP finds no groups of {ranks.count} ranks of {ranks.capacity} tokens for documents of up to "
            f"{lengths.max()}; give more GPUs"
        )
    groups_of_slots = [group._replace(slot=slot) for slot, of_slot in enumerate(best[1]) for group in of_slot]
    slots = frozenset(range(len(best[1])))
    return GroupPlan(lengths, tuple(groups_of_slots), slots, exchange="heads")


def group_sizes(ranks: Ranks) -> list[int]:
    """Powers of two up to the query heads that a rank has, and to all ranks."""
    most = min(ranks.count, ranks.job.shape.heads // ranks.job.tp)
    return [2**exponent for exponent in range(most.bit_length())]


def _micro_batches(runs: list[list[int]], lengths: Integers, ranks: Ranks) -> list[tuple[float, list[Group]]] | None:
    """Seconds and groups of all micro-batches, longest documents first; None where no group holds one of these."""
    solved = []
    left = runs[::-1]
    while left:
        documents = left.pop()
        one = _micro_batch(documents, lengths, ranks)
        if one is not None:
            solved.append(one)
        elif len(documents) == 1:
            return None
        else:
            left += split_evenly(documents, lengths, 2)[::-1]
    return solved


def _micro_batch(documents: list[int], lengths: Integers, ranks: Ranks) -> tuple[float, list[Group]] | None:
    """Seconds and groups of one micro-batch; None where none fit."""
    sizes = np.array(group_sizes(ranks))
    buckets = [part.tolist() for part in np.array_split(documents, min(BUCKETS, len(documents)))]
    longest = np.array([lengths[bucket].max() for bucket in buckets])
    mean = np.array([lengths[bucket].mean() for bucket in buckets])
    seconds = _seconds(longest, sizes, ranks)
    counts = np.array([len(bucket) for bucket in buckets])
    room = sizes * ranks.capacity
    by_tokens = mean[:, None] / room
    one_by_one = 1 / np.maximum(room // longest[:, None], 1)
    possible = np.where(longest[:, None] <= sizes * ranks.capacity, seconds, np.inf)
    low = max(float(((possible * sizes).min(axis=1) * counts).sum()) / ranks.count, float(possible.min(axis=1).max()))
    if low == np.inf:
        return None
    alone = _alone(documents, lengths, ranks)
    if alone is not None and alone[0] <= (1 + _GAP) * low:
        return alone  # no program does better by more than its own gap
    found, high = alone, 2 * low if alone is None else alone[0]
    for _ in range(_BISECTIONS):
        bound = high if found is None else (low + high) / 2
        for shares in (by_tokens, one_by_one):
            solution = _solve(seconds, sizes, counts, np.where(longest[:, None] <= room, shares, np.inf), bound, ranks)
            groups = None if solution is None else _dealt(solution, buckets, sizes, lengths, ranks)
            if solution is None or groups is not None:
                break
        if groups is not None and (found is None or groups[0] < found[0]):
            found, high = groups, min(bound, groups[0])
        elif found is None:
            if solution is None and bound > _HOPELESS * low:
                return None  # memory, not seconds, stands against it
            high = 2 * bound
        else:
            low = bound
        if found is not None and high <= (1 + 2 * _GAP) * low:
            break
    return found


def _alone(documents: list[int], lengths: Integers, ranks: Ranks) -> tuple[float, list[Group]] | None:
    """Every document on one rank, if that is possible."""
    if lengths[documents].max() > ranks.capacity:
        return None
    cost = np.zeros(len(lengths))
    cost[documents] = _seconds(lengths[documents], np.array([1]), ranks)[:, 0]
    members, left_over = lightest(documents, cost, ranks.count, lengths, ranks.capacity)
    if left_over:
        return None
    groups = [Group(0, (rank,), tuple(of_rank)) for rank, of_rank in enumerate(members) if of_rank]
    return max(float(cost[list(group.documents)].sum()) for group in groups), groups


def _seconds(lengths: Integers, sizes: NDArray[np.int64], ranks: Ranks) -> NDArray[np.float64]:
    """Of a document of each length in a group of each size: computing over the ranks, and the all-to-all's bytes."""
    compute = ranks.job.sharding_workload.document_seconds(lengths)[:, None] / sizes
    wire = [
        np.zeros(len(lengths)) if size == 1 else 2 * all_to_all_of_heads(ranks.job, lengths, size)[0]
        for size in sizes.tolist()
    ]
    seconds: NDArray[np.float64] = compute + np.stack(wire, axis=1)
    return seconds


def _solve(
    seconds: NDArray[np.float64],
    sizes: NDArray[np.int64],
    counts: Integers,
    shares: NDArray[np.float64],
    bound: float,
    ranks: Ranks,
) -> tuple[Integers, Integers] | None:
    """Documents of each bucket in groups of each size, (buckets, sizes), and the number of groups; None if impossible.

    A document takes ``shares`` of a group's memory, shape (buckets, sizes); infinite ones are not allowed. Columns:
    documents by bucket and size, bucket-major, then groups of each size. Fewest ranks, of what is possible.
    """
    optimize = require("scipy.optimize", "solver")
    buckets, kinds = seconds.shape
    count = buckets * kinds
    allowed = np.isfinite(shares)
    upper = np.concatenate([(allowed * counts[:, None]).ravel(), ranks.count // sizes])
    each = np.zeros((buckets, count + kinds))
    time, memory = np.zeros((kinds, count + kinds)), np.zeros((kinds, count + kinds))
    for bucket in range(buckets):
        each[bucket, bucket * kinds : (bucket + 1) * kinds] = 1
    for kind in range(kinds):
        time[kind, kind:count:kinds] = seconds[:, kind] / bound
        memory[kind, kind:count:kinds] = np.where(allowed[:, kind], shares[:, kind], 0.0)
        time[kind, count + kind] = memory[kind, count + kind] = -1
    used = np.concatenate([np.zeros(count), sizes])[None]
    constraints = [
        optimize.LinearConstraint(each, counts, counts),
        optimize.LinearConstraint(np.concatenate([time, memory]), -np.inf, 0),
        optimize.LinearConstraint(used, 0, ranks.count),
    ]
    result = optimize.milp(
        np.concatenate([np.zeros(count), sizes]),
        integrality=np.ones(count + kinds),
        bounds=optimize.Bounds(0, upper),
        constraints=constraints,
        options={"node_limit": NODES, "mip_rel_gap": _GAP},
    )
    if result.x is None:
        return None
    whole = np.rint(result.x).astype(np.int64)
    return whole[:count].reshape(buckets, kinds), whole[count:]


def _dealt(
    solution: tuple[Integers, Integers],
    buckets: list[list[int]],
    sizes: NDArray[np.int64],
    lengths: Integers,
    ranks: Ranks,
) -> tuple[float, list[Group]] | None:
    """Seconds of the slowest group, and all groups; None where documents that were counted do not fit one by one."""
    shares, of_size = solution
    groups: list[Group] = []
    first = 0
    left_over: list[int] = []  # of smaller groups, which larger ones may have room for
    cuts = np.concatenate([np.zeros((len(buckets), 1), np.int64), np.cumsum(shares, axis=1)], axis=1)
    for kind in range(len(sizes)):
        size, count = int(sizes[kind]), int(of_size[kind])
        mine = left_over + [
            document
            for bucket, row in zip(buckets, cuts, strict=True)
            for document in bucket[row[kind] : row[kind + 1]]
        ]
        left_over = mine
        if not mine or not count:
            continue
        by_cost = np.zeros(len(lengths))
        by_cost[mine] = _seconds(lengths[mine], np.array([size]), ranks)[:, 0]
        members, left_over = lightest(mine, by_cost, count, lengths, size * ranks.capacity)
        for documents in filter(None, members):
            groups.append(Group(0, tuple(range(first, first + size)), tuple(documents)))
            first += size
    for document in left_over:
        length = int(lengths[document])
        rooms = [len(g.ranks) * ranks.capacity - int(lengths[list(g.documents)].sum()) for g in groups]
        tightest = min((room, index) for index, room in enumerate([*rooms, math.inf]) if room >= length)[1]
        if tightest == len(groups):
            return None
        group = groups[tightest]
        groups[tightest] = group._replace(documents=(*group.documents, document))
    seconds = (float(_seconds(lengths[list(g.documents)], np.array([len(g.ranks)]), ranks).sum()) for g in groups)
    return max(seconds), groups
