"""Operation lists by the longest remaining path: a pipeline order planned for the micro-batches of one step.

A free rank runs the ready operation with the longest path to the end of the step: through the other stages, and through
the later micro-batches on the same stage. Gradients of weights fill the time in which nothing else is ready. 1F1B,
interleaved and zero-bubble schedules are special cases.

A forward may run only if the rank can hold its activations, and only if every document that has begun can still finish
its forwards once the documents before it have gone backward (the banker's rule). So ranks cannot deadlock waiting for
memory. All seconds are whole ticks, so that every machine makes the same lists.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.schedules.operations import BACKWARD, FORWARD, INPUT, WEIGHT, Operation, RankOperations

Ticks = NDArray[np.int64]


class PipelineLoad(NamedTuple):
    """The work of a pipeline in a step, in whole ticks; arrays of shape (stages, micro_batches).

    ``weight`` is the part of ``backward`` that computes gradients of weights, or None if a backward is one operation.
    ``transfer`` is the time of a micro-batch from one rank to another, shape (micro_batches,). ``held`` is the memory
    that a forward holds on its rank until the end of the backward, in any unit.
    """

    forward: Ticks
    backward: Ticks
    weight: Ticks | None
    transfer: Ticks
    held: Ticks


def critical_path_lists(load: PipelineLoad, documents: Sequence[int], pp: int, limits: Sequence[int]) -> RankOperations:
    """The operations of each of ``pp`` ranks, in order; rank r holds every pp-th stage from stage r on.

    ``documents`` has, in order, the number of micro-batches of each sliced document, and 1 for a micro-batch of whole
    documents. Slices go forward in order and backward in reverse. Rank r holds at most ``limits[r]`` at once, unless a
    single document needs more.
    """
    ranks = _Ranks(load, documents, pp, limits)
    while (first := min(ranks.begins)) < _NEVER:
        ranks.run_one(ranks.begins.index(first))
    assert sum(map(len, ranks.lists)) == (3 if load.weight is not None else 2) * load.forward.size, "ranks are stuck"
    return tuple(map(tuple, ranks.lists))


_NEVER = 2**63


class _Ranks:
    """The operations that all ranks have run so far, and when each rank can run the next one."""

    def __init__(self, load: PipelineLoad, documents: Sequence[int], pp: int, limits: Sequence[int]) -> None:
        self._stages, self._pp = len(load.forward), pp
        weight = 0 if load.weight is None else load.weight
        first_part, self._last_part = (BACKWARD, BACKWARD) if load.weight is None else (INPUT, WEIGHT)
        seconds = {FORWARD: load.forward, first_part: load.backward - weight, WEIGHT: weight + 0 * load.backward}
        self._seconds = {kind: table.tolist() for kind, table in seconds.items()}
        self._first_part = first_part
        self._transfer, self._leaves = load.transfer.tolist(), load.held.tolist()
        self._document = [index for index, count in enumerate(documents) for _ in range(count)]
        ends = accumulate(documents)
        # Micro-batches in the order in which they go backward.
        self._back = [end - 1 - place for end, count in zip(ends, documents, strict=True) for place in range(count)]
        kinds = FORWARD, first_part
        self._tails = dict(zip(kinds, _tails(load, self._back), strict=True))
        # The micro-batches of every stage in order, with none at the end, and when the inputs of each have arrived.
        self._order = dict(zip(kinds, ([*range(len(self._back)), -1], [*self._back, -1]), strict=True))
        self._arrived: dict[str, list[dict[int, int]]] = {kind: [{} for _ in load.forward] for kind in kinds}
        self._arrived[FORWARD][0] = dict.fromkeys(self._back, 0)
        self._own = [range(rank, self._stages, pp) for rank in range(pp)]
        # The memory that the forwards of every document that have not run will take on each rank.
        of_ranks = (np.bincount(self._document, load.held[rank::pp].sum(axis=0)) for rank in range(pp))
        self._needed: list[list[int]] = [of_rank.astype(np.int64).tolist() for of_rank in of_ranks]
        self._limits = [max(limit, *needed) for limit, needed in zip(limits, self._needed, strict=True)]
        self._held: list[dict[int, int]] = [{} for _ in range(pp)]  # memory of every document that has begun, in order
        self._late: list[deque[tuple[int, int]]] = [deque() for _ in range(pp)]  # backwards with a weight part to run
        self._free = [0] * pp
        self._done = {FORWARD: [0] * self._stages, first_part: [0] * self._stages, WEIGHT: [0] * self._stages}
        self._choices: list[list[tuple[int, int, int, str, int]]] = [[] for _ in range(pp)]
        self.begins = [_NEVER] * pp  # when each rank can run its next operation
        self.lists: list[list[Operation]] = [[] for _ in range(pp)]
        for rank in range(pp):
            self._look(rank)

    def run_one(self, rank: int) -> None:
        """Let ``rank`` run, of the operations that are ready, the one with the longest remaining path."""
        now = self.begins[rank]
        _, stage, kind, micro_batch = min([choice[1:] for choice in self._choices[rank] if choice[0] <= now])
        self._free[rank] = end = now + self._seconds[kind][stage][micro_batch]
        self.lists[rank].append(Operation(stage, micro_batch, kind))
        self._done[kind][stage] += 1
        if kind == INPUT:
            self._late[rank].append((stage, micro_batch))
        elif kind == WEIGHT:
            self._late[rank].popleft()
        self._hold(rank, stage, micro_batch, (kind == FORWARD) - (kind == self._last_part))
        if kind != WEIGHT:
            self._hand_on(rank, stage, kind, micro_batch, end)
        self._look(rank)

    def _hold(self, rank: int, stage: int, micro_batch: int, sign: int) -> None:
        """Count (``sign`` 1) or release (-1) the memory of a forward."""
        document, leaves = self._document[micro_batch], self._leaves[stage][micro_batch]
        held = self._held[rank]
        held[document] = held.get(document, 0) + sign * leaves
        if not held[document]:
            del held[document]
        if sign > 0:
            self._needed[rank][document] -= leaves

    def _hand_on(self, rank: int, stage: int, kind: str, micro_batch: int, end: int) -> None:
        """Note when the result arrives at the operation that waits for it."""
        receiver = stage + (1 if kind == FORWARD else -1)
        if receiver == self._stages:
            self._arrived[self._first_part][stage][micro_batch] = end
        elif receiver >= 0:
            self._arrived[kind][receiver][micro_batch] = end + self._transfer[micro_batch] * (self._pp > 1)
            if receiver % self._pp != rank:
                self._look(receiver % self._pp)

    def _look(self, rank: int) -> None:
        """Find what ``rank`` can run next: when the input arrives, its priority, and the operation."""
        choices: list[tuple[int, int, int, str, int]] = []
        for stage, kind in product(self._own[rank], self._order):
            arrived, micro_batch = self._arrived[kind][stage], self._order[kind][self._done[kind][stage]]
            if micro_batch in arrived and (kind != FORWARD or self._has_room(rank, stage, micro_batch)):
                priority = -self._tails[kind][stage][micro_batch]
                choices.append((arrived[micro_batch], priority, stage, kind, micro_batch))
        if self._late[rank]:
            stage, micro_batch = self._late[rank][0]
            choices.append((0, 1, stage, WEIGHT, micro_batch))
        self._choices[rank] = choices
        self.begins[rank] = max(self._free[rank], min(choices)[0]) if choices else _NEVER

    def _has_room(self, rank: int, stage: int, micro_batch: int) -> bool:
        """Whether every document that has begun can still finish once those before it have gone backward."""
        held, needed = self._held[rank], self._needed[rank]
        document, leaves, older = self._document[micro_batch], self._leaves[stage][micro_batch], 0
        spare = self._limits[rank] - sum(held.values()) - leaves
        most = max(needed[other] for other in (document, *held))
        for other in held if document in held else (*held, document):
            if most - older <= spare:
                break  # neither this one nor later ones can need more
            if needed[other] - leaves * (other == document) - older > spare:
                return False
            if other == document:
                break
            older += held[other]
        return True


def _tails(load: PipelineLoad, back: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """The longest path from the start of each forward and backward to the end of the step, if all ranks were free."""
    transfer, forwards, backwards = load.transfer.tolist(), load.forward.tolist(), load.backward.tolist()
    after = [0] * len(transfer)  # the path that follows on the next stage
    for stages, order in ((backwards, back[::-1]), (forwards[::-1], range(len(transfer))[::-1])):
        for tails in stages:
            following = 0
            for micro_batch in order:
                following = tails[micro_batch] + max(following, after[micro_batch])
                tails[micro_batch] = following
            after = [tail + sent for tail, sent in zip(tails, transfer, strict=True)]
        after = tails  # turns around on the same rank
    return forwards, backwards
