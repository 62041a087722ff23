"""The steps of one rank in any loop: planned, read, compared with those of the other ranks, continued from a state.

``PlannedSteps`` plans and keeps the state. ``RankSteps`` adds the tensors of this rank and the labelled tokens of all,
and plans again by measured prices. Every process plans by itself, and one with other documents would silently skip some
and train others twice. So processes compare the plan of each step, and a state knows its documents and their order.
"""

import copy
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

from wlb.documents.arriving import ArrivingDocuments
from wlb.documents.segments import OverlongReport
from wlb.documents.store.reader import DocumentLengths
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.job.planner import PlannedStep, StepPlanner, waiting_in
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.batch import AnyBatch, Batch, RankSlice
from wlb.runtime.calibration import Calibration
from wlb.runtime.collectives import gathered_rows
from wlb.runtime.loss import IGNORE_LABEL
from wlb.runtime.own_lists import names_ranks
from wlb.terminal import number_of
from wlb.token_count import check_whole

T = TypeVar("T")
Settings = Mapping[str, Mapping[str, Any]]  # JSON values by name, by kind: "order", "packing" and "others"

_STEPS_AHEAD = 2  # planned ahead of training, and as many read


def saved_settings(state: Any, kinds: Iterable[str]) -> Settings:
    """The settings in ``state``. Raises ``UserError`` if it is no result of ``PlannedSteps.state_dict``."""
    known = isinstance(state, Mapping) and {"settings", "first_epoch", "planner"} <= state.keys()
    settings: Any = state["settings"] if known else None
    if not isinstance(settings, Mapping) or not all(isinstance(settings.get(kind), Mapping) for kind in kinds):
        raise UserError("the state is no result of state_dict in this version of wlb; give one, or restart without it")
    return settings


def check_settings(
    state: Any, settings: Settings, fixed: Sequence[str], remedy: str, *, inside_step: bool = False
) -> set[str]:
    """The kinds of ``settings`` that differ from ``state``, a result of ``PlannedSteps.state_dict``.

    Raises ``UserError`` if a setting of the kinds ``fixed`` differs; inside a step, if any does.
    """
    changed = set()
    of_state: Any = saved_settings(state, settings)
    for kind, ours in settings.items():
        saved = of_state[kind]
        name, *others = [name for name in {**ours, **saved} if saved.get(name) != ours.get(name)] or [None]
        if name is not None and (kind in fixed or inside_step):
            where, remedy = ("", remedy) if kind in fixed else ("inside a step ", "save after whole steps")
            values = f"{name} = {saved.get(name)!r} and this run has {ours.get(name)!r}"
            more = f" (and {number_of(len(others), 'more setting')})" if others else ""
            raise UserError(f"the state was saved {where}with {values}{more}; continue with the saved one, or {remedy}")
        changed |= {kind} if name is not None else set()
    return changed


