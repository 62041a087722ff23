"""Our packer: every step trains exactly its global batch, unless documents are allowed to wait.

A step trains the documents that begin in its global batch of the stream, whole, so steps differ in tokens by less than
a document. They are grouped in one of three ways, chosen by ``wlb.simulate.decide``:

* ``level``, without a pipeline: a document goes to as few ranks as can hold it, and every rank runs its own number of
  micro-batches. The step is balanced, not each micro-batch (``wlb.packing.level``).
* ``slices``, in a pipeline: micro-batches of equal work, and slices of long documents (``wlb.packing.slices``).
* ``even``: all ranks run the same number of micro-batches of whole documents, longest first into the lightest. A
  document that costs more than the mean micro-batch makes its micro-batch heavier than the others.

With ``max_delay`` a document may wait up to that many steps. In each step ``even`` chooses which of the waiting long
documents to train, and weighs the imbalance against the price of waiting (``wlb.packing.release``). It also looks ahead
into the next global batch: early documents may fill up a step that a long document made heavy. Training a document
early is no delay, and the next step is smaller. Released documents are placed longest first, short ones only up to the
heaviest micro-batch; due documents that would make the step longer wait. A document that has waited ``max_delay`` steps
is trained before all others, whatever it costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any

from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.packing.carrying import CarryingPacker, OpenMicroBatches, Placed, split_at
from wlb.packing.level import StagePrices, level_groups
from wlb.packing.packer import Pending
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.packing.release import Fluid, Offer, Outlier, StepRules, choose
from wlb.packing.slices import ColumnPrices, sliced_columns

_OUTLIER_SHARE = 8  # documents of at least 1/8 context window are considered one by one
_RANK_PRICES: dict[str, type] = {"level": StagePrices, "slices": ColumnPrices}  # prices that know the ranks


class BalancedPacker(CarryingPacker):
    """Micro-batches of equal workload and unequal length, none over L_max = ``max_length_factor`` windows.

    A global batch is ``global_batch`` context windows, whatever the number of micro-batches. If documents may wait, a
    step trains between 1 - ``token_spread`` and 1 + ``token_spread`` global batches, or more if overdue documents
    require it; the mean is one.
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
        self._lookahead_tokens = int(options.lookahead * self.global_batch_tokens)
        spread = int(options.token_spread * self.global_batch_tokens)
        self._rules = StepRules(
            self.micro_batches,
            self.max_tokens,
            least=self.global_batch_tokens - spread,
            most=self.global_batch_tokens + spread,
            batch=self.global_batch_tokens,
            delay_price=options.delay_price,
            fluid_may_wait=self.max_delay > 0,
        )
        self._outlier_tokens = max(1, self.context_window // _OUTLIER_SHARE)
        self._held: list[Pending] = []  # outliers that the last step held back
        self._ahead_tokens = 0  # tokens taken in before they were due

    @property
    def global_batch_tokens(self) -> int:
        return (self.options.global_batch or self.micro_batches) * self.context_window

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ahead_tokens": self._ahead_tokens}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._ahead_tokens = state["ahead_tokens"]

    def _waiting(self) -> list[Pending]:
        return self._held

    def _wait(self, items: list[Pending]) -> None:
        self._held = items

    def take_back(self, plans: Sequence[StepPlan]) -> None:
        super().take_back(plans)
        self._ahead_tokens += len(plans) * self.global_batch_tokens - sum(plan.tokens for plan in plans)

    def _tokens_wanted(self) -> int:
        whole_step = self.global_batch_tokens - self._carried_tokens - _tokens(self._held)
        return max(self._tokens_due() + self._lookahead_tokens, whole_step)

    def _tokens_due(self) -> int:
        """Tokens to take in that are due by this step; negative if more than that was already taken in."""
        unfit = _tokens(item for item in self._carried if item.arrived < self._step)
        return max(0, self.global_batch_tokens - unfit) - self._ahead_tokens

    def _next_steps(self) -> list[StepPlan]:
        items = self._held + self._carried + self._take_fresh()
        due = [item for item in items if item.arrived <= self._step]
        early = [item for item in items if item.arrived > self._step]
        return self._plan_step(due, early)

    def last_steps(self) -> list[StepPlan]:
        waiting = self._held + self._carried + self._price(self._take(self._arrived_tokens), self._step)
        tokens = _tokens(waiting)
        left = max(1, round(tokens / self.global_batch_tokens))
        due, later = split_at(sorted(waiting, key=lambda item: item.arrived), -(-tokens // left))
        self._ahead_tokens = 0
        return self._plan_step(due, later, last=left == 1)

    def _take_fresh(self) -> list[Pending]:
        """Documents due by this step, those to look ahead at, and more if micro-batches would stay empty.

        A document is due in the step in whose global batch of the stream it begins.
        """
        due = self._tokens_due()
        fresh = self._price(self._take(due), self._step)
        taken = _tokens(fresh)
        fresh += self._price(self._take(due + self._lookahead_tokens - taken), self._step + 1)
        taken = _tokens(fresh)
        while self._arrived and not (self._held or self._carried or fresh):
            global_batches_ahead = (taken - due) // self.global_batch_tokens
            fresh += self._price(self._take(1), self._step + 1 + global_batches_ahead)
            taken += fresh[-1].length
        self._ahead_tokens = taken - due
        return fresh

    def _plan_step(self, due: list[Pending], early: list[Pending], *, last: bool = False) -> list[StepPlan]:
        """A step of the ``due`` documents, except those held back, and of ``early`` documents that help."""
        if self.options.grouping in _RANK_PRICES:
            now, later = (due, early) if due else (early[:1], early[1:])
            self._held = []
            plan, unfit = self._level_step(now) if self.options.grouping == "level" else self._sliced_step(now)
            self._carry(unfit + later)
            return [plan]
        outliers = self._outliers(due, early, last=last)
        short, spare = ([item for item in items if item.length < self._outlier_tokens] for items in (due, early))
        aim = min(max(_tokens(due), self._rules.least), self.global_batch_tokens)
        choice = choose(Offer(outliers, _fluid(short), _fluid(spare), aim, self._rules))
        items = [outlier.item for outlier in compress(outliers, choice.released)] + short
        tokens, taken = _tokens(items), 0
        while taken < len(spare) and tokens < max(1, aim):
            tokens += spare[taken].length
            taken += 1
        filled, unfit, over_limit = self._placed(items + spare[:taken], partial(self._place_within, choice.limit))
        now, later = split_at(spare[taken:], max(0, self._rules.most - sum(map(_tokens, filled.members))))
        later = filled.place_within(now, max(filled.seconds)) + later
        left = [outlier for outlier, released in zip(outliers, choice.released, strict=True) if not released]
        self._held = [outlier.item for outlier in left if outlier.due]
        self._held += [item for item in over_limit if item.arrived <= self._step]
        put_off = [outlier.item for outlier in left if not outlier.due]
        put_off += [item for item in over_limit if item.arrived > self._step]
        self._carry(unfit + put_off + later)
        return self._emit_filled(filled)

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

    def _outliers(self, due: list[Pending], early: list[Pending], *, last: bool) -> list[Outlier]:
        """The long documents, most expensive first; among equals, those that are not due and may be held first."""
        outliers = [
            Outlier(item, is_due, is_due and (last or self._overdue(item)))
            for items, is_due in ((due, True), (early, False))
            for item in items
            if item.length >= self._outlier_tokens
        ]
        return sorted(outliers, key=lambda outlier: (-outlier.item.seconds, outlier.due))

    def _place_within(self, limit: float, items: list[Pending]) -> Placed:
        """Micro-batches, documents without room, and short documents that would exceed ``limit`` seconds."""

        def may_wait(item: Pending) -> bool:
            return limit < math.inf and item.length < self._outlier_tokens and not self._overdue(item)

        filled = OpenMicroBatches(self.micro_batches, self.max_tokens)
        unfit = filled.place_within([item for item in items if not may_wait(item)], math.inf)
        return filled, unfit, filled.place_within([item for item in items if may_wait(item)], limit)


def _fluid(items: list[Pending]) -> Fluid:
    return Fluid(_tokens(items), math.fsum([item.seconds for item in items]), len(items))


def _tokens(items: Iterable[Pending]) -> int:
    return sum([item[0] for item in items])
