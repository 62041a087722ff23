"""From the order of documents to the plan of each step, with a state to continue from after any step.

``StepPlanner`` takes the documents of a job in their order, feeds them to a packer until it returns steps, and deals
each step to the data-parallel ranks. It needs only document lengths, so every rank runs its own planner and all get the
same plans; a simulation runs one too. A plan comes with the state after it, which holds the documents that wait in the
packer and the steps that the packer returned together with this one. Restoring takes time
proportional to what is pending.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, starmap
from typing import Any

import numpy as np

from wlb.documents.order import DocumentStream
from wlb.documents.segments import OverlongReport, Segment, split_overlong
from wlb.documents.store.reader import DocumentLengths
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.job.pipeline import with_operations
from wlb.packing.arrange import arrange
from wlb.packing.balance import balance
from wlb.packing.packer import held_segments, rows_of
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.workload.phases import segment_seconds

_MOST_DOCUMENTS = 2**20  # packed together: twice the 500-token documents in 65,536 windows of 4,096 tokens
_DOCUMENTS_AT_ONCE = 64  # at least: enough to make a call worthwhile, few enough to keep the packer's buffer small


@dataclass(frozen=True)
class PlannedStep:
    """A step dealt to data-parallel ranks, the seconds that planning took, and the state of the planner after it.

    ``documents`` are the ascending ids of the documents that the step finishes: no part of them still waits. In an
    epoch each document is finished once, however it was split. ``pending_documents`` counts documents that were taken
    in and have a part that is not planned or not handed out yet.
    """

    plan: StepPlan
    planning_seconds: float
    state: dict[str, Any]
    documents: tuple[int, ...]
    pending_documents: int


class StepPlanner(Iterator[PlannedStep]):
    """Plans the steps of ``job`` on ``documents``: lengths in a store, or in each store of a mixture.

    Ends after ``epochs`` epochs and drains the last one; with None it never ends. Documents of the next epoch follow
    those of this one into the same steps. An epoch of a mixture is over when every store has finished one. The order of
    documents begins with that of ``first_epoch``. ``whole`` is for loops that can neither run an empty micro-batch nor
    cut a document: a step with too few documents for its micro-batches then has fewer micro-batches, and a step with
    too few even for that is joined to the step before. Only ``pipeline`` (a data-parallel rank) gets operation lists;
    by default all do. Raises ``UserError`` if documents leave nothing to train on, or if a step has too many of them.
    """

    def __init__(
        self,
        job: Job,
        documents: DocumentLengths,
        *,
        epochs: int | None = None,
        first_epoch: int = 0,
        whole: bool = False,
        pipeline: int | None = None,
    ) -> None:
        self._stream = DocumentStream(documents, job.data)
        check_documents_together(job, documents)
        self._stream.begin(first_epoch)
        if job.phases is not None:
            if not isinstance(documents, np.ndarray):
                raise UserError(
                    "phases belong to the documents of one data set; give lengths, not a stream, mixture or store"
                )
            job.phases.check(len(documents))
        self._packer = job.packing.packer(
            job.step_micro_batches, job.context_window, job.packing_prices, job.stage_ranks
        )
        self._job, self._is_whole, self._pipeline = job, whole, pipeline
        self._last_epoch = None if epochs is None else first_epoch + epochs - 1
        self._emitted: deque[StepPlan] = deque()
        self._drained = False
        self._held: tuple[dict[str, Any], set[int]] | None = None

    def __next__(self) -> PlannedStep:
        started = time.perf_counter()
        plan = self._next_plan()
        if plan is None:
            raise StopIteration
        waiting, state = self._waiting_documents(), self.state_dict()
        if self._is_whole:
            whole = self._divided(plan)
            # A step that cannot stand alone joins the step before, and its state replaces that of the step before.
            while self._packs_more() and (whole is None or self._divided(self._emitted[0]) is None):
                plan = replace(plan, ranks=plan.ranks + self._emitted.popleft().ranks)
                whole, waiting, state = self._divided(plan), self._waiting_documents(), self.state_dict()
            whole = whole or self._divided(plan, limited=False)  # an odd document of a window may be left at the end
            if whole is None:
                raise UserError(
                    f"{len([*plan.segments])} documents are too few for a micro-batch on each of "
                    f"dp = {self._job.layout.pools} ranks; give more"
                )
            plan = whole
        arranged = self._arranged(plan)
        # All pieces of a document are taken in together, so a document that does not wait is finished.
        finished = set(plan.table[:, 0].tolist()) - waiting
        return PlannedStep(arranged, time.perf_counter() - started, state, tuple(sorted(finished)), len(waiting))

    def plans(self, first: int = 0) -> Iterator[StepPlan]:
        """Only the plans, without states, after skipping the next ``first``; for simulations."""
        return map(self._arranged, islice(iter(self._next_plan, None), first, None))

    @property
    def overlong(self) -> OverlongReport:
        """What became of documents over the context window, among all documents taken in."""
        return OverlongReport(**self._stream.state_dict()["overlong"])

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last plan returned, as JSON-serialisable data."""
        return {
            "stream": self._stream.state_dict(),
            "packer": self._held_by_packer()[0],
            "emitted": [plan.to_json() for plan in self._emitted],
            "drained": self._drained,
        }

    def load_state_dict(self, state: dict[str, Any], *, packed_otherwise: bool = False) -> None:
        """Continue from ``state``, which was saved on the same documents; dp and micro-batches may differ.

        Steps that were packed but not handed out stay as they are if this packer could have made them; otherwise they
        are packed again, before all later documents. With ``packed_otherwise`` (another method, or other settings)
        everything that waits is packed again, and split if it is now longer than the context window.
        """
        emitted = [StepPlan.from_json(plan) for plan in state["emitted"]]
        self._stream.load_state_dict(state["stream"])
        self._emitted.clear()
        self._drained = False
        if packed_otherwise:
            waiting, _ = split_overlong(rows_of(waiting_in(state)), self._packer.context_window)
            first, *_ = state["emitted"] or [state["packer"]]
            self._packer.begin_with(waiting, step=first["step"])
        else:
            self._packer.load_state_dict(state["packer"])
            if all(self._could_have_packed(plan) for plan in emitted):
                self._emitted.extend(emitted)
                self._drained = state["drained"]
            else:
                self._packer.take_back(emitted)
        self._held = None

    def _next_plan(self) -> StepPlan | None:
        return self._emitted.popleft() if self._packs_more() else None

    def _packs_more(self) -> bool:
        """Pack until there is another step; returns False if there is none."""
        while not self._emitted:
            if self._drained and not self._packer.pending and self._is_last_epoch:
                return False
            self._feed()
        return True

    def _divided(self, plan: StepPlan, *, limited: bool = True) -> StepPlan | None:
        """``plan`` without empty micro-batches, up to L_max if ``limited``, or else as small as can be; or None."""
        if len(plan.ranks) == 1 and all(micro_batch.segments for micro_batch in plan.micro_batches):
            return plan
        dp, prices, segments = self._job.layout.pools, self._job.packing_prices, list(plan.segments)
        seconds, lengths = segment_seconds(prices, segments), [segment.length for segment in segments]
        most, limit = len(segments) // dp * dp, self._job.max_tokens if limited else None
        for parts in (min(self._job.step_micro_batches, most), None) if limited else (most,):
            with suppress(UserError):  # raised if they do not fit
                divided = balance(lengths, parts, limit, parts_multiple_of=dp, costs=seconds)
                mine = [(tuple(segments[index] for index in part), float(seconds[part].sum())) for part in divided]
                return replace(plan, ranks=(tuple(starmap(MicroBatch, mine)),))
        return None

    @property
    def _is_last_epoch(self) -> bool:
        return self._last_epoch is not None and self._stream.epoch >= self._last_epoch

    def _feed(self) -> None:
        self._held = None
        # One round at a time: a job that continues from a state packs everything after it by its own sizes.
        if self._drained and self._packer.pending:
            self._emitted += self._packer.last_steps()
        elif steps := self._packer.next_steps():
            self._emitted += steps
        elif not self._stream.epoch_is_over:
            self._take_in(max(1, self._packer.tokens_missing))
        elif self._is_last_epoch:
            self._drained = True
        else:
            self._stream.next_epoch()
            self._drained = False

    def _take_in(self, tokens: int) -> None:
        """Take in at least ``tokens`` tokens, or all that are left of the epoch."""
        taken, documents = [], _DOCUMENTS_AT_ONCE
        while tokens > 0 and not self._stream.epoch_is_over:
            taken.append(segments := self._stream.take(documents))
            held = int(segments[:, 2].sum())
            tokens -= held
            half = tokens * documents // max(1, 2 * held)  # of what is missing
            documents = max(_DOCUMENTS_AT_ONCE, min(half, 2 * documents))  # few of the last ones may have had tokens
        self._packer.take_in(np.concatenate(taken))

    def _arranged(self, plan: StepPlan) -> StepPlan:
        job, packing = self._job, self._job.packing
        if job.plans_operations:
            return with_operations(job, plan, self._pipeline)
        plan = job.priced_as_run(plan)
        return arrange(plan, job.layout.pools, assignment=packing.assignment, order=packing.order, pipeline=job.layout)

    def _waiting_documents(self) -> set[int]:
        return self._held_by_packer()[1].union(segment.document for plan in self._emitted for segment in plan.segments)

    def _held_by_packer(self) -> tuple[dict[str, Any], set[int]]:
        """The state of the packer and the documents waiting in it; the same for all steps that it emits together."""
        if self._held is None:
            self._held = self._packer.state_dict(), {segment.document for segment in self._packer.pending}
        return self._held

    def _could_have_packed(self, plan: StepPlan) -> bool:
        fits = all(part.tokens <= self._packer.max_tokens and not part.ranks for part in plan.micro_batches)
        sliced = self._job.slices_documents
        fits &= len(plan.ranks) == (self._job.layout.pools if sliced else 1)
        fits &= sliced or not any(part.is_slice for part in plan.micro_batches)
        return fits and len(plan.micro_batches) == self._packer.micro_batches


