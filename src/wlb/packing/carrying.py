"""Base of packers of whole documents that carry over documents without room; and ``fixed_greedy``.

Each round takes in fresh documents until they and the carried ones fill the global batches that it plans together,
places them into N micro-batches for each global batch, and carries the rest over. If that would leave out a document
that has waited ``max_delay`` rounds, the round is placed again with overdue documents first, oldest first, so no
document starves.

Packing ``window`` global batches together balances better, but changes which step trains which document (WLB-LLM,
sections 2.3 and 7.2).

Algorithm 1 of WLB-LLM (section 4.2) tries the micro-batch with the least work, then the one with the fewest tokens; a
document without room there has room nowhere. Two heaps find both in O(log N), so placing n documents takes O(n log N).
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

from wlb.documents.segments import Segment
from wlb.packing.packer import Packer, Pending, rows_of
from wlb.packing.plan import MicroBatch, StepPlan


class OpenMicroBatches:
    """N micro-batches being filled up to ``max_tokens`` tokens; ``tokens`` and ``seconds`` are what each holds."""

    def __init__(self, micro_batches: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.members: list[list[Pending]] = [[] for _ in range(micro_batches)]
        self.seconds = [0.0] * micro_batches
        self.tokens = [0] * micro_batches

    def place(self, items: Iterable[Pending]) -> list[Pending]:
        """Place ``items`` in the order given; returns those without room."""
        left_over: list[Pending] = []
        members, seconds, tokens, max_tokens = self.members, self.seconds, self.tokens, self.max_tokens
        lightest, shortest = ([(held, index) for index, held in enumerate(values)] for values in (seconds, tokens))
        heapify(lightest)
        heapify(shortest)
        for item in items:
            while lightest[0][0] != seconds[lightest[0][1]]:  # outdated entry: that micro-batch has grown since
                heappop(lightest)
            index = lightest[0][1]
            if tokens[index] + item[0] > max_tokens:
                while shortest[0][0] != tokens[shortest[0][1]]:
                    heappop(shortest)
                index = shortest[0][1]
                if tokens[index] + item[0] > max_tokens:
                    left_over.append(item)
                    continue
            members[index].append(item)
            seconds[index] += item[1]
            tokens[index] += item[0]
            heappush(lightest, (seconds[index], index))
            heappush(shortest, (tokens[index], index))
        return left_over


class CarryingPacker(Packer):
    """Base of ``fixed_greedy`` and ``variable_length``."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.global_batches = self.options.window  # planned in one round
        self.max_delay = self.options.max_delay
        self._carried: list[Pending] = []
        self._carried_tokens = 0

    @property
    def pending(self) -> list[Segment]:
        return [item.segment for item in chain(self._waiting(), self._carried)] + super().pending

    def state_dict(self) -> dict[str, Any]:
        held = {"carried": self._carried, "waiting": self._waiting()}
        rows = {name: [[*item.segment, item.arrived] for item in items] for name, items in held.items()}
        return {**super().state_dict(), **rows}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        for name, hold in (("carried", self._carry), ("waiting", self._wait)):
            priced = self._price(rows_of([row[:3] for row in state[name]]), 0)
            hold([item._replace(arrived=row[3]) for item, row in zip(priced, state[name], strict=True)])

    def _waiting(self) -> list[Pending]:
        """Documents that a subclass holds back beside the carried ones."""
        return []

    def _wait(self, items: list[Pending]) -> None:
        """Hold back exactly ``items``, as ``_waiting`` returned them."""

    def _precedence(self, items: list[Pending]) -> list[Pending]:
        """``items`` in the order in which they are placed: by falling length; equal lengths keep their order."""
        return sorted(items, key=itemgetter(0), reverse=True)

    def _admit(self, fresh: list[Pending]) -> tuple[list[Pending], list[Pending]]:
        """Fresh and older documents to place now; a subclass may hold some back or release some."""
        return fresh, self._carried

    def _tokens_wanted(self) -> int:
        return self.global_batches * self.global_batch_tokens - self._carried_tokens

    def _next_steps(self) -> list[StepPlan]:
        fresh, older = self._admit(self._take_fresh())
        return self._plan_round(older + fresh, self.global_batches)

    def last_steps(self) -> list[StepPlan]:
        fresh = self._price(self._take(self._arrived_tokens), self._step)
        held = self._carried + self._waiting()
        self._wait([])
        self._carry(self._precedence(held + fresh))
        steps: list[StepPlan] = []
        while self._carried:
            batches = min(self.global_batches, math.ceil(self._carried_tokens / self.global_batch_tokens))
            ends = [*accumulate(item.length for item in self._carried)]
            count = bisect_left(ends, batches * self.global_batch_tokens) + 1  # the fewest that fill the batches
            now, later = self._carried[:count], self._carried[count:]
            steps += self._plan_round(now, batches)
            self._carry(self._precedence(self._carried + later))
        return steps

    def _take_fresh(self) -> list[Pending]:
        """The documents that this round takes in, each with the step that would train it in order of arrival."""
        fresh: list[Pending] = []
        left = self._tokens_wanted()
        for batch in range(self.global_batches):
            taken = self._take(left - (self.global_batches - 1 - batch) * self.global_batch_tokens)
            left -= int(taken[:, 2].sum())
            fresh += self._price(taken, self._step + batch)
        return fresh

    def _plan_round(self, items: list[Pending], steps: int) -> list[StepPlan]:
        """Place ``items`` by precedence or, if an overdue one would have no room, overdue ones first."""
        ordered = self._precedence(items)
        filled, left_over = self._filled(ordered, steps)
        if any(map(self._overdue, left_over)):
            # Oldest first; those that are not overdue keep their order.
            ordered.sort(key=lambda item: item.arrived if self._overdue(item) else math.inf)
            filled, left_over = self._filled(ordered, steps)
        self._carry(left_over)
        return self._emit_filled(filled)

    def _filled(self, items: list[Pending], steps: int) -> tuple[OpenMicroBatches, list[Pending]]:
        filled = OpenMicroBatches(steps * self.micro_batches, self.max_tokens)
        return filled, filled.place(items)

    def _emit_filled(self, filled: OpenMicroBatches) -> list[StepPlan]:
        plans, loads = [], iter(filled.seconds)
        for first in range(0, len(filled.members), self.micro_batches):
            members = filled.members[first : first + self.micro_batches]
            micro_batches = [MicroBatch(tuple([item[3] for item in held]), next(loads)) for held in members]
            waits = [(self._step - item.arrived, item.length) for held in members for item in held]
            plans.append(self._emit([micro_batches], waits))
        return plans

    def _overdue(self, item: Pending) -> bool:
        return self._step - item.arrived >= self.max_delay * self.global_batches

    def _carry(self, items: list[Pending]) -> None:
        self._carried = items
        self._carried_tokens = sum(item.length for item in items)


class FixedGreedyPacker(CarryingPacker):
    """Longest document first into the lightest micro-batch with room, which holds at most a context window."""

    name = "fixed_greedy"
