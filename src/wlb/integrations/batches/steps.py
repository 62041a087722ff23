"""For loops outside our trainer: their job, what identifies its steps, and the items of a step."""

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError, choose_from
from wlb.job.config import PackingConfig
from wlb.job.job import Job
from wlb.job.memory.fit import fits
from wlb.runtime.steps import Settings
from wlb.simulate.decide import decide
from wlb.simulate.job import simulated_job
from wlb.token_count import check_whole
from wlb.workload import Hardware, ModelShape
from wlb.workload.base import DocumentPrices
from wlb.workload.phases import DocumentPhases
from wlb.workload.profile import WorkloadProfile, read_profile

Item = TypeVar("Item")
Lengths = NDArray[np.int64]

_WINDOWS = 1.5  # context windows that fit into a micro-batch


def check_names(settings: Iterable[str], function: Callable[..., Any]) -> None:
    """Raise ``UserError`` for a keyword that neither ``function``, which calls ``balanced_job``, nor a packer has."""
    parameters = [one for of in (function, balanced_job) for one in inspect.signature(of).parameters.values()]
    known = {one.name: None for one in parameters if one.kind is not one.VAR_KEYWORD}
    names = [*(known | dict.fromkeys(PackingConfig.model_fields)).keys() - {"self", "lengths"}]
    if unknown := next((name for name in settings if name not in names), None):
        raise UserError(f"{unknown} is not a setting; {choose_from(unknown, sorted(names))}")


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
    ep: int = 1,
    phases: DocumentPhases | None = None,
    **packing: Any,
) -> Job:
    """The job that a training loop runs: ``micro_batches`` a step on each of ``dp`` data-parallel ranks.

    Documents are priced by ``workload``, by a measured ``profile`` (of ``wlb profile``), or by ``model`` (that of the
    profile, or "7b") on ``hardware``; ``phases`` are added. Micro-batches hold one context window on average and up to
    L_max tokens (``max_length_factor`` windows, by default 1.5); in the last step up to two windows, if documents of
    nearly a window do not divide among ranks otherwise. ``pool`` regroups the dp x cp ranks into pools of so many. With
    ``own_lists`` ranks run different numbers of micro-batches, and one rank holds L_max tokens; ``ep`` neighbouring
    ranks that share the experts of ``model`` run the same ones. ``packing`` has options of the packer. ``lengths`` is
    None for a stream. Raises ``UserError`` for impossible settings.
    """
    check_whole("micro_batches", micro_batches)
    if ep != 1 and not own_lists:
        raise UserError(f"ep = {ep} is for own_lists; other ranks run equally many micro-batches, so leave ep out")
    if own_lists:
        if cp != 1 or preset != "balanced" or pool is not None or "grouping" in packing:
            raise UserError("own_lists chooses cp, preset, pool and grouping itself; leave them out")
        windows = packing.get("max_length_factor", _WINDOWS)
        if isinstance(windows, Real):
            windows *= dp  # L_max of all ranks together
        packing |= {"grouping": "level", "max_length_factor": windows}
    elif preset == "balanced" and packing.get("method", "balanced") == "balanced":
        usual = {"rank_micro_batches": micro_batches, "max_length_factor": _WINDOWS} if pool is None else {}
        packing, pool = {"grouping": "even"} | usual | packing, pool or cp
    if pool not in (None, "auto"):
        check_whole("pool", pool)
    if isinstance(pool, int) and dp * cp % pool:
        raise UserError(f"pool = {pool} does not divide the dp x cp = {dp * cp} ranks; give a divisor")
    measured = read_profile(profile) if isinstance(profile, str | Path) else profile
    packing = {"order": "pipeline"} | packing  # the same on all ranks, for loops that synchronise in micro-batches
    sizes: dict[str, Any] = {"micro_batches": micro_batches, "dp": dp, "cp": cp, "ep": ep, "packing": packing}
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


def loop_settings(
    job: Job, lengths: Lengths | None, *, epochs: int | None = None, tokens: str | None = None
) -> Settings:
    """Everything that decides the steps of ``job``; ``tokens`` is a digest of token ids.

    Without ``lengths`` it is for a stream, whose documents are compared in every step and when they are read again.
    """
    order: dict[str, Any] = {"documents": "a stream"}
    if lengths is not None:
        digest = hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=8).hexdigest()
        order = {"documents": len(lengths), "digest of lengths": digest, "digest of tokens": tokens}
        order |= {"seed": job.data.seed, "shuffle": job.data.shuffle}
    window, method = {"context_window": job.context_window, "overlong": job.data.overlong}, job.packing.method
    probes = np.unique(np.geomspace(1, job.context_window, 8).astype(np.int64))
    others = {
        **({} if job.phases is None else {"phases": job.phases.digest}),
        **job.packing.in_use(),
        "micro_batches": job.rank_micro_batches,
        "dp": job.layout.dp,
        "cp": job.layout.cp,
        "pool": job.layout.pool_size,
        "prices": [f"{seconds:.6g}" for seconds in job.packing_prices.document_seconds(probes)],
        "epochs": epochs,
    }
    packing = {"method": method, **job.packing.identity(job.context_window), **window}
    return {"order": order, "packing": packing, "others": others}


class ItemsOfSteps(Iterator[Item], Generic[Item]):
    """The items of one step after another, with a state between any two; ``items`` makes the items of a step.

    ``steps`` are ``PlannedSteps`` or ``PackedSteps``; ``of_step`` are the items of the current step.
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
        """Whether no item is left, even if ``next`` has not said so yet; for ``PlannedSteps`` of lengths."""
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
        """Continue from ``state``. Raises ``UserError`` as ``PlannedSteps.load_state_dict`` does."""
        self.steps.load_state_dict(state, inside_step=state.get("taken", 0) > 0)
        self.of_step, self._taken, self.finished = (), state.get("taken", 0), False
