"""The packing methods under comparison, ours and others', behind one function: documents in, measured step plans out.

Ours take documents from a stream and decide themselves which step trains which. The peers partition the documents of
one global batch, so they are given the stream cut into global batches, each the longest run of arrivals that holds at
most N context windows; what they return is one step. All results are priced with the same workload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parts.measurement import CpuTimer
from parts.packing.peers import Peer
from parts.streams import batched
from wlb.documents.segments import Segment
from wlb.packing import make_packer
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.packing.statistics import PackingStatistics
from wlb.packing.tuning import Trial
from wlb.packing.variable_length import default_thresholds
from wlb.workload import Workload

_DOCUMENTS_AT_ONCE = 64  # as the training loop feeds its packer


@dataclass(frozen=True)
class Setting:
    """``micro_batches`` is N over all data-parallel ranks; ``context_window`` is in tokens."""

    micro_batches: int
    context_window: int
    workload: Workload

    @property
    def global_batch_tokens(self) -> int:
        return self.micro_batches * self.context_window


class Outcome:
    """Running account of one method on one stream of documents; plans are not kept, as in training.

    ``planning_seconds`` is the CPU time of the complete steps. ``trained_tokens`` counts the tokens of every document
    in any step, the drained tail included.
    """

    def __init__(self, documents: int) -> None:
        self.statistics = PackingStatistics()
        self.planning_seconds = 0.0
        self.micro_batches = 0
        self.longest_micro_batch = 0
        self.trained_tokens = np.zeros(documents, np.int64)

    @property
    def planning_ms_per_step(self) -> float:
        return 1000 * self.planning_seconds / max(1, self.statistics.steps)

    def add(self, steps: Sequence[StepPlan]) -> None:
        """Take in complete steps."""
        self.statistics.add(steps)
        for step in steps:
            self.micro_batches += len(step.micro_batches)
            self.longest_micro_batch = max(self.longest_micro_batch, *(m.tokens for m in step.micro_batches))
        self.add_tail(steps)

    def add_tail(self, steps: Sequence[StepPlan]) -> None:
        """Take in the last steps of the stream, which are not full and count for nothing but completeness."""
        for step in steps:
            documents, _, lengths = np.array(list(step.segments)).T
            np.add.at(self.trained_tokens, documents, lengths)


Method = Callable[[NDArray[np.int64], Setting], Outcome]


@dataclass(frozen=True)
class OurMethod:
    """One of the project's packers with its options."""

    packer: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, lengths: NDArray[np.int64], setting: Setting) -> Outcome:
        packer = make_packer(
            self.packer,
            micro_batches=setting.micro_batches,
            context_window=setting.context_window,
            workload=setting.workload,
            **self.options,
        )
        outcome = Outcome(len(lengths))
        timed = CpuTimer()
        for documents in batched(lengths, _DOCUMENTS_AT_ONCE):
            outcome.add(timed(packer.plan, documents))
        outcome.planning_seconds = timed.seconds
        outcome.add_tail(packer.drain())
        return outcome


@dataclass(frozen=True)
class PeerMethod:
    """A peer, called once for each global batch; converting to and from its data types is not timed."""

    peer: Peer

    def __call__(self, lengths: NDArray[np.int64], setting: Setting) -> Outcome:
        outcome = Outcome(len(lengths))
        timed = CpuTimer()
        batches = global_batches(lengths, setting.global_batch_tokens)
        for number, documents in enumerate(batches):
            outcome.planning_seconds = timed.seconds  # without the last global batch, which is not full
            step = self._step(number, documents, setting, timed)
            (outcome.add if number + 1 < len(batches) else outcome.add_tail)([step])
        return outcome

    def _step(self, number: int, documents: list[Segment], setting: Setting, timed: CpuTimer) -> StepPlan:
        lengths = [document.length for document in documents]
        seconds = setting.workload.document_seconds(lengths).tolist()
        prepared = self.peer.prepare(lengths, seconds, setting.micro_batches, setting.context_window)
        micro_batches = (
            MicroBatch(tuple(documents[index] for index in group), sum(seconds[index] for index in group))
            for group in self.peer.read(timed(self.peer.partition, prepared))
        )
        return StepPlan(number, (tuple(micro_batches),))


def our_methods() -> dict[str, OurMethod]:
    """Every packer that plans fast, by the label of its row; options that depend on the window are left open."""
    methods = {"sequential (plain-4D)": OurMethod("sequential")}
    for window in (1, 2, 4, 8):
        methods[f"fixed_greedy, window {window}"] = OurMethod("fixed_greedy", {"window": window})
    return methods


def variable_length_methods(context_window: int) -> dict[str, OurMethod]:
    """variable_length at L_max 1.5 windows with 0 to 3 queues, as in the paper and with early release."""
    methods = {"variable_length, 0 queues": OurMethod("variable_length", {"outlier_thresholds": ()})}
    for queues in (1, 2, 3):
        for early_release, suffix in ((False, "Algorithm 1"), (True, "early release")):
            options = {
                "outlier_thresholds": default_thresholds(context_window, queues),
                "early_release": early_release,
            }
            label = f"variable_length, {queues} queue{'s' * (queues > 1)}, {suffix}"
            methods[label] = OurMethod("variable_length", options)
    methods["variable_length, auto (searches included)"] = OurMethod("variable_length", {"outlier_thresholds": "auto"})
    return methods


def tuned_method(trial: Trial) -> OurMethod:
    """variable_length with the setting of a trial."""
    options = {
        "outlier_thresholds": trial.outlier_thresholds,
        "max_length_factor": trial.max_length_factor,
    }
    return OurMethod("variable_length", options)


def global_batches(lengths: NDArray[np.int64], tokens: int) -> list[list[Segment]]:
    """Runs of consecutive documents that hold at most ``tokens`` tokens, each as long as can be."""
    batches: list[list[Segment]] = []
    room = 0
    for document, length in enumerate(lengths.tolist()):
        if length > room or not batches:
            batches.append([])
            room = tokens
        batches[-1].append(Segment(document, 0, length))
        room -= length
    return batches
