"""Our packer: every step trains exactly its global batch.

A step trains the documents that begin in its global batch of the stream, whole, so steps differ in tokens by less than
a document. They are grouped in one of three ways, chosen by ``wlb.simulate.decide``; each is a pure function of the
lengths of a step:

* ``level``, without a pipeline: a document goes to as few ranks as can hold it, and every rank runs its own number of
  micro-batches. The step is balanced, not each micro-batch (``wlb.packing.level``).
* ``slices``, in a pipeline: micro-batches of equal work, and slices of long documents (``wlb.packing.slices``).
* ``even``: all ranks run the same number of micro-batches of whole documents, longest first into the lightest. A
  document that costs more than the mean micro-batch makes its micro-batch heavier than the others.

A document without room is trained in the next step, which then takes in fewer.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.lightest import into_lightest
from wlb.packing.exchanges import members_of
from wlb.packing.level import StagePrices, level_groups
from wlb.packing.packer import Packer, Table, segments_of
from wlb.packing.plan import Integers, MicroBatch, PlannedMicroBatch, StepPlan
from wlb.packing.slices import sliced_pipelines
from wlb.workload.base import Seconds
from wlb.workload.phases import PhasedPrices, segment_seconds


class BalancedPacker(Packer):
    """Micro-batches of equal workload and unequal length, none over L_max = ``max_length_factor`` windows.

    A global batch is ``global_batch`` context windows, whatever the number of micro-batches.
    """

    name = "balanced"

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        grouping = self.options.grouping
        if grouping in ("level", "slices") and isinstance(self.workload, PhasedPrices):
            named = ", ".join(self.workload.phases.seconds)
            raise UserError(f"grouping = {grouping!r} does not support phases ({named}); use 'even'")
        if grouping in ("level", "slices") and self.ranks is None:
            raise UserError(
                f"grouping = {grouping!r} plans for the ranks of a job, which a packer alone does not know; "
                "use it in jobs that are trained or simulated"
            )
        self._carried = np.empty((0, 4), np.int64)  # document, start, length, and the step in which it arrived
        self._ahead_tokens = 0  # tokens taken in before they were due

    @property
    def pending(self) -> list[Segment]:
        return segments_of(self._carried[:, :3]) + super().pending

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "carried": self._carried.tolist(), "ahead_tokens": self._ahead_tokens}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._carried = np.array(state["carried"], np.int64).reshape(-1, 4)
        self._ahead_tokens = state["ahead_tokens"]

    def _tokens_wanted(self) -> int:
        return max(self._tokens_due(), self.global_batch_tokens - _tokens(self._carried))

    def _tokens_due(self) -> int:
        """Tokens to take in that are due by this step; negative if more than that was already taken in."""
        return max(0, self.global_batch_tokens - _tokens(self._carried)) - self._ahead_tokens

    def _next_steps(self) -> list[StepPlan]:
        """The step of the documents that are due: those that begin in its global batch, or the next one if none do."""
        due = self._tokens_due()
        fresh = self._take(due if due > 0 or len(self._carried) else 1)
        self._ahead_tokens = _tokens(fresh) - due
        return [self._planned(self._waiting_with(fresh))]

    def last_steps(self) -> list[StepPlan]:
        waiting = self._waiting_with(self._take(self._arrived_tokens))
        waiting = waiting[np.argsort(waiting[:, 3], kind="stable")]
        left = max(1, round(_tokens(waiting) / self.global_batch_tokens))
        ends, share = np.cumsum(waiting[:, 2]), -(-_tokens(waiting) // left)
        now, later = np.split(waiting, [np.searchsorted(ends, share) + 1])
        self._ahead_tokens = 0
        plan = self._planned(now)
        self._carried = np.concatenate([self._carried, later])
        return [plan]

    def _waiting_with(self, fresh: Table) -> Integers:
        arrived = np.full(len(fresh), self._step)
        return np.concatenate([self._carried, np.column_stack([fresh, arrived])])

    def _planned(self, waiting: Integers) -> StepPlan:
        """The step of ``waiting``; documents without room are carried over."""
        ranks, left = self._grouped(waiting)
        segments = segments_of(waiting[:, :3])
        step = [[_micro_batch(one, segments) for one in of_rank] for of_rank in ranks]
        trained = np.ones(len(waiting), np.bool_)
        trained[left] = False
        self._carried = waiting[~trained]
        late = waiting[trained & (waiting[:, 3] < self._step)]
        return self._emit(step, zip((self._step - late[:, 3]).tolist(), late[:, 2].tolist(), strict=True))

    def _grouped(self, waiting: Integers) -> tuple[list[list[PlannedMicroBatch]], list[int]]:
        """The micro-batches of every pipeline, and the documents without room."""
        lengths, ranks, grouping = waiting[:, 2], self.ranks, self.options.grouping
        if grouping == "level" and ranks:
            stage = cast(StagePrices, self.workload)
            return [level_groups(lengths, -(-self.max_tokens // ranks.count), stage, ranks)], []
        if grouping == "slices" and ranks:
            count = self.micro_batches // ranks.pipelines
            return sliced_pipelines(lengths, ranks.pipelines, count, self.max_tokens, self.workload)
        seconds = segment_seconds(self.workload, waiting[:, :3])
        falling = np.argsort(-lengths, kind="stable")
        planned, left = self._evenly(falling, lengths, seconds)
        if left:  # then the oldest go first
            planned, left = self._evenly(falling[np.argsort(waiting[falling, 3], kind="stable")], lengths, seconds)
        return [planned], left

    def _evenly(
        self, order: Integers, lengths: Integers, seconds: Seconds
    ) -> tuple[list[PlannedMicroBatch], list[int]]:
        """Whole documents in ``order``, each into the lightest micro-batch with room, and those without room."""
        loads, rooms = [0.0] * self.micro_batches, [self.max_tokens] * self.micro_batches
        owners = into_lightest(lengths[order].tolist(), seconds[order].tolist(), loads, rooms)
        filled = zip(members_of(order, owners, self.micro_batches), loads, strict=True)
        return [PlannedMicroBatch(tuple(mine.tolist()), load) for mine, load in filled], order[owners < 0].tolist()


def _micro_batch(one: PlannedMicroBatch, segments: Sequence[Segment]) -> MicroBatch:
    mine = [segments[document] for document in one.documents]
    if one.sliced < 0:
        return MicroBatch(tuple(mine), one.seconds, one.ranks)
    document, begin, length = segments[one.sliced]
    sliced = Segment(document, begin + one.start, one.stop - one.start)
    return MicroBatch((sliced, *mine), one.seconds, earlier=one.start, continued=one.stop < length)


def _tokens(table: Integers) -> int:
    return int(table[:, 2].sum())
