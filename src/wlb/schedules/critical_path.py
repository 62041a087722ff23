"""Operation lists by the longest remaining path: a pipeline order planned for the micro-batches of one step.

A free rank runs the ready operation with the longest path to the end of the step: through the other stages, and through
the later micro-batches on the same stage. Gradients of weights fill the time in which nothing else is ready, of several
micro-batches in a row if that saves time, because one product then computes them. 1F1B, interleaved and zero-bubble
schedules are special cases.

A forward may run only if the rank can hold its activations, and only if every document that has begun can still finish
its forwards once the documents before it have gone backward (the banker's rule). So ranks cannot deadlock waiting for
memory. All seconds are whole ticks, so that every machine makes the same lists.

A dealt output head runs forward and backward at once. Ranks with less work in their blocks get more of it, so that all
have the same, and each gets its part in even intervals.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.schedules.operations import BACKWARD, FORWARD, HEAD, INPUT, WEIGHT, Operation, RankOperations, head_ranks

Ticks = NDArray[np.int64]


class PipelineLoad(NamedTuple):
    """The work of a pipeline in a step, in whole ticks; arrays of shape (stages, micro_batches).

    ``weight`` is the part of ``backward`` that computes gradients of weights, or None if a backward is one operation.
    ``joined`` is what that loses right after another one of its stage. ``transfer`` is the time of a micro-batch from
    one rank to another, shape (micro_batches,). ``held`` is the memory that a forward holds on its rank until the end
    of the backward, in any unit. ``head`` is the work of a dealt output head, shape (micro_batches,); None if the head
    is part of the last stage.
    """

    forward: Ticks
    backward: Ticks
    weight: Ticks | None
    transfer: Ticks
    held: Ticks
    head: Ticks | None = None
    joined: Ticks | None = None


def critical_path_lists(load: PipelineLoad, documents: Sequence[int], pp: int, limits: Sequence[int]) -> RankOperations:
    """The operations of each of ``pp`` ranks, in order; rank r holds every pp-th stage from stage r on.

    ``documents`` has, in order, the number of micro-batches of each sliced document, and 1 for a micro-batch of whole
    documents. Slices go forward in order and backward in reverse. Rank r holds at most ``limits[r]`` at once, unless a
    single document needs more.
    """
    ranks = _Ranks(load, documents, pp, limits)
    while (first := min(ranks.begins)) < _NEVER:
        ranks.run_one(ranks.begins.index(first))
    kinds, heads = 3 if load.weight is not None else 2, 0 if load.head is None else load.head.size
    lists = tuple(tuple(rank.operations) for rank in ranks.each)
    assert sum(map(len, lists)) == kinds * load.forward.size + heads, "ranks are stuck"
    return lists


@lru_cache(maxsize=256)
def dealt_head_lists(named: RankOperations) -> RankOperations:
    """The schedule ``named`` with the output head dealt, for equal micro-batches.

    While micro-batches are away for their heads, others run, so every rank may hold two more than the fullest in
    ``named``.
    """
    places = {(stage, micro_batch) for of_rank in named for stage, micro_batch, _ in of_rank}
    stages, micro_batches = (1 + max(numbers) for numbers in zip(*places, strict=True))
    changes = ([1 if one.kind == FORWARD else -1 for one in of_rank] for of_rank in named)
    one = np.full((stages, micro_batches), _EQUAL, np.int64)
    load = PipelineLoad(one, 2 * one, None, 0 * one[0], 0 * one + 1, one[0] // stages)
    limit = 2 * stages // len(named) + max(max(accumulate(of_rank)) for of_rank in changes)
    return critical_path_lists(load, [1] * micro_batches, len(named), [limit] * len(named))


_EQUAL = 10_000  # ticks of a forward


_Choice = tuple[int, int, int, str, int]  # when the input has arrived, priority, stage, kind, micro-batch
_NEVER = 2**63
_IN_A_ROW = 8  # weight parts for which other operations wait


class _Rank:
    """The operations that one rank has run so far and may run next, and the memory of documents that it holds."""

    def __init__(self, number: int, own: range, limit: int, needed: list[int]) -> None:
        self.number, self.own = number, own  # ``own`` are its stages
        self.limit, self.total = max(limit, *needed), 0  # memory that it may hold, and that it holds
        self.needed = needed  # memory that the forwards of every document that have not run will take
        self.held: dict[int, int] = {}  # memory of every document that has begun, in order
        self.growing: set[int] = set()  # those of them that need more
        self.most_needed = 0  # by one of these
        # The forward and backward of each stage that is next, and all heads, if their inputs have arrived.
        self.ready: dict[tuple[str, int], _Choice] = {}
        self.choices: list[_Choice] = []  # those of them that it has memory for, and a weight part
        self.operations: list[Operation] = []
        self.in_a_row = 0  # the last of them that are weight parts of one stage
        self.free = 0  # when the last of them ends

    def hold(self, document: int, more: int) -> None:
        """Count the memory of a forward or, if negative, release it."""
        self.total += more
        self.held[document] = self.held.get(document, 0) + more
        if more > 0:
            self.needed[document] -= more
            (self.growing.add if self.needed[document] else self.growing.discard)(document)
            self.most_needed = max([self.needed[other] for other in self.growing], default=0)
        elif not self.held[document]:
            del self.held[document]


class _Ranks:
    """The operations that all ranks have run so far, and when each rank can run the next one."""

    def __init__(self, load: PipelineLoad, documents: Sequence[int], pp: int, limits: Sequence[int]) -> None:
        self._stages, self._pp = len(load.forward), pp
        none = 0 * load.backward
        weight, joined = (none if of is None else of for of in (load.weight, load.joined))
        first_part, self._last_part = (BACKWARD, BACKWARD) if load.weight is None else (INPUT, WEIGHT)
        heads = [] if load.head is None else load.head.tolist()
        seconds = {FORWARD: load.forward, first_part: load.backward - weight, WEIGHT: weight}
        self._seconds = {kind: table.tolist() for kind, table in seconds.items()} | {HEAD: [heads] * pp}
        self._joined, self._first_part = joined.tolist(), first_part
        self._transfer, self._leaves = load.transfer.tolist(), load.held.tolist()
        self._document = [index for index, count in enumerate(documents) for _ in range(count)]
        ends = accumulate(documents)
        # Micro-batches in the order in which they go backward.
        back = [end - 1 - place for end, count in zip(ends, documents, strict=True) for place in range(count)]
        kinds = FORWARD, first_part
        *tails, self._head_tails = _tails(load, back)
        self._tails = dict(zip(kinds, tails, strict=True))
        # The micro-batches that every stage has yet to run, in order, and which of them is next: -1 is none.
        orders = {FORWARD: range(len(back)), first_part: back}
        self._order = {kind: [chain(order, [-1]) for _ in load.forward] for kind, order in orders.items()}
        self._next = {kind: [*map(next, of_stages)] for kind, of_stages in self._order.items()}
        self._head_rank = _dealt(heads, (load.forward + load.backward).sum(axis=1), pp)
        # The forwards and backwards whose inputs have arrived.
        self._arrived: dict[str, list[dict[int, _Choice]]] = {kind: [{} for _ in load.forward] for kind in kinds}
        self._arrived[FORWARD][0] = {one: (0, -tail, 0, FORWARD, one) for one, tail in enumerate(tails[0][0])}
        self.each: list[_Rank] = []
        for rank, limit in enumerate(limits):
            needed = np.bincount(self._document, load.held[rank::pp].sum(axis=0)).astype(np.int64).tolist()
            self.each.append(_Rank(rank, range(rank, self._stages, pp), limit, needed))
        self.each[0].ready[FORWARD, 0] = self._arrived[FORWARD][0][0]
        self._late: list[deque[int]] = [deque() for _ in load.forward]  # backwards of a stage with a weight part to run
        self.begins = [_NEVER] * pp  # when each rank can run its next operation
        self._look(self.each[0])

    def run_one(self, number: int) -> None:
        """Let a rank run, of the operations that are ready, the one with the longest remaining path."""
        rank, now = self.each[number], self.begins[number]
        _, stage, kind, micro_batch = min([choice[1:] for choice in rank.choices if choice[0] <= now])
        joins = kind == WEIGHT and rank.operations[-1][::2] == (stage, WEIGHT)
        rank.in_a_row = (kind == WEIGHT) + joins * rank.in_a_row
        rank.operations.append(Operation(stage, micro_batch, kind))
        rank.free = end = now + self._seconds[kind][stage][micro_batch]
        if kind == HEAD:
            del rank.ready[HEAD, micro_batch]
            self._arrive(self._first_part, self._stages - 1, micro_batch, number, end)
        elif kind == WEIGHT:
            rank.free -= joins * self._joined[stage][micro_batch]
            self._late[stage].popleft()
        else:
            following = self._next[kind][stage] = next(self._order[kind][stage])
            if following in self._arrived[kind][stage]:
                rank.ready[kind, stage] = self._arrived[kind][stage][following]
            else:
                del rank.ready[kind, stage]
            if kind == INPUT:
                self._late[stage].append(micro_batch)
            self._hand_on(number, stage, kind, micro_batch, end)
        if kind in (FORWARD, self._last_part) and (leaves := self._leaves[stage][micro_batch]):
            rank.hold(self._document[micro_batch], leaves if kind == FORWARD else -leaves)
        self._look(rank)

    def _hand_on(self, number: int, stage: int, kind: str, micro_batch: int, end: int) -> None:
        """Note when the result arrives at the operation that waits for it."""
        receiver = stage + (1 if kind == FORWARD else -1)
        if receiver == self._stages and self._head_rank:
            to = self._head_rank[micro_batch]
            since = end + self._transfer[micro_batch] * (to != number)
            head = since, -self._head_tails[micro_batch], to, HEAD, micro_batch
            self.each[to].ready[HEAD, micro_batch] = head
            if to != number:
                self._may_run(self.each[to], head)
        elif receiver == self._stages:
            self._arrive(self._first_part, stage, micro_batch, number, end)
        elif receiver >= 0:
            self._arrive(kind, receiver, micro_batch, number, end)

    def _arrive(self, kind: str, stage: int, micro_batch: int, sender: int, end: int) -> None:
        """Note when the input of an operation arrives, which ``sender`` has at ``end``."""
        rank = self.each[stage % self._pp]
        since = end if rank.number == sender else end + self._transfer[micro_batch]
        choice = since, -self._tails[kind][stage][micro_batch], stage, kind, micro_batch
        self._arrived[kind][stage][micro_batch] = choice
        if self._next[kind][stage] == micro_batch:
            rank.ready[kind, stage] = choice
            if rank.number != sender and (kind != FORWARD or self._has_room(rank, stage, micro_batch)):
                self._may_run(rank, choice)

    def _may_run(self, rank: _Rank, choice: _Choice) -> None:
        """Let ``rank``, which has run nothing since it last looked, choose ``choice`` too."""
        rank.choices.append(choice)
        self.begins[rank.number] = min(self.begins[rank.number], max(rank.free, choice[0]))

    def _look(self, rank: _Rank) -> None:
        """Find what ``rank`` can run after an operation."""
        ready = rank.ready.values()
        choices = [one for one in ready if one[3] != FORWARD or self._has_room(rank, one[2], one[4])]
        if late := [stage for stage in rank.own if self._late[stage]]:
            choices.append(self._weight_part(rank, late))
        rank.choices = choices
        self.begins[rank.number] = max(rank.free, min(choices)[0]) if choices else _NEVER

    def _weight_part(self, rank: _Rank, late: list[int]) -> _Choice:
        """The weight part to run next, of one of the stages ``late``: of the last one's, or of that with the most."""
        row, stage = rank.in_a_row, rank.operations[-1].stage
        goes_on = row > 0 and stage in late
        if not goes_on:
            stage = max(late, key=lambda one: len(self._late[one])) if len(late) > 1 else late[0]
        micro_batch = self._late[stage][0]
        first = goes_on and row < _IN_A_ROW and self._joined[stage][micro_batch] > 0
        return 0, -_NEVER if first else 1, stage, WEIGHT, micro_batch

    def _has_room(self, rank: _Rank, stage: int, micro_batch: int) -> bool:
        """Whether every document that has begun can still finish once those before it have gone backward."""
        document, leaves, older = self._document[micro_batch], self._leaves[stage][micro_batch], 0
        held, needed, spare = rank.held, rank.needed, rank.limit - rank.total - leaves
        most = max(rank.most_needed, needed[document])
        if most <= spare:
            return True
        for other in held if document in held else (*held, document):
            if needed[other] - leaves * (other == document) - older > spare:
                return False
            older += held.get(other, 0)
            if other == document or most - older <= spare:
                break  # later ones cannot need more
        return True


