"""Every step trains exactly its global batch: no document is delayed or trained early.

The documents that begin in a global batch of the stream are trained whole in its step, so steps differ in tokens by
less than a document. A micro-batch runs on a pool of ranks and holds several context windows. Documents are grouped
into micro-batches in one of three ways:

* ``even``: longest first, each into the lightest micro-batch. All come out equally dear, but for one that holds a
  document dearer than the mean micro-batch. ``max_delay`` lets such a document wait for a step in which others are as
  dear, by the rules of ``makespan``.
* ``alike``: documents of like lengths together, so that micro-batches are even in tokens. Those of short documents
  exchange no keys and values, and in those of long ones attention hides the exchange. They differ in workload, which
  costs nothing where one pool runs them one after another, and little in a pipeline that runs many of them in order.
* ``level``: a document goes to as few ranks of the pool as hold it, and every rank runs a list of micro-batches of its
  own. The step is even, not each micro-batch (``wlb.packing.level``).
"""

from __future__ import annotations

from typing import Any

from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.packing.bins import best_fit
from wlb.packing.carrying import OpenMicroBatches, Placed
from wlb.packing.level import StagePrices, level_groups
from wlb.packing.makespan import MakespanPacker
from wlb.packing.packer import Pending
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.packing.slices import ColumnPrices, sliced_columns

_FILLINGS = 8  # of micro-batches that are tried, to find how few tokens the longest one needs


class ElasticPacker(MakespanPacker):
    """Micro-batches of the documents of one global batch of the stream, even in workload or alike in lengths.

    A global batch is ``global_batch`` context windows, whatever the number of micro-batches.
    """

    name = "elastic"
    _takes_phases = False
    plans_operations = True

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._least_documents = 1  # of a step; a micro-batch may be empty, rather than train what is not due
        if self.options.grouping == "level" and not isinstance(self.workload, StagePrices):
            raise UserError(
                "grouping = 'level' plans for the ranks of a pipeline stage, which a packer alone does not have; it is "
                "for jobs that are trained or simulated"
            )

    @property
    def global_batch_tokens(self) -> int:
        return (self.options.global_batch or self.micro_batches) * self.context_window

    def _plan_step(self, due: list[Pending], early: list[Pending], *, last: bool = False) -> list[StepPlan]:
        if self.options.grouping not in ("alike", "level", "slices"):
            return super()._plan_step(due, early, last=last)
        now, later = (due, early) if due else (early[:1], early[1:])
        self._held = []
        if self.options.grouping == "level":
            self._carry(later)
            return [self._levelled(now)]
        if self.options.grouping == "slices":
            plan, unfit = self._sliced(now)
            self._carry(unfit + later)
            return [plan]
        filled, unfit, _ = self._placed(now, self._grouped)
        self._carry(unfit + later)
        return self._emit_filled(filled)

    def _levelled(self, items: list[Pending]) -> StepPlan:
        """All ``items``, on the ranks of the stage."""
        assert isinstance(self.workload, StagePrices)
        groups = level_groups([item.length for item in items], -(-self.capacity // self.workload.ranks), self.workload)
        micro_batches = [
            MicroBatch(tuple(items[index].segment for index in group.documents), group.seconds, group.ranks)
            for group in groups
        ]
        return self._emit(micro_batches, items)

    def _sliced(self, items: list[Pending]) -> tuple[StepPlan, list[Pending]]:
        """The step of ``items`` in every pipeline, and what found no room."""
        assert isinstance(self.workload, ColumnPrices)
        columns = self.workload.columns
        lengths = [item.length for item in items]
        planned, left = sliced_columns(lengths, self.micro_batches // columns, self.capacity, self.workload)
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

    def _grouped(self, items: list[Pending]) -> Placed:
        """Micro-batches by best fit in the order of ``items``, as short as they can be, and what has no room."""
        lengths = [item.length for item in items]
        low, high = max(-(-sum(lengths) // self.micro_batches), *lengths), self.capacity
        bins = best_fit(lengths, high)
        for _ in range(_FILLINGS):
            middle = (low + high) // 2
            found = best_fit(lengths, middle)
            if len(found) > self.micro_batches:
                low = middle + 1
            else:
                bins, high = found, middle
            if low >= high:
                break
        filled = OpenMicroBatches(self.micro_batches, self.capacity)
        for index, members in enumerate(bins[: self.micro_batches]):
            for member in members:
                filled.put(items[member], index)
        return filled, [items[member] for members in bins[self.micro_batches :] for member in members], []
