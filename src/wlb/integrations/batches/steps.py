"""Steps for loops outside our trainer: the job they run, its whole steps, and the items of these.

The planner is the trainer's own (``wlb.job.planner``), and no micro-batch is empty. A state holds what decides the
plans (``WholeSteps.settings``). Other documents, or another order of them, are refused; sizes, processes and the
packing may change between steps, and what waits is then planned anew.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.documents.segments import OverlongReport
from wlb.errors import UserError
from wlb.integrations.batches.arriving import ArrivingDocuments
from wlb.job.job import Job
from wlb.job.memory.fit import fits
from wlb.job.planner import StepPlanner, waiting_in
from wlb.packing.plan import StepPlan
from wlb.simulate.decide import decide
from wlb.simulate.job import simulated_job
from wlb.workload import Hardware, ModelShape
from wlb.workload.base import DocumentPrices
from wlb.workload.phases import DocumentPhases
from wlb.workload.profile import WorkloadProfile, read_profile

Item = TypeVar("Item")
Lengths = NDArray[np.int64]

_WINDOWS = 1.5  # that a micro-batch may hold

_ORDER = ("documents", "digest of lengths", "seed", "shuffle")  # settings that a state is bound to


def balanced_job(
    lengths: Lengths | None,
    context_window: int,
    micro_batches: int,
    *,
    dp: int = 1,
    cp: int = 1,
    model: str | ModelShape | None = None,
    hardware: str | Hardware = "h100",
    profile: str | Path | WorkloadProfile | None = None,
    preset: str = "balanced",
    workload: DocumentPrices | None = None,
    seed: int = 0,
    shuffle: bool = True,
    overlong: str = "split",
    pool: int | Literal["auto"] | None = None,
    own_lists: bool = False,
    phases: DocumentPhases | None = None,
    **packing: Any,
) -> Job:
    """The job that a training loop runs: ``micro_batches`` a step on each of ``dp`` data-parallel ranks.

    A document costs what a measured ``profile`` (of ``wlb profile``) says, else what it costs ``model`` ("7b") on
    ``hardware``, or what ``workload`` says; ``phases`` are added. The model is the profile's unless given.
    Micro-batches hold one context window on average and up to L_max tokens (``max_length_factor`` windows, by default
    1.5). With ``pool`` the dp x cp ranks are grouped anew, so many together (the job's ``layout`` says how); with
    ``own_lists`` ranks run different numbers of micro-batches, and L_max is what one rank holds. ``packing`` are
    options of the packer, such as ``max_delay``. ``lengths`` None are those of a stream. Raises ``UserError`` for
    settings that no job could have, and for a profile of another model.
    """
    if own_lists:
        if cp != 1 or preset != "balanced" or pool is not None or "grouping" in packing:
            raise UserError("own_lists chooses cp, preset, pool and grouping itself; leave them out")
        if (windows := packing.get("max_length_factor", _WINDOWS)) != "auto":
            windows *= dp  # L_max is that of all ranks
        packing |= {"grouping": "level", "max_length_factor": windows}
    elif preset == "balanced" and packing.get("method", "balanced") == "balanced":
        usual = {"pool_micro_batches": micro_batches, "max_length_factor": _WINDOWS} if pool is None else {}
        packing, pool = {"grouping": "even"} | usual | packing, pool or cp
    measured = read_profile(profile) if isinstance(profile, str | Path) else profile
    packing = {"order": "pipeline"} | packing  # sorted alike on all ranks, which suits loops that run in lock step
    sizes: dict[str, Any] = {"micro_batches": micro_batches, "dp": dp, "cp": cp, "packing": packing}
    priced: dict[str, Any] = {"hardware": hardware, "profile": measured, "packed_by": workload}
    job = simulated_job(model or (measured.model if measured else "7b"), context_window, preset, **sizes, **priced)
    data = job.data.changed(seed=seed, shuffle=shuffle, overlong=overlong)
    job = replace(job, data=data, pool=pool or "auto", phases=phases)
    if lengths is None and job.pools and not own_lists and "auto" in (job.pools.size, job.pools.micro_batches):
        raise UserError("pools are chosen by the lengths of all documents; give pool and pool_micro_batches")
    decided = decide(job, np.array([], np.int64) if lengths is None else lengths, lock_step=not own_lists)
    # A loop may hold less than our trainer does: where L_max is decided by memory and nothing fits, memory is unknown.
    return decided if fits(decided) else decided.with_length_factor(job.packing.max_length_factor)


def checked_lengths(lengths: Any) -> Lengths:
    """Document lengths as an array. Raises ``UserError`` for a document that is empty."""
    array = np.asarray(lengths)
    if array.shape == (0,):
        raise UserError("there are no documents to train; give at least one")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError("lengths must be a list of whole numbers, the tokens of each document; this one is not")
    if array.min() < 1:
        raise UserError(f"document {array.argmin()} has {array.min()} tokens; leave empty documents out")
    return array.astype(np.int64)


class WholeSteps(Iterator[StepPlan]):
    """The steps of ``job`` on ``documents`` (their lengths, or a stream) over ``epochs`` epochs; None is without end.

    Document ids count over epochs: id modulo the number of documents is the index. ``settings`` are what decides the
    plans, by name, as JSON values. Raises ``UserError`` for fewer documents than data-parallel ranks.
    """

    def __init__(
        self, job: Job, documents: Lengths | ArrivingDocuments[Any], *, epochs: int | None = 1, first_epoch: int = 0
    ) -> None:
        if epochs is not None and (epochs < 1 or epochs != int(epochs)):
            raise UserError(f"epochs must be >= 1 and whole, or None for no end; got {epochs}")
        self._job, self._documents, self._epochs = job, documents, epochs
        self.settings = _settings(job, documents) | {"epochs": epochs}
        self._begin(first_epoch)

    def _begin(self, first_epoch: int) -> None:
        epochs: dict[str, Any] = {"epochs": self._epochs, "first_epoch": first_epoch}
        self.first_epoch, self._planner = first_epoch, StepPlanner(self._job, self._documents, **epochs, whole=True)
        self._before = self._planner.state_dict()  # the step that comes next
        self.finished: tuple[int, ...] = ()  # documents of which the last step trained the end

    def __next__(self) -> StepPlan:
        step = next(self._planner)
        self._before, self.finished = step.state, step.documents
        return step.plan

    def plan_by(self, job: Job) -> None:
        """Plan what follows the last step returned as ``job`` does, which differs in prices or rank speeds alone."""
        self._job, state = job, self._before
        self._begin(self.first_epoch)
        self._planner.load_state_dict(copy.deepcopy(state))
        self._before = state

    @property
    def overlong(self) -> OverlongReport:
        """What became of documents over the context window, of all that were taken in."""
        return self._planner.overlong

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last step returned, as JSON-serialisable data of the caller's own."""
        state = {"settings": self.settings, "first_epoch": self.first_epoch, "planner": self._before}
        if isinstance(self._documents, ArrivingDocuments):
            state["digest"] = self._documents.digest(_documents_taken(self._before))
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any], *, inside_step: bool = False) -> None:
        """Continue from ``state``; a stream is at its beginning. ``inside_step``: part of the next step was trained.

        Raises ``UserError`` for other documents, another order or a later epoch; inside a step for any other setting.
        """
        changed, planner = self._changed(state, inside_step), copy.deepcopy(state["planner"])
        last, epoch = state["first_epoch"] + (self._epochs or 0) - 1, planner["stream"]["epoch"]
        if isinstance(self._documents, ArrivingDocuments):
            if _documents_taken(self._planner.state_dict()):
                raise UserError("a stream is continued from its beginning; open it anew and give the state with it")
            self._documents.read_again(_documents_taken(planner), state["digest"], waiting_in(planner))
        elif self._epochs is not None and epoch > last:
            raise UserError(f"the state is in epoch {epoch + 1}, and this run ends with epoch {last + 1}; add epochs")
        self._begin(state["first_epoch"])
        packed_by = {"context_window", "overlong", "method", *self._job.packing.identity(self._job.context_window)}
        self._planner.load_state_dict(planner, packed_otherwise=bool(changed & packed_by))
        self._before = self._planner.state_dict() if changed else planner

    def _changed(self, state: Mapping[str, Any], inside_step: bool) -> set[str]:
        """Names of settings that are not those of ``state``. Raises ``UserError`` where one may not change."""
        if not isinstance(state, Mapping) or not {"settings", "first_epoch", "planner"} <= state.keys():
            raise UserError("state is not what state_dict gave; give that, or none to begin anew")
        saved, ours = state["settings"], self.settings
        changed = [name for name in {**ours, **saved} if saved.get(name) != ours.get(name)]
        for name in changed if inside_step else [name for name in changed if name in _ORDER]:
            where, remedy = ("", "begin anew") if name in _ORDER else ("inside a step ", "save after whole steps")
            values = f"{name} = {saved.get(name)!r}, this run has {ours.get(name)!r}"
            raise UserError(f"the state was saved {where}with {values}; continue with the saved one, or {remedy}")
        return set(changed)