def _dealt(heads: Sequence[int], of_stages: Ticks, pp: int) -> list[int]:
    """The rank of the head of each micro-batch, so that ranks have equal work, each in even intervals.

    ``heads`` are the ticks of each head, ``of_stages`` those of the blocks of each stage, shape (stages,).
    """
    work = [int(of_stages[rank::pp].sum()) for rank in head_ranks(pp)]
    total, falling = sum(heads), sorted(work, reverse=True)
    while len(falling) * falling[0] - sum(falling) > total:  # this rank has more work than all will have
        del falling[0]
    parts, level = len(falling), sum(falling) + total
    due = [max(0, level - parts * mine) for mine in work]  # of all heads, times ``parts``
    given, done, places = [0] * len(due), 0, []
    for head in heads:
        done += head
        behind = [(of_rank * done - had * parts * total, -had) for of_rank, had in zip(due, given, strict=True)]
        places.append(behind.index(max(behind)))
        given[places[-1]] += max(1, head)
    return [head_ranks(pp)[place] for place in places]


def _tails(load: PipelineLoad, back: Sequence[int]) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """The longest path from the start of each forward, backward and head to the end of the step, if ranks were free."""
    transfer, forwards, backwards = load.transfer.tolist(), load.forward.tolist(), load.backward.tolist()
    heads: list[int] = []
    after = [0] * len(transfer)  # the path that follows on the next stage
    for stages, order in ((backwards, back[::-1]), (forwards[::-1], range(len(transfer))[::-1])):
        for tails in stages:
            following = 0
            for micro_batch in order:
                following = tails[micro_batch] + max(following, after[micro_batch])
                tails[micro_batch] = following
            after = [tail + sent for tail, sent in zip(tails, transfer, strict=True)]
        after = tails  # turns around on the same rank
        if load.head is not None and not heads:
            heads = [sum(of) for of in zip(load.head.tolist(), tails, transfer, strict=True)]
            after = [sum(of) for of in zip(heads, transfer, strict=True)]
    return forwards, backwards, heads
