"""Variable-length packing with outlier delay: Algorithm 1 of WLB-LLM (section 4.2).

The packer takes in a global batch. A document at least as long as an outlier threshold goes into the queue of the
highest threshold that it reaches. A queue releases documents in sets of N, one for every micro-batch, so all
micro-batches get outliers of about the same length. Each remaining document goes, longest first, into the lightest
micro-batch, which may grow to L_max tokens: short documents fill up what outliers leave free. A document without room
is carried over to the next step.

Two things go beyond the paper. A document that has waited ``max_delay`` steps is released alone. And a step takes in
fewer fresh documents when many are carried over, so the carry-over cannot grow without bound.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Any

from wlb.packing.carrying import CarryingPacker
from wlb.packing.packer import Pending


class VariableLengthPacker(CarryingPacker):
    """Micro-batches of equal workload and unequal length, none over L_max = ``max_length_factor`` windows."""

    name = "variable_length"

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.outlier_thresholds = self.options.thresholds(self.context_window)
        self._queues: list[deque[Pending]] = [deque() for _ in self.outlier_thresholds]

    def _admit(self, fresh: list[Pending]) -> tuple[list[Pending], list[Pending]]:
        now = self._enqueued(fresh)
        older = self._carried + self._released()
        while len(now) + len(older) < self.micro_batches and any(self._queues):  # rather than an empty micro-batch
            oldest = min(filter(None, self._queues), key=lambda queue: queue[0].arrived)
            older.append(oldest.popleft())
        return now, older

    def _enqueued(self, items: Iterable[Pending]) -> list[Pending]:
        """Queue the outliers among ``items``; returns the others."""
        below: list[Pending] = []
        for item in items:
            level = bisect_right(self.outlier_thresholds, item[0]) - 1
            (below if level < 0 else self._queues[level]).append(item)
        return below

    def _released(self) -> list[Pending]:
        """Outliers in whole sets of N, one for every micro-batch, and those that have waited long enough."""
        released: list[Pending] = []
        for queue in self._queues:
            while len(queue) >= self.micro_batches:
                released += [queue.popleft() for _ in range(self.micro_batches)]
            while queue and self._step - queue[0].arrived >= self.max_delay:
                released.append(queue.popleft())
        return released

    def _waiting(self) -> list[Pending]:
        return [item for queue in self._queues for item in queue]

    def _wait(self, items: list[Pending]) -> None:
        """Queue ``items`` by the present thresholds, oldest first; items below all thresholds are carried over."""
        self._queues = [deque() for _ in self.outlier_thresholds]
        if below := self._enqueued(sorted(items, key=lambda item: item.arrived)):
            self._carry(self._carried + below)