class PlannedSteps(Iterator[PlannedStep]):
    """The planned steps of ``job`` on ``documents`` (lengths, or a stream) over ``epochs`` epochs; None never ends.

    Document ids count over epochs: id modulo the number of documents is the index. ``check_settings`` compares
    ``settings`` with those of a state: "order" identifies documents and their order, and where "packing" changes, the
    documents that wait are packed again. ``options`` are those of ``StepPlanner``; no micro-batch is empty by default.
    """

    def __init__(
        self,
        job: Job,
        documents: DocumentLengths | ArrivingDocuments[Any],
        settings: Settings | None = None,
        *,
        epochs: int | None = 1,
        first_epoch: int = 0,
        fixed: Sequence[str] = ("order",),
        remedy: str = "restart",
        **options: Any,
    ) -> None:
        if epochs is not None:
            check_whole("epochs", epochs)
        self.job, self.settings = job, settings or {}
        self.stream = documents if isinstance(documents, ArrivingDocuments) else None
        self._documents, self._checks, self._epochs = documents, (fixed, remedy), epochs
        self._options: dict[str, Any] = {"epochs": epochs, "whole": True} | options
        self.first_epoch = first_epoch
        self.plan_by(job)

    def plan_by(self, job: Job, after: Mapping[str, Any] | None = None, changed: Iterable[str] = ()) -> None:
        """Plan the steps ``after`` this state of the planner for ``job``, which may have other prices or rank speeds.

        ``changed`` are the kinds of settings that differ since the state. Without a state it begins anew.
        """
        self._planned_for = job
        self.planner = StepPlanner(job, self._documents, first_epoch=self.first_epoch, **self._options)
        if after is not None:
            self.planner.load_state_dict(copy.deepcopy({**after}), packed_otherwise="packing" in changed)
        self.before_next: Any = self.planner.state_dict() if changed or after is None else after

    def __next__(self) -> PlannedStep:
        step = next(self.planner)
        self.before_next = step.state
        return step

    def state_dict(self, planner: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Everything needed to continue after the last returned step, as a JSON-serialisable copy.

        ``planner`` is ``PlannedStep.state`` of an earlier step, to continue after that one (``before_next``).
        """
        planner = self.before_next if planner is None else planner
        state = {"settings": self.settings, "first_epoch": self.first_epoch, "planner": planner}
        if self.stream is not None:
            state["digest"] = self.stream.digest(_documents_taken(planner))
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any], *, inside_step: bool = False) -> None:
        """Continue from ``state``; a stream must be at its beginning. ``inside_step``: part of the step was trained.

        Raises ``UserError`` as ``check_settings`` does, and for a later epoch.
        """
        changed = check_settings(state, self.settings, *self._checks, inside_step=inside_step)
        planner, first_epoch = state["planner"], state["first_epoch"]
        last, epoch = first_epoch + (self._epochs or 0) - 1, planner["stream"]["epoch"]
        if self.stream is not None:
            if _documents_taken(self.planner.state_dict()):
                raise UserError("the stream has been read from already; open it again, and give the state with it")
            self.stream.read_again(_documents_taken(planner), state["digest"], waiting_in(planner))
        elif self._epochs is not None and epoch > last:
            raise UserError(f"the state is in epoch {epoch + 1} and this run ends with epoch {last + 1}; raise epochs")
        self.first_epoch = first_epoch
        self.plan_by(self._planned_for, planner, changed)


def _documents_taken(planner: Mapping[str, Any]) -> int:
    return int(planner["stream"]["stores"][0]["cursor"])


@dataclass(frozen=True)
class RankStep(Generic[AnyBatch]):
    """The micro-batches of one rank in a step, in order, the labelled tokens of the step on all ranks, and the plan.

    Getting it took ``wait_seconds``, without the comparison with other ranks.
    """

    batches: tuple[AnyBatch, ...]
    loss_tokens: int
    planned: PlannedStep
    wait_seconds: float = 0.0

    @property
    def plan(self) -> StepPlan:
        return self.planned.plan

    def to(self, device: torch.device | str) -> Self:
        return replace(self, batches=tuple(batch.to(device) for batch in self.batches))


class RankSteps(Iterator[RankStep[AnyBatch]], Generic[AnyBatch]):
    """The steps that one rank trains: its ``share`` of ``planned``, with a state to continue after any of them.

    Args:
        planned: The steps of all ranks. Each of them makes the same ones.
        read: Reads a whole micro-batch.
        share: The part of this rank.
        calibration: Plans by the prices and, in level steps, the rank speeds that it has measured.
        ahead: Whether one thread plans and a second one reads steps before they are asked for; call ``close``.
        asked_to_end: Asked before each step. If any rank says yes, no step is returned to any, and ``ended_early``.
        state: A result of ``state_dict`` to continue from.

    With several processes, ``next`` is a collective call. Raises ``UserError`` if processes planned different steps.
    """

    def __init__(
        self,
        planned: PlannedSteps,
        read: Callable[[MicroBatch], AnyBatch],
        share: RankSlice,
        *,
        calibration: Calibration | None = None,
        ahead: bool = False,
        asked_to_end: Callable[[], bool] = lambda: False,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.job, self.share, self.calibration, self.ended_early = planned.job, share, calibration, False
        self._planned, self._read, self._asked_to_end = planned, read, asked_to_end
        self._measured: tuple[Any, Any] = (None, None)  # prices and speeds in the current plans
        self._alone = False  # whether no other process takes these steps
        self._group: dist.ProcessGroup | None = None  # of those that do
        self._ahead, self._threads = ahead, list[ThreadPoolExecutor]()
        self._begin()
        if state is not None:
            self.load_state_dict(state)

    def _begin(self) -> None:
        self._ended = False
        self._after = self._planned.before_next  # the state of the planner after the last returned step
        self._coming: Iterator[tuple[Any, ...]] = map(self._loaded, self._planned)
        if self._ahead:
            self._threads = [ThreadPoolExecutor(1, f"wlb-{work}") for work in ("planning", "reading")]
            self._coming = _ahead(map(self._loaded, _ahead(self._planned, self._threads[0])), self._threads[1])

    def __next__(self) -> RankStep[AnyBatch]:
        self._plan_by_measured()
        started = time.perf_counter()
        step, *marks = next(self._coming, (None, 0, 0, 0))
        seconds = time.perf_counter() - started
        with record_function("plan agreement"):
            share = self.share  # in level steps, ranks that share experts have the same micro-batches
            alike = share.cp_rank // share.layout.ep_ranks if self.job.levels_steps else share.dp_rank
            row = [*marks, alike, self._asked_to_end()]
            cpu = torch.device("cpu")
            rows = [row] if self._alone else gathered_rows(row, torch.int64, cpu, self._group).tolist()
        labels, plans, shards, groups, ends = zip(*rows, strict=True)
        first = {group: process for process, group in reversed([*enumerate(groups)])}
        of_group = map(first.__getitem__, groups)
        for what, made, firsts in (("steps", plans, [0] * len(rows)), ("shards", shards, of_group)):
            for process, other in enumerate(firsts):
                if made[process] != made[other]:
                    same = "give all the same documents, settings and version of wlb"
                    raise UserError(f"process {process} and process {other} planned different {what}; {same}")
        self._ended, self.ended_early = step is None, any(ends)
        if step is None or self.ended_early:
            raise StopIteration
        self._after, ranks = step.planned.state, self.share.layout.dp_cp
        loss_tokens = sum(labels) * ranks // len(rows)
        if len(rows) == 1 < ranks:  # this process trains for one of several ranks, without the others
            loss_tokens = sum(_labels(self._read(micro_batch)) for micro_batch in step.plan.micro_batches)
        if self._planned.stream is not None:
            self._planned.stream.forget(step.planned.documents)
        batches = tuple(replace(batch, loss_tokens=loss_tokens, ranks=ranks) for batch in step.batches)
        found: RankStep[AnyBatch] = replace(step, batches=batches, loss_tokens=loss_tokens, wait_seconds=seconds)
        return found

    def _loaded(self, planned: PlannedStep) -> tuple[RankStep[AnyBatch], int, int, int]:
        """The step, its labels on this rank, and marks of its plan and of the shards and operations of this rank."""
        plan, batches = planned.plan, self.share.batches(planned.plan, self._read)
        stream, of_ranks = self._planned.stream, [[(part.segments, part.ranks) for part in own] for own in plan.ranks]
        tokens = None if stream is None else [stream.marks[segment.document] for segment in plan.segments]
        # Ranks have different micro-batches of one document in level steps. Equal plans give them equal shards, without
        # prices, which two machines may round differently.
        shared = [batch.attend.shard_plan for batch in batches if batch.attend]
        of_some = names_ranks(plan)
        compared = [one for one in shared if not of_some or len(one.segment_lengths) > 1]
        shards = [[table.tolist() for table in shard_plan.pieces] for shard_plan in compared]
        marks = digest_of((plan.step, of_ranks, tokens)), digest_of((shards, plan.operations))
        return RankStep(batches, 0, planned), sum(map(_labels, batches)), *marks

    def _plan_by_measured(self) -> None:
        if (calibration := self.calibration) is not None:
            found = calibration.prices, calibration.speeds if self.job.levels_steps else None
            if found != self._measured:
                self.close()
                self._planned.plan_by(self.job.measured(*found), self._after)
                self._measured = found
                self._begin()

    @property
    def overlong(self) -> OverlongReport:
        """Counts of documents over the context window, including those read for later steps."""
        return self._planned.planner.overlong

    def plans(self) -> Iterator[StepPlan]:
        """The plans of the next steps, without taking a step; not for a stream, nor with ``ahead``."""
        return (step.plan for step in copy.deepcopy(self._planned))

    def state_dict(self, step: RankStep[AnyBatch] | None = None) -> dict[str, Any]:
        """Everything needed to continue after ``step``, as JSON-serialisable data; the same on all processes.

        By default after the last step that was taken. A loop that takes steps before it trains them gives the last one
        that it trained.
        """
        found = {} if self.calibration is None else {"calibration": copy.deepcopy(self.calibration.state_dict())}
        return self._planned.state_dict(self._after if step is None else step.planned.state) | found

    def load_state_dict(self, state: Mapping[str, Any], *, inside_step: bool = False) -> None:
        """Continue from ``state``; ``inside_step``: part of the next step was trained, so no setting may change.

        Raises ``UserError`` if that is impossible, or if a stream has been read from already.
        """
        self.close()
        self._planned.load_state_dict(state, inside_step=inside_step)
        if self.calibration is not None and "calibration" in state:
            self.calibration.load_state_dict(state["calibration"])
        self._begin()

    def close(self) -> None:
        """End the threads; safe to call twice."""
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)


def digest_of(value: object) -> int:
    """56 bits of the hash of ``repr(value)``, which fit an int64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "little")


def _labels(batch: Batch) -> int:
    return int((batch.labels != IGNORE_LABEL).sum())


def _ahead(source: Iterator[T], thread: ThreadPoolExecutor) -> Iterator[T]:
    """``source``, computed ahead of its consumer in ``thread``, which has no other work."""
    end = object()
    coming: deque[Future[Any]] = deque(thread.submit(next, source, end) for _ in range(_STEPS_AHEAD))
    while (item := coming.popleft().result()) is not end:
        coming.append(thread.submit(next, source, end))
        yield item
