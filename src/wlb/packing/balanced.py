"""Our packer: every step trains exactly its global batch.

A step trains the documents that begin in its global batch of the stream, whole, so steps differ in tokens by less than
a document. They are grouped in one of three ways, chosen by ``wlb.simulate.decide``:

* ``level``, without a pipeline: a document goes to as few ranks as can hold it, and every rank runs its own number of
  micro-batches. The step is balanced, not each micro-batch (``wlb.packing.level``).
* ``slices``, in a pipeline: micro-batches of equal work, and slices of long documents (``wlb.packing.slices``).
* ``even``: all ranks run the same number of micro-batches of whole documents, longest first into the lightest. A
  document that costs more than the mean micro-batch makes its micro-batch heavier than the others.

A document without room is trained in the next step, which then takes in fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.packing.carrying import CarryingPacker, OpenMicroBatches, split_at
from wlb.packing.level import StagePrices, level_groups
from wlb.packing.packer import Pending
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.packing.slices import ColumnPrices, sliced_columns

_RANK_PRICES: dict[str, type] = {"level": StagePrices, "slices": ColumnPrices}  # prices that know the ranks


class BalancedPacker(CarryingPacker):
    """Micro-batches of equal workload and unequal length, none over L_max = ``max_length_factor`` windows.

    A global batch is ``global_batch`` context windows, whatever the number of micro-batches.
    """

    name = "balanced"
    prices_sharding = True
    plans_operations = True

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        options = self.options
        if self.phased and options.grouping in _RANK_PRICES:
            raise UserError(
                f"grouping = {options.grouping!r} does not support phases ({', '.join(self.phased.phases.seconds)}); "
                "use 'even'"
            )
        if options.grouping in _RANK_PRICES and not isinstance(self.workload, _RANK_PRICES[options.grouping]):
            raise UserError(
                f"grouping = {options.grouping!r} plans for the ranks of a job, which a packer alone does not know; "
                "use it in jobs that are trained or simulated"
            )
        self._ahead_tokens = 0  # tokens taken in before they were due

    @property
    def global_batch_tokens(self) -> int:
        return (self.options.global_batch or self.micro_batches) * self.context_window

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ahead_tokens": self._ahead_tokens}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._ahead_tokens = state["ahead_tokens"]

    def take_back(self, plans: Sequence[StepPlan]) -> None:
        super().take_back(plans)
        self._ahead_tokens += len(plans) * self.global_batch_tokens - sum(plan.tokens for plan in plans)

    def _tokens_wanted(self) -> int:
        return max(self._tokens_due(), self.global_batch_tokens - self._carried_tokens)

    def _tokens_due(self) -> int:
        """Tokens to take in that are due by this step; negative if more than that was already taken in."""
        return max(0, self.global_batch_tokens - self._carried_tokens) - self._ahead_tokens

    def _next_steps(self) -> list[StepPlan]:
        return self._plan_step(self._carried + self._take_fresh())

    def last_steps(self) -> list[StepPlan]:
        waiting = self._carried + self._price(self._take(self._arrived_tokens), self._step)
        left = max(1, round(_tokens(waiting) / self.global_batch_tokens))
        now, later = split_at(sorted(waiting, key=lambda item: item.arrived), -(-_tokens(waiting) // left))
        self._ahead_tokens = 0
        plans = self._plan_step(now)
        self._carry(self._carried + later)
        return plans

    def _take_fresh(self) -> list[Pending]:
        """Documents due by this step; the next one if there are none.

        A document is due in the step in whose global batch of the stream it begins.
        """
        due = self._tokens_due()
        segments = self._take(due if due > 0 or self._carried else 1)
        self._ahead_tokens = sum(segment.length for segment in segments) - due
        return self._price(segments, self._step)

    def _plan_step(self, items: list[Pending]) -> list[StepPlan]:
        """The step of ``items``; those without room are carried over."""
        if self.options.grouping == "level":
            plan, unfit = self._level_step(items)
        elif self.options.grouping == "slices":
            plan, unfit = self._sliced_step(items)
        else:
            return self._plan_round(items, 1)
        self._carry(unfit)
        return [plan]

    def _place(self, filled: OpenMicroBatches, items: list[Pending]) -> list[Pending]:
        return filled.place_past_full(items)

    def _level_step(self, items: list[Pending]) -> tuple[StepPlan, list[Pending]]:
        """A level step of ``items`` on the ranks of the stage; no document is left over."""
        assert isinstance(self.workload, StagePrices)
        groups = level_groups(
            [item.length for item in items], -(-self.max_tokens // self.workload.ranks), self.workload
        )
        micro_batches = [
            MicroBatch(tuple(items[index].segment for index in group.documents), group.seconds, group.ranks)
            for group in groups
        ]
        return self._emit(micro_batches, items), []

    def _sliced_step(self, items: list[Pending]) -> tuple[StepPlan, list[Pending]]:
        """A step of ``items`` in every pipeline, and the documents without room."""
        assert isinstance(self.workload, ColumnPrices)
        columns = self.workload.columns
        lengths = [item.length for item in items]
        planned, left = sliced_columns(lengths, self.micro_batches // columns, self.max_tokens, self.workload)
        micro_batches = []
        for column in planned:
            for held, sliced, start, stop in column:
                segments = [items[index].segment for index in held]
                if sliced >= 0:
                    document, begin, length = items[sliced].segment
                    segments.insert(0, Segment(document, begin + start, stop - start))
                continued = sliced >= 0 and stop < length
                micro_batches.append(MicroBatch(tuple(segments), 0.0, earlier=start, continued=continued))
        trained = [item for index, item in enumerate(items) if index not in set(left)]
        return self._emit(micro_batches, trained, columns), [items[index] for index in sorted(left)]


def _tokens(items: list[Pending]) -> int:
    return sum([item[0] for item in items])
