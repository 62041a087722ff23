"""Variable-length packing with outlier delay: Algorithm 1 of WLB-LLM (section 4.2).

A global batch comes in. Documents at least as long as an outlier threshold go into the queue of the highest threshold
they reach; a queue that holds N documents releases N, and N more while it can, so that every micro-batch of the step
gets as many of about equal length. The rest is placed longest first into the lightest micro-batch, which may grow to
L_max tokens: short documents fill up what outliers leave free. What fits nowhere is carried over to the next step.

Three things go past the paper. A waiting outlier that this step can balance anyway is released early, where it fits
beside the step's other outliers without becoming the heaviest micro-batch (``early_release = False`` is the paper's
algorithm). A document that has waited ``max_delay`` steps is released alone. And a step takes in fewer fresh documents
when many are carried over, so the carry-over cannot grow without bound.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heapreplace
from operator import attrgetter
from typing import Any

from wlb.packing.carrying import CarryingPacker
from wlb.packing.packer import Pending
from wlb.packing.placement import OpenMicroBatches, longest_first

_arrived = attrgetter("arrived")


class VariableLengthPacker(CarryingPacker):
    """Micro-batches of equal workload and unequal length, none over L_max = ``max_length_factor`` windows.

    Thresholds stay as they are; ``wlb.packing.tuning.TunedVariableLengthPacker`` knows "auto".
    """

    name = "variable_length"

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.outlier_thresholds = self.options.thresholds(self.context_window)
        self._queues: list[deque[Pending]] = [deque() for _ in self.outlier_thresholds]

    def _admit(self, fresh: list[Pending]) -> tuple[list[Pending], list[Pending]]:
        now = self._enqueued(fresh)
        older = self._carried + self._released()
        if self.options.early_release:
            older += self._released_early(now + older)
        idle = self.micro_batches - len(now) - len(older)  # micro-batches, where all that came waits in queues
        return now, older + self._dequeued(self._oldest_first()[: max(0, idle)])

    def _enqueued(self, items: Iterable[Pending]) -> list[Pending]:
        """Queue the outliers among ``items``; returns the others."""
        below: list[Pending] = []
        for item in items:
            level = bisect_right(self.outlier_thresholds, item[0]) - 1
            (below if level < 0 else self._queues[level]).append(item)
        return below

    def _released(self) -> list[Pending]:
        """Outliers that fill whole sets of N, one to a micro-batch, or that have waited long enough."""
        released: list[Pending] = []
        for queue in self._queues:
            while len(queue) >= self.micro_batches:
                released += [queue.popleft() for _ in range(self.micro_batches)]
            while queue and self._step - queue[0].arrived >= self.max_delay:
                released.append(queue.popleft())
        return released

    def _released_early(self, items: list[Pending]) -> list[Pending]:
        """Outliers that may join ``items`` without making a micro-batch heavier than it or the mean would be anyway."""
        waiting = self._oldest_first()
        if not waiting:
            return []
        outliers = OpenMicroBatches(self.micro_batches, self.capacity)
        outliers.place(longest_first(item for item in items if item[0] >= self.outlier_thresholds[0]))
        lightest = [(seconds, index) for index, seconds in enumerate(outliers.seconds)]
        heapify(lightest)
        heaviest = max(outliers.seconds)
        # Exact, as the built-in sum rounds differently from Python 3.12 on, and machines must plan alike.
        total = math.fsum([item[1] for item in items])
        released: list[Pending] = []
        for item in waiting:
            load, index = lightest[0]
            seconds, tokens = load + item.seconds, outliers.tokens[index] + item.held
            if seconds <= max(heaviest, (total + item.seconds) / self.micro_batches) and tokens <= self.capacity:
                heapreplace(lightest, (seconds, index))
                outliers.tokens[index] = tokens
                heaviest = max(heaviest, seconds)
                total += item.seconds
                released.append(item)
        return self._dequeued(released)

    def _waiting(self) -> list[Pending]:
        return [item for queue in self._queues for item in queue]

    def _wait(self, items: list[Pending]) -> None:
        """Queue ``items`` by the present thresholds, oldest first; items below all of them are carried over."""
        self._queues = [deque() for _ in self.outlier_thresholds]
        if below := self._enqueued(sorted(items, key=_arrived)):
            self._carry(self._carried + below)

    def _oldest_first(self) -> list[Pending]:
        return sorted(self._waiting(), key=_arrived)

    def _dequeued(self, items: list[Pending]) -> list[Pending]:
        """``items``, after taking them out of their queues."""
        if items:
            gone = set(map(id, items))  # not by value: the same segment may have been given twice
            self._queues = [deque(item for item in queue if id(item) not in gone) for queue in self._queues]
        return items
