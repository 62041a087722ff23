"""Steps for loops outside our trainer: the job, its whole steps, and the items of a step.

The planner is that of our trainer (``wlb.job.planner``), and no micro-batch is empty. A state holds the settings of the
plans (``WholeSteps.settings``). Documents and their order must stay; other settings may change between steps.
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
from wlb.integrations.batches.processes import check_whole
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

_WINDOWS = 1.5  # context windows that fit into a micro-batch

# Settings that must equal those of a state.
_ORDER = ("documents", "digest of lengths", "digest of tokens", "seed", "shuffle")


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

    Documents are priced by ``workload``, by a measured ``profile`` (of ``wlb profile``), or by ``model`` (that of the
    profile, or "7b") on ``hardware``; ``phases`` are added. Micro-batches hold one context window on average and up to
    L_max tokens (``max_length_factor`` windows, by default 1.5). ``pool`` regroups the dp x cp ranks into pools of so
    many. With ``own_lists`` ranks run different numbers of micro-batches, and one rank holds L_max tokens. ``packing``
    has options of the packer. ``lengths`` is None for a stream. Raises ``UserError`` for impossible settings.
    """
    check_whole("micro_batches", micro_batches)
    if own_lists:
        if cp != 1 or preset != "balanced" or pool is not None or "grouping" in packing:
            raise UserError("own_lists chooses cp, preset, pool and grouping itself; leave them out")
        if (windows := packing.get("max_length_factor", _WINDOWS)) != "auto":
            windows *= dp  # L_max of all ranks together
        packing |= {"grouping": "level", "max_length_factor": windows}
    elif preset == "balanced" and packing.get("method", "balanced") == "balanced":
        usual = {"rank_micro_batches": micro_batches, "max_length_factor": _WINDOWS} if pool is None else {}
        packing, pool = {"grouping": "even"} | usual | packing, pool or cp
    if isinstance(pool, int) and (pool < 1 or dp * cp % pool):
        raise UserError(f"pool = {pool} does not divide the dp x cp = {dp * cp} ranks; give a divisor")
    measured = read_profile(profile) if isinstance(profile, str | Path) else profile
    packing = {"order": "pipeline"} | packing  # the same on all ranks, for loops that synchronise in micro-batches
    sizes: dict[str, Any] = {"micro_batches": micro_batches, "dp": dp, "cp": cp, "packing": packing}
    priced: dict[str, Any] = {"hardware": hardware, "profile": measured, "packed_by": workload}
    job = simulated_job(model or (measured.model if measured else "7b"), context_window, preset, **sizes, **priced)
    data = job.data.changed(seed=seed, shuffle=shuffle, overlong=overlong)
    layout = replace(job.layout, pool=None if pool == "auto" else pool)
    job = replace(job, data=data, layout=layout, phases=phases)
    undecided = layout.pool is None or job.packing.rank_micro_batches == "auto"
    if lengths is None and job.packing.is_balanced and not own_lists and undecided:
        raise UserError("a stream has no lengths to choose pools by; give pool and rank_micro_batches")
    decided = decide(job, np.array([], np.int64) if lengths is None else lengths, lock_step=not own_lists)
    # A loop may need less memory than our trainer: if nothing fits, memory cannot decide L_max.
    return decided if fits(decided) else decided.with_length_factor(job.packing.max_length_factor)


def checked_lengths(lengths: Any) -> Lengths:
    """Document lengths as an array. Raises ``UserError`` for other types, no documents, and empty documents."""
    array = np.asarray(lengths)
    if array.shape == (0,):
        raise UserError("there are no documents to train; give at least one")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        kind = f"{array.ndim}-dimensional of {array.dtype}"
        raise UserError(f"lengths are {kind}; give a list of whole numbers of tokens")
    if array.min() < 1:
        raise UserError(f"document {array.argmin()} has {array.min()} tokens; leave empty documents out")
    return array.astype(np.int64)


