"""How many more tokens per second each preset trains: the answer of ``wlb check`` and ``report``.

A ``SearchSpace`` describes the job: model, GPUs, window, global batch, and the layout if it is given. ``estimate``
finds the fastest layout of every preset (``wlb.simulate.search``), simulates all on the same documents
(``wlb.simulate.verdict``) and returns the verdict with the configuration of the winner.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.files import names_store
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.config_file import to_toml
from wlb.job.job import Job
from wlb.job.memory.fit import fits
from wlb.os_limits import usable_cores
from wlb.simulate.filling import check_filling
from wlb.simulate.job import preset_sections
from wlb.simulate.run import SimulationResult, check_documents
from wlb.simulate.search import DRAWS, Told, fastest_layout, without_collection
from wlb.simulate.space import SearchSpace, measured_name
from wlb.simulate.verdict import (
    BALANCED,
    BALANCED_TUNED,
    BASELINE,
    KEPT,
    PER_DOCUMENT,
    TUNED,
    VARIANTS,
    Lengths,
    Progress,
    Verdict,
    simulate_draws,
    usual_steps,
)
from wlb.workload import MODEL_SHAPES

T = TypeVar("T")

CONFIGURED = "as configured"
# Of a configured job: what the systems that it is compared with share, beside the shape of the search.
_SHARED = ("profile", "software", "data", "limit", "tied_embeddings", "checkpoint_copy")
# Of a layout: what two jobs in the same one share.
_PLACED = ("tp", "cp", "pp", "virtual_pp", "dp", "ep", "schedule", "deals_head", "keeps_weights")
CHECKED = (BASELINE, PER_DOCUMENT, BALANCED)  # two that stacks use today, and ours
_SEARCH = 0.75  # of the time that a system takes; the rest simulates its fastest layout
_SHOWN_EVERY = 0.2  # seconds


def fastest(
    space: SearchSpace, system: str, lengths: NDArray[np.int64], on_progress: Told = lambda done, rate: None
) -> Job:
    """The job of ``space`` in the layout in which ``system``, a preset or one of ``VARIANTS``, runs it fastest."""
    if system in (KEPT, BALANCED):  # how weights are handled describes the job that runs today
        space = replace(space, fixed={**space.fixed, "weights": "auto"})
    elif system in VARIANTS:
        measured = {"tp"} if space.settings.get("profile") else {}
        fixed = {name: size for name, size in space.fixed.items() if name in measured or not space.layout}
        fixed.pop("weights", None)
        space = replace(space, fixed=fixed, checkpointing=None, micro_batch_windows=None)
    return fastest_layout(space, lengths, VARIANTS.get(system, system), on_progress=on_progress).job


@dataclass(frozen=True)
class Estimate:
    """The verdict on a job, with each system in its fastest layout, and the configuration of the winner.

    ``left_out`` says why a preset cannot run the job. ``config`` is TOML, or empty if nothing gains enough.
    """

    space: SearchSpace
    verdict: Verdict
    left_out: Mapping[str, str]
    config: str

    @property
    def gpu_hours_a_day(self) -> float:
        """GPU-hours a day that the winner saves for the same tokens."""
        return 24 * self.space.gpus * (1 - 1 / self.verdict.speed(self.verdict.winner))

    def to_json(self) -> dict[str, Any]:
        return self.verdict.to_json() | {
            "gpu_hours_a_day": self.gpu_hours_a_day,
            "assumed": [*self.space.assumed],
            "left_out": {**self.left_out},
            "config": self.config,
        }


@without_collection()
def estimate(
    space: SearchSpace,
    lengths: NDArray[np.int64],
    presets: Sequence[str] = CHECKED,
    steps: int | None = None,
    *,
    source: str,
    on_progress: Progress = lambda known: None,
) -> Estimate:
    """Compare ``presets`` on documents of ``lengths`` tokens, each in its fastest layout, or all in the fixed one.

    If the job of plain-4d was given, ``VARIANTS`` are further systems. The configuration names the documents of
    ``source``. Raises ``UserError`` for an unknown preset, if the documents do not fill one step, and if plain-4d, or
    all of ``presets``, have no layout.
    """
    for preset in presets:
        preset_sections(preset, {})
    steps = steps or usual_steps(space.global_batch)
    check_filling(lengths, space.batch_tokens, space.context_window, steps=steps)
    systems = [*presets]
    if space.is_of_a_job and BASELINE in presets:
        kept = [KEPT] if space.fixed.get("weights") == "gathered" else []
        place = systems.index(BASELINE) + 1
        systems[place:place] = [*kept, TUNED]
        systems += [BALANCED_TUNED] if BALANCED in presets else []
    watched = _Watched(systems, on_progress)

    def searched(system: str) -> Job | UserError:
        try:
            return fastest(space, system, lengths, partial(watched.searched, system))
        except UserError as error:
            return error

    found = _each(searched, systems, watched)
    jobs = {name: one for name, one in found.items() if isinstance(one, Job)}
    failures = {name: one for name, one in found.items() if isinstance(one, UserError)}
    if BASELINE in failures or not jobs:
        raise failures.get(BASELINE) or next(iter(failures.values()))
    verdict = _verdict(jobs, lengths, steps, watched, space)
    winner, config = verdict.winner, ""
    if winner != verdict.base:
        config = config_of(
            VARIANTS.get(winner, winner), jobs[winner], jobs[verdict.base], space.priced_by.get("model", ""), source
        )
    return Estimate(space, verdict, {name: str(why) for name, why in failures.items()}, config)


def judge_config(
    config: JobConfig,
    job: Job,
    lengths: Lengths,
    presets: Sequence[str] = (BASELINE,),
    steps: int | None = None,
    *,
    on_progress: Progress = lambda known: None,
) -> Verdict:
    """Compare ``job`` of ``config`` with ``presets`` in its layout, and with plain-4d in the layout of ``[baseline]``.

    A configuration that ``estimate`` recommends gets the same verdict here. Raises ``UserError`` if the documents do
    not fill one step.
    """
    check_documents(job, lengths, steps or 1)
    baseline = config.baseline
    sizes = job.layout.world_size, job.shape, job.hardware, job.context_window, job.global_batch
    space = SearchSpace(*sizes, settings={name: getattr(job, name) for name in _SHARED})
    layout = replace(job.layout, head="auto")  # no system but ours deals heads
    checkpointing, windows = None if baseline else job.activation_checkpointing, job.packing.micro_batch_windows
    spaces = dict.fromkeys(presets, space.fixed_to(layout, checkpointing, windows))
    if baseline is not None and BASELINE in presets:
        given = baseline.layout, baseline.activation_checkpointing, baseline.micro_batch_windows
        spaces[BASELINE] = space.fixed_to(*given)
    jobs = {preset: fastest_layout(within, lengths, preset).job for preset, within in spaces.items()}
    watched = _Watched([CONFIGURED, *jobs], on_progress, searches=False)
    steps = steps or usual_steps(job.global_batch)
    return _verdict({CONFIGURED: job} | jobs, lengths, steps, watched, space if baseline else None, config.preset)


def _verdict(
    jobs: Mapping[str, Job],
    lengths: Lengths,
    steps: int,
    watched: "_Watched",
    space: SearchSpace | None,
    configured: str = "",
) -> Verdict:
    """The verdict on ``jobs``, all simulated on the same documents; ``configured`` is the preset of ``CONFIGURED``.

    With a ``space``, a winner in another layout than the base is simulated in the layout of the base too.
    """
    prices = jobs[BASELINE if BASELINE in jobs else next(iter(jobs))].work_prices
    simulated = partial(simulate_draws, lengths=lengths, steps=steps, work_prices=prices)

    def of_draws(name: str) -> list[SimulationResult]:
        return [*watched.drawing(name, simulated(jobs[name]))]

    verdict = Verdict(_each(of_draws, [*jobs], watched), gives_checkpointing=bool(space and space.checkpointing))
    base, winner = (verdict.of_draws[name][0].job for name in (verdict.base, verdict.winner))
    if verdict.winner == BALANCED_TUNED and fits(verdict.of_draws[BALANCED][0].job):
        return replace(verdict, moved=verdict.of_draws[BALANCED])
    # Level steps run on all ranks of a stage, however these are divided into dp and cp.
    placed = ("tp", "pp") if winner.levels_steps else _PLACED
    alike = all(getattr(base.layout, name) == getattr(winner.layout, name) for name in placed)
    if space is None or verdict.winner in VARIANTS or alike:
        return verdict
    there = space.fixed_to(replace(base.layout, weights="auto"), space.checkpointing, space.micro_batch_windows)
    job = fastest_layout(there, lengths, configured if verdict.winner == CONFIGURED else verdict.winner).job
    return replace(verdict, moved=[*simulated(job)]) if fits(job) else verdict


class _Watched:
    """What is known so far of each system, also of those in a forked process: shares done, and tokens per second."""

    def __init__(self, systems: Sequence[str], on_progress: Progress, *, searches: bool = True) -> None:
        self._systems, self._told, self._here = [*systems], on_progress, os.getpid()
        self._search = _SEARCH if searches else 0.0
        self._done, self._rates = (RawArray("d", len(systems)) for _ in range(2))  # shared with forked processes

    def searched(self, system: str, done: float, rate: float) -> None:
        place = self._systems.index(system)
        self._done[place], self._rates[place] = self._search * done, rate
        self.show()

    def drawing(self, system: str, draws: Iterator[T]) -> Iterator[T]:
        for draw in draws:
            place = self._systems.index(system)
            self._done[place] = max(self._search, self._done[place]) + (1 - self._search) / DRAWS
            self.show()
            yield draw

    def show(self) -> None:
        if os.getpid() == self._here:
            self._told(dict(zip(self._systems, zip(self._done, self._rates, strict=True), strict=True)))


def _each(function: Callable[[str], T], names: Sequence[str], watched: _Watched) -> dict[str, T]:
    """Call ``function`` on each of ``names``, two thirds of them in a forked process: the most expensive come last.

    Everything runs in this process with one core, outside Linux, and in a daemon, which may not start processes.
    """
    shared = min(-(-2 * len(names) // 3), len(names) - 1)
    own, others = names[shared:], names[:shared]
    if not others or sys.platform != "linux" or usable_cores() < 2 or current_process().daemon:
        return {name: function(name) for name in names}
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_each, args=(sender, function, others), daemon=True)
    process.start()
    sender.close()
    try:
        results = {name: function(name) for name in own}
        while not receiver.poll(_SHOWN_EVERY):
            watched.show()
        try:
            results |= zip(others, receiver.recv(), strict=True)
        except (EOFError, OSError):  # it failed, and will fail here too, or was killed, perhaps for memory
            results |= {name: function(name) for name in others}
    finally:
        process.kill()
        process.join()
    return {name: results[name] for name in names}


def _send_each(sender: Connection, function: Callable[[str], object], names: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    with suppress(Exception):
        sender.send([function(name) for name in names])


def config_of(preset: str, job: Job, base: Job, model: str, source: str) -> str:
    """The job of ``preset`` as TOML without any "auto", and the layout of the ``base`` to compare it with.

    ``source`` is the token store to train on; for other sources the TOML has a placeholder.
    """
    store = source if names_store(source) else None
    packing: dict[str, Any] = {"global_batch": job.global_batch}
    parallel = _written(job)
    if job.packing.is_balanced:
        packing["grouping"] = job.packing.grouping
        parallel["pool"] = job.layout.pool_size
        if not job.levels_steps:
            packing["rank_micro_batches"] = job.rank_micro_batches
    if job.packing.micro_batch_windows > 1:
        packing["micro_batch_windows"] = job.packing.micro_batch_windows
    if job.packing.reads("max_length_factor"):
        packing["max_length_factor"] = float(job.packing.max_length_factor)
    named = model if job.profile is None else measured_name(job.profile)
    pretrained = named not in MODEL_SHAPES and Path(named).is_dir()
    sections: dict[str, dict[str, Any]] = {
        "model": {"pretrained": named} if pretrained else {"name": named, "vocab_size": job.shape.vocab_size},
        "data": {"store": store or "data/corpus", "context_window": job.context_window},
        "parallel": parallel,
        "packing": packing,
        "training": {"activation_checkpointing": job.activation_checkpointing},
    }
    if _as_baseline(base) != _as_baseline(job):
        sections["baseline"] = _as_baseline(base)
    remark = "" if store else " Set data.store to your token store, which wlb prepare makes."
    return to_toml({"preset": preset}, sections, f"Computed for the documents of {source}.{remark}")


def _as_baseline(job: Job) -> dict[str, Any]:
    windows = job.packing.micro_batch_windows
    counted = {"micro_batch_windows": windows} if windows > 1 else {}
    return _written(job) | {"activation_checkpointing": job.activation_checkpointing} | counted


def _written(job: Job) -> dict[str, Any]:
    interleaved = tuple(name for name in ("virtual_pp", "ep") if getattr(job.layout, name) > 1)
    named = [name for name in ("schedule", "weights", "head") if getattr(job.layout, name) != "auto"]
    return {name: getattr(job.layout, name) for name in ("dp", "pp", "cp", "tp", *interleaved, *named)}
