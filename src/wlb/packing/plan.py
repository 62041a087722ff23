"""The plan of one optimizer step, as plain data.

A ``StepPlan`` holds, for every data-parallel rank, its micro-batches in the order in which they enter the
pipeline; a ``MicroBatch`` holds segments. Plans compare with ``==`` and survive a round trip through JSON.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from wlb.documents.segments import Segment
from wlb.schedules.operations import Operation, RankOperations

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Segments that go through the model together; attention never crosses from one to another.

    ``workload`` is the predicted time of its context-parallel group in seconds, forward and backward, over all layers;
    ``forward`` is the part of the forward, if known. ``ranks`` are the ranks of the group that run it, ascending; empty
    if all do.

    The first segment may be a slice of a longer one, whose other slices are in neighbouring micro-batches of the same
    pipeline. It then also attends the ``earlier`` tokens of the slices before it, and ``continued`` says that another
    slice follows. Slices go forward in order and backward in reverse.
    """

    segments: tuple[Segment, ...]
    workload: float
    ranks: tuple[int, ...] = ()
    forward: float | None = None
    earlier: int = 0
    continued: bool = False

    @property
    def is_slice(self) -> bool:
        """Whether the first segment is a slice."""
        return self.earlier > 0 or self.continued

    @property
    def whole_segments(self) -> tuple[Segment, ...]:
        """The segments that end in this micro-batch; a sliced one counts from its first token."""
        if not self.is_slice:
            return self.segments
        (document, start, length), *others = self.segments
        whole = Segment(document, start - self.earlier, length + self.earlier)
        return tuple(others) if self.continued else (whole, *others)

    @property
    def tokens(self) -> int:
        return sum(segment.length for segment in self.segments)

    @property
    def lengths(self) -> list[int]:
        return [segment.length for segment in self.segments]

    def to_json(self) -> dict[str, Any]:
        more: dict[str, Any] = {"ranks": list(self.ranks)} if self.ranks else {}
        if self.forward is not None:
            more["forward"] = self.forward
        if self.is_slice:
            more |= {"earlier": self.earlier, "continued": self.continued}
        return {"segments": [list(segment) for segment in self.segments], "workload": self.workload} | more

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        segments = tuple(Segment(*segment) for segment in data["segments"])
        more = {name: data[name] for name in ("forward", "earlier", "continued") if name in data}
        return cls(segments, data["workload"], tuple(data.get("ranks", ())), **more)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: ``ranks[d][i]`` is the i-th micro-batch of data-parallel rank d.

    If micro-batches name the context-parallel ranks that run them, each rank runs its own in this order. A packer emits
    all micro-batches on one rank; ``wlb.packing.arrange`` deals them to several.
    ``delay_token_steps`` is the sum over tokens of the steps that each waited since its document arrived;
    ``longest_delay`` is the longest wait.

    ``operations[d][p]`` is the list of operations of pipeline rank p of data-parallel rank d; empty if the pipeline
    runs a named schedule.
    """

    step: int
    ranks: tuple[tuple[MicroBatch, ...], ...]
    delay_token_steps: int = 0
    longest_delay: int = 0
    operations: tuple[RankOperations, ...] = ()

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """All micro-batches of the step, rank after rank."""
        return tuple(micro_batch for rank in self.ranks for micro_batch in rank)

    @property
    def segments(self) -> Iterator[Segment]:
        """All segments of the step, rank after rank; the slices of a segment count once, where the last one is."""
        return (segment for micro_batch in self.micro_batches for segment in micro_batch.whole_segments)

    @property
    def table(self) -> Integers:
        """The segments as an array of shape (segments, 3): document, start, length."""
        return np.fromiter(chain.from_iterable(self.segments), np.int64).reshape(-1, 3)

    @property
    def tokens(self) -> int:
        return sum(segment.length for segment in self.segments)

    @property
    def imbalance(self) -> float:
        """Largest over mean workload; 1.0 is perfect balance (an empty step counts as 1.0).

        Of micro-batches; or, if these name their ranks, of the work of each rank in the whole step.
        """
        if any(micro_batch.ranks for micro_batch in self.micro_batches):
            return self.slowest_rank
        return _largest_over_mean([micro_batch.workload for micro_batch in self.micro_batches])

    @property
    def slowest_rank(self) -> float:
        """Largest over mean workload of ranks in the whole step: data-parallel ranks, or the ranks that are named."""
        of_ranks: Counter[int] = Counter(dict.fromkeys(range(len(self.ranks)), 0))
        for index, rank in enumerate(self.ranks):
            for micro_batch in rank:
                of_ranks.update(dict.fromkeys(micro_batch.ranks or (index,), micro_batch.workload))
        return _largest_over_mean([of_ranks[rank] for rank in range(max(of_ranks, default=0) + 1)])

    def to_json(self) -> dict[str, Any]:
        plan = {
            "step": self.step,
            "ranks": [[micro_batch.to_json() for micro_batch in rank] for rank in self.ranks],
            "delay_token_steps": self.delay_token_steps,
            "longest_delay": self.longest_delay,
        }
        if self.operations:
            plan["operations"] = [[[[*one] for one in of_rank] for of_rank in ranks] for ranks in self.operations]
        return plan

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        ranks = tuple(tuple(map(MicroBatch.from_json, rank)) for rank in data["ranks"])
        listed = data.get("operations", ())
        operations = tuple(tuple(tuple(starmap(Operation, of_rank)) for of_rank in pipeline) for pipeline in listed)
        return cls(data["step"], ranks, data["delay_token_steps"], data["longest_delay"], operations)


class PlannedMicroBatch(NamedTuple):
    """A micro-batch: the numbers of whole ``documents`` of a step, and possibly a slice of a longer one.

    ``seconds`` are predicted, on ranks of speed 1. ``ranks`` run it; empty if all do. The slice is tokens ``start`` to
    ``stop`` of document ``sliced``; other micro-batches hold the rest. -1 is no slice.
    """

    documents: tuple[int, ...]
    seconds: float = 0.0
    ranks: tuple[int, ...] = ()
    sliced: int = -1
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class StageRanks:
    """The ``count`` ranks that hold one pipeline stage of each of ``pipelines`` pipelines, ``per_node`` on a node.

    ``per_node`` divides ``count``. A rank of speed 1 runs as priced, and one of 0.9 is 10% slow; None means all are 1.
    If ranks share experts, ``together`` of them count as one.
    """

    count: int = 1
    per_node: int = 1
    pipelines: int = 1
    speeds: tuple[float, ...] | None = None
    together: int = 1

    def of_groups(self, groups: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of these groups of ``together`` ranks."""
        return tuple(rank * self.together + one for rank in groups for one in range(self.together))


def _largest_over_mean(workloads: list[float]) -> float:
    total = sum(workloads)
    return max(workloads) * len(workloads) / total if total else 1.0