def check_documents_together(job: Job, lengths: DocumentLengths) -> None:
    """Raise ``UserError`` if a step has so many documents that planning it would take minutes."""
    if (together := documents_together(job, lengths)) > _MOST_DOCUMENTS:
        raise UserError(
            f"{job.packing.window * job.global_batch} context windows of {job.context_window} tokens are packed "
            f"together, some {together} of these documents, over {_MOST_DOCUMENTS}; lower the global batch, "
            "packing.window or data.context_window"
        )


def documents_together(job: Job, lengths: DocumentLengths) -> int:
    """Average number of documents that are packed together: those of a step, or of ``window`` steps."""
    windows = job.packing.window * job.global_batch
    stores = lengths if isinstance(lengths, Sequence) else [lengths]
    tokens = sum(int(store.sum()) if isinstance(store, np.ndarray) else store.tokens for store in stores)
    return round(windows * job.context_window / max(1, tokens) * sum(map(len, stores)))


def waiting_in(state: dict[str, Any]) -> list[Segment]:
    """The untrained segments in the ``state`` of a planner; first those of steps that were not handed out."""
    emitted = [StepPlan.from_json(plan) for plan in state["emitted"]]
    return [*(segment for plan in emitted for segment in plan.segments), *held_segments(state["packer"])]
