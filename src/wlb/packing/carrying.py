"""Base of packers of whole documents, where what does not fit into a step is carried over; and ``fixed_greedy``.

Each planning round takes fresh documents in until they and the carry-over make as many global batches as it plans
together, places them into N micro-batches for each of them and carries the rest. Where that would leave over a document
that has waited ``max_delay`` rounds, the round is placed again with such documents first, oldest first, so none is
starved.

Packing ``window`` global batches together balances better, at the price of changing which step trains which document
(WLB-LLM, sections 2.3 and 7.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from wlb.documents.segments import Segment
from wlb.packing.packer import Packer, Pending
from wlb.packing.placement import OpenMicroBatches, longest_first
from wlb.packing.plan import MicroBatch, StepPlan


class CarryingPacker(Packer):
    """Base of ``fixed_greedy``, ``fixed_solver``, ``variable_length`` and ``makespan``."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.global_batches = self.options.window  # of a round
        self.max_delay = self.options.max_delay
        self._carried: list[Pending] = []
        self._carried_tokens = 0

    @property
    def pending(self) -> list[Segment]:
        return [item.segment for item in chain(self._waiting(), self._carried)] + super().pending

    def state_dict(self) -> dict[str, Any]:
        held = {"carried": _to_state(self._carried), "waiting": _to_state(self._waiting())}
        return {**super().state_dict(), **held}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._carry(self._from_state(state["carried"]))
        self._wait(self._from_state(state["waiting"]))

    def _waiting(self) -> list[Pending]:
        """Documents that a subclass holds back, and does not carry over."""
        return []

    def _wait(self, items: list[Pending]) -> None:
        """Hold back ``items`` alone, which ``_waiting`` gave."""

    def _precedence(self, items: list[Pending]) -> list[Pending]:
        """``items`` in the order in which they are placed."""
        return longest_first(items)

    def _improved(self, filled: OpenMicroBatches) -> OpenMicroBatches:
        """The same documents over the same micro-batches, where a subclass knows a better placement."""
        return filled

    def _admit(self, fresh: list[Pending]) -> tuple[list[Pending], list[Pending]]:
        """Documents to place now, fresh ones and older ones; a subclass may hold some back or release some."""
        return fresh, self._carried

    def _tokens_wanted(self) -> int:
        return self.global_batches * self.global_batch_tokens - self._carried_tokens

    def _next_steps(self) -> list[StepPlan]:
        fresh, older = self._admit(self._take_fresh())
        return self._plan_round(self._precedence(older + fresh), self.global_batches)

    def last_steps(self) -> list[StepPlan]:
        fresh = self._price(self._take(self._arrived_tokens), self._step)
        held = self._carried + self._waiting()
        self._wait([])
        self._carry(self._precedence(held + fresh))
        steps: list[StepPlan] = []
        while self._carried:
            batches = min(self.global_batches, math.ceil(self._carried_tokens / self.global_batch_tokens))
            now, later = split_at(self._carried, batches * self.global_batch_tokens)
            steps += self._plan_round(now, batches)
            self._carry(self._precedence(self._carried + later))
        return steps

    def _take_fresh(self) -> list[Pending]:
        """The documents this round takes in, each with the step it would have been trained in by arrival."""
        fresh: list[Pending] = []
        taken = 0
        wanted = self._tokens_wanted()
        for batch in range(self.global_batches):
            remaining = wanted - (self.global_batches - 1 - batch) * self.global_batch_tokens
            segments = self._take(remaining - taken)
            taken += sum(segment.length for segment in segments)
            fresh += self._price(segments, self._step + batch)
        return fresh

    def _plan_round(self, items: list[Pending], steps: int) -> list[StepPlan]:
        for ordered in (list, self._overdue_first):
            filled = OpenMicroBatches(steps * self.micro_batches, self.capacity)
            left_over = filled.place(ordered(items))
            if not any(self._overdue(item) for item in left_over):
                break
        self._carry(left_over)
        return self._emit_filled(self._improved(filled))

    def _emit_filled(self, filled: OpenMicroBatches) -> list[StepPlan]:
        plans = []
        for first in range(0, len(filled.members), self.micro_batches):
            members = filled.members[first : first + self.micro_batches]
            loads = filled.seconds[first : first + self.micro_batches]
            micro_batches = [
                MicroBatch(tuple([item[3] for item in held]), load) for held, load in zip(members, loads, strict=True)
            ]
            plans.append(self._emit(micro_batches, [item for held in members for item in held]))
        return plans

    def _overdue(self, item: Pending) -> bool:
        return self._step - item.arrived >= self.max_delay * self.global_batches

    def _overdue_first(self, items: list[Pending]) -> list[Pending]:
        """``items`` with the overdue ones first, oldest first; the others keep their order."""
        return sorted(items, key=lambda item: item.arrived if self._overdue(item) else math.inf)

    def _carry(self, items: list[Pending]) -> None:
        self._carried = items
        self._carried_tokens = sum(item.length for item in items)

    def _from_state(self, rows: Sequence[Sequence[int]]) -> list[Pending]:
        """Items saved by ``_to_state``, priced again."""
        priced = self._price([Segment(*row[:3]) for row in rows], 0)
        return [item._replace(arrived=row[3]) for item, row in zip(priced, rows, strict=True)]


class FixedGreedyPacker(CarryingPacker):
    """Longest document first into the lightest micro-batch with room, which holds at most a context window."""

    name = "fixed_greedy"


def _to_state(items: Iterable[Pending]) -> list[list[int]]:
    """``items`` as rows of (document, start, length, step of arrival)."""
    return [[*item.segment, item.arrived] for item in items]


def split_at(items: list[Pending], tokens: int) -> tuple[list[Pending], list[Pending]]:
    """The shortest prefix that holds at least ``tokens`` tokens, and the rest."""
    held = 0
    for count, item in enumerate(items):
        if held >= tokens:
            return items[:count], items[count:]
        held += item.length
    return items, []