class WholeSteps(Iterator[StepPlan]):
    """The steps of ``job`` on ``documents`` (their lengths, or a stream) over ``epochs`` epochs; None never ends.

    Document ids count over epochs: id modulo the number of documents is the index. ``settings`` has everything that
    decides the plans, as JSON values by name, and ``tokens``, a digest of token ids. Raises ``UserError`` for fewer
    documents than data-parallel ranks.
    """

    def __init__(
        self,
        job: Job,
        documents: Lengths | ArrivingDocuments[Any],
        *,
        tokens: str | None = None,
        epochs: int | None = 1,
        first_epoch: int = 0,
    ) -> None:
        if epochs is not None:
            check_whole("epochs", epochs)
        self._job, self._documents, self._epochs = job, documents, epochs
        self.settings = _settings(job, documents, tokens) | {"epochs": epochs}
        self._begin(first_epoch)

    def _begin(self, first_epoch: int) -> None:
        epochs: dict[str, Any] = {"epochs": self._epochs, "first_epoch": first_epoch}
        self.first_epoch, self._planner = first_epoch, StepPlanner(self._job, self._documents, **epochs, whole=True)
        self.before_next = self._planner.state_dict()  # before the next step
        self.finished: tuple[int, ...] = ()  # documents whose last tokens were in the last step

    def __next__(self) -> StepPlan:
        step = next(self._planner)
        self.before_next, self.finished = step.state, step.documents
        return step.plan

    def plan_by(self, job: Job) -> None:
        """Plan the steps after the last returned one for ``job``, which differs only in prices or rank speeds."""
        self._job, state = job, self.before_next
        self._begin(self.first_epoch)
        self._planner.load_state_dict(copy.deepcopy(state))
        self.before_next = state

    @property
    def overlong(self) -> OverlongReport:
        """Counts of documents over the context window, among all documents read so far."""
        return self._planner.overlong

    def state_dict(self, planner: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Everything needed to continue after the last returned step, as a JSON-serialisable copy.

        ``planner`` is what ``before_next`` was after an earlier step, to continue after that one.
        """
        planner = self.before_next if planner is None else planner
        state = {"settings": self.settings, "first_epoch": self.first_epoch, "planner": planner}
        if isinstance(self._documents, ArrivingDocuments):
            state["digest"] = self._documents.digest(_documents_taken(planner))
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any], *, inside_step: bool = False) -> None:
        """Continue from ``state``; a stream must be at its beginning. ``inside_step``: part of the step was trained.

        Raises ``UserError`` for other documents, another order or a later epoch; inside a step for any changed setting.
        """
        changed, planner = self._changed(state, inside_step), copy.deepcopy(state["planner"])
        last, epoch = state["first_epoch"] + (self._epochs or 0) - 1, planner["stream"]["epoch"]
        if isinstance(self._documents, ArrivingDocuments):
            if _documents_taken(self._planner.state_dict()):
                raise UserError("the stream has been read from already; open it again, and give the state with it")
            self._documents.read_again(_documents_taken(planner), state["digest"], waiting_in(planner))
        elif self._epochs is not None and epoch > last:
            raise UserError(f"the state is in epoch {epoch + 1} and this run ends with epoch {last + 1}; raise epochs")
        self._begin(state["first_epoch"])
        packed_by = {"context_window", "overlong", "method", *self._job.packing.identity(self._job.context_window)}
        self._planner.load_state_dict(planner, packed_otherwise=bool(changed & packed_by))
        self.before_next = self._planner.state_dict() if changed else planner

    def _changed(self, state: Mapping[str, Any], inside_step: bool) -> set[str]:
        """Names of settings that differ from ``state``. Raises ``UserError`` if one of them may not change."""
        if not isinstance(state, Mapping) or not {"settings", "first_epoch", "planner"} <= state.keys():
            kind = type(state).__name__
            raise UserError(f"state is a {kind}, not a result of state_dict; give one, or None to restart")
        saved, ours = state["settings"], self.settings
        changed = [name for name in {**ours, **saved} if saved.get(name) != ours.get(name)]
        for name in changed if inside_step else [name for name in changed if name in _ORDER]:
            where, remedy = ("", "restart") if name in _ORDER else ("inside a step ", "save after whole steps")
            values = f"{name} = {saved.get(name)!r} and this run has {ours.get(name)!r}"
            raise UserError(f"the state was saved {where}with {values}; continue with the saved one, or {remedy}")
        return set(changed)


def _documents_taken(planner: Mapping[str, Any]) -> int:
    return int(planner["stream"]["stores"][0]["cursor"])


def _settings(job: Job, documents: Lengths | ArrivingDocuments[Any], tokens: str | None) -> dict[str, Any]:
    # Documents of a stream are compared in every step, and with a state when they are read again.
    order: list[Any] = ["a stream", None, None, None, None]
    if not isinstance(documents, ArrivingDocuments):
        lengths = hashlib.blake2b(documents.astype("<i8").tobytes(), digest_size=8).hexdigest()
        order = [len(documents), lengths, tokens, job.data.seed, job.data.shuffle]
    probes = np.unique(np.geomspace(1, job.context_window, 8).astype(np.int64))
    return {
        **dict(zip(_ORDER, order, strict=True)),
        **({} if job.phases is None else {"phases": job.phases.digest}),
        **job.packing.in_use(),
        "context_window": job.context_window,
        "overlong": job.data.overlong,
        "micro_batches": job.rank_micro_batches,
        "dp": job.layout.pools,
        "cp": job.layout.pool_size,
        "prices": [f"{seconds:.6g}" for seconds in job.packing_prices.document_seconds(probes)],
    }


class ItemsOfSteps(Iterator[Item], Generic[Item]):
    """The items of one step after another, with a state between any two; ``items`` makes the items of a step.

    ``steps`` are ``WholeSteps`` or ``PackedSteps``; ``of_step`` are the items of the current step.
    """

    def __init__(self, steps: Any, items: Callable[[Any], Sequence[Item]]) -> None:
        self.steps, self._items, self.finished = steps, items, False
        self._before = steps.state_dict()  # before the current step
        self.of_step: Sequence[Item] = ()
        self._taken = 0  # items taken of the current step; after loading a state inside a step, of the next one

    @property
    def has_begun(self) -> bool:
        """Whether the first item was taken, or there was none."""
        return self.finished or bool(self.of_step)

    @property
    def is_over(self) -> bool:
        """Whether no item is left, even if ``next`` has not said so yet; for ``WholeSteps`` of lengths."""
        at_end = self._taken == len(self.of_step) > 0
        return self.finished or (at_end and next(copy.deepcopy(self.steps), None) is None)

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
        """Everything needed to continue after the last item, as a JSON-serialisable copy."""
        if self._taken < len(self.of_step):
            return {**copy.deepcopy(self._before), "taken": self._taken}
        return {**self.steps.state_dict(), "taken": self._taken - len(self.of_step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Raises ``UserError`` as ``WholeSteps.load_state_dict`` does."""
        self.steps.load_state_dict(state, inside_step=state.get("taken", 0) > 0)
        self.of_step, self._taken, self.finished = (), state.get("taken", 0), False