def _documents_taken(planner: Mapping[str, Any]) -> int:
    return int(planner["stream"]["stores"][0]["cursor"])


def _settings(job: Job, documents: Lengths | ArrivingDocuments[Any]) -> dict[str, Any]:
    order: list[Any] = ["a stream", None, None, None]  # what has come of it is compared on the way
    if not isinstance(documents, ArrivingDocuments):
        lengths = hashlib.blake2b(documents.astype("<i8").tobytes(), digest_size=8).hexdigest()
        order = [len(documents), lengths, job.data.seed, job.data.shuffle]
    probes = np.unique(np.geomspace(1, job.context_window, 8).astype(np.int64))
    return {
        **dict(zip(_ORDER, order, strict=True)),
        **({} if job.phases is None else {"phases": job.phases.digest}),
        **job.packing.in_use(),
        "context_window": job.context_window,
        "overlong": job.data.overlong,
        "micro_batches": job.micro_batches_per_rank,
        "dp": job.layout.dp,
        "cp": job.layout.cp,
        "prices": [f"{seconds:.6g}" for seconds in job.packing_prices.document_seconds(probes)],
    }


class ItemsOfSteps(Iterator[Item], Generic[Item]):
    """The items of one step after another, and the state between any two: ``items`` says what those of a step are.

    ``steps`` are ``WholeSteps`` or ``PackedSteps``; ``of_step`` are the items of the step that is being taken.
    """

    def __init__(self, steps: Any, items: Callable[[Any], Sequence[Item]]) -> None:
        self.steps, self._items, self.finished = steps, items, False
        self._before = steps.state_dict()  # the step whose items are being taken
        self.of_step: Sequence[Item] = ()
        self._taken = 0  # items of the step; those of a step to come where a state was inside it

    def __next__(self) -> Item:
        if self._taken >= len(self.of_step):
            before, step = self.steps.state_dict(), next(self.steps, None)
            if step is None:
                self.finished = True
                raise StopIteration
            self._taken -= len(self.of_step)
            self._before, self.of_step = before, self._items(step)
        self._taken += 1
        return self.of_step[self._taken - 1]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last item, as JSON-serialisable data of the caller's own."""
        if self._taken < len(self.of_step):
            return {**copy.deepcopy(self._before), "taken": self._taken}
        return {**self.steps.state_dict(), "taken": self._taken - len(self.of_step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; raises ``UserError`` as ``WholeSteps.load_state_dict`` does."""
        self.steps.load_state_dict(state, inside_step=state.get("taken", 0) > 0)
        self.of_step, self._taken, self.finished = (), state.get("taken", 0), False
