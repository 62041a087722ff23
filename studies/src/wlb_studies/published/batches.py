"""Steps measured batch by batch under three systems, with the length of every document published.

DistCA's artifact (hao-ai-lab/DistCA, branch ``ae-ckpt``) has steps of a Llama of 8B parameters, cut to a few layers, on
H200: plain data parallelism, WLB-LLM without delay with per-document context parallelism, and DistCA. Each run is
simulated as the benchmark (``tests/test_e2e_combined.py`` of that repository) ran it, one micro-batch per rank: all
weights stay on every rank, nothing is recomputed, and the host waits for nothing within a step.

The artifact does not record how a batch became micro-batches, and that changed between commits. The commits show a few
settings; we take the one under which measured over predicted seconds vary least between batches of the run. That
recovers a setting without fitting seconds: a prediction that is 20% off in every batch varies as little as an exact
one. (The fifth of the batches furthest from the median is ignored here: the batch after the first, for which the
benchmark does not warm up, is often 10 to 40% slow and would decide a correlation.)
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.simulate import simulated_job
from wlb.simulate.rate import simulate_steps
from wlb.workload import ModelShape, hardware_preset
from wlb_studies.policies import distca
from wlb_studies.policies.plan import Ranks
from wlb_studies.policies.pricing import price
from wlb_studies.policies.wlb_llm import breakpoint_tokens, evened
from wlb_studies.published.metrics import positive, size, stated, whole
from wlb_studies.published.models import published_shape
from wlb_studies.published.prediction import ODD, Prediction, why
from wlb_studies.published.stacks import StackSoftware

Lists = list[list[int]]  # a batch: document lengths, in lists with equal tokens
Seconds = NDArray[np.float64]

TABLES = {
    "baseline": "measured batches: plain",
    "wlbllm": "measured batches: WLB-LLM",
    "d2": "measured batches: DistCA",
}
WARM_UP = 1.6  # times the median of a run: slower batches count as warm-up, though some just have long documents
_COUNTED = 0.8  # share of a run's batches that recover its setting
_RECOVERED = 0.03  # largest spread of measured over predicted seconds for a setting to count as recovered

_REPO = "hao-ai-lab/DistCA"
_SLOW = f"over {WARM_UP} times the median of its run, as when a system still warms up"
# Commit 53a9c5a of hao-ai-lab/DistCA (16 August 2025) fuses rotary embedding, SwiGLU and dropout of all systems.
_FUSED_SINCE = "20250816"
_H200 = hardware_preset("h200")
_STACK = StackSoftware(gathers_context=True)
# Until commit 9426950 (25 August 2025) DistCA's planner levelled attention until ranks differed by less than the square
# of 8,192 tokens; since then it uses a tolerance, by default the same as here.
_LEVEL = 0.01
# Until commit d09a369 (21 August 2025) WLB-LLM reordered gathered keys and values in Python, in both directions: one
# slice of K and V each for 2 cp shards of every document, while the device waited. Host time per slice in PyTorch,
# estimated from the four runs that did this (cp 2, 4 and 8).
_SLICE_SECONDS = 3e-6
_IN_PYTHON = f", keys and values reordered in Python ({_SLICE_SECONDS * 1e6:g} us a slice, estimated from four runs)"


@dataclass(frozen=True)
class _Run:
    """A run with ``dp`` x ``cp`` ranks of ``tp`` GPUs; ``early`` if the benchmark did not have ``cp_size`` yet."""

    mode: str
    shape: ModelShape
    eager: bool
    tp: int
    dp: int
    cp: int
    early: bool
    batches: tuple[Lists, ...]

    def job(self) -> Job:
        """The job, with a window as long as the batch share of a rank (or context-parallel group)."""
        return simulated_job(
            self.shape,
            -(-max(sum(map(sum, lists)) for lists in self.batches) // self.dp),
            "plain-4d",
            sharding="per_document",
            hardware=_H200,
            micro_batches=1,
            tp=self.tp,
            cp=self.cp,
            dp=self.dp,
            software=replace(_STACK, fused=not self.eager),
        )


class _MeasuredBatch(NamedTuple):
    """A measured batch, or the ``reason`` why it is not usable."""

    lists: Lists
    seconds: float
    reason: str | None = None


def measured_batch_rows(document: dict[str, Any]) -> list[Prediction]:
    """A row for every batch of every run, in order; a run without batches has one.

    ``run`` is the run's path. ``row`` names the batch and has a checksum of its document lengths. Statistics leave out
    batches in which the system may still have warmed up and batches that another run published too. Odd batches have a
    reason instead of a prediction, and so do all batches of odd runs or runs whose setting is not recovered.
    """
    rows: list[Prediction] = []
    first: dict[tuple[Any, ...], str] = {}
    for index, run in enumerate(document.get("runs", [])):
        try:
            of_run = _rows(run)
        except ODD as error:
            path = run.get("path") if isinstance(run, dict) else None
            of_run = [Prediction("measured batches", str(path or f"runs[{index}]"), "", _REPO, reason=why(error))]
        for row in of_run:
            same = first.setdefault((row.table, row.row, row.measured_seconds, row.predicted_seconds), row.run)
            twice = same != row.run and row.predicted_seconds is not None
            rows.append(replace(row, left_out=f"the same measurement as in {same}") if twice else row)
    return rows


def _rows(run: dict[str, Any]) -> list[Prediction]:
    mode, source = str((run.get("config") or {}).get("mode")), f"{_REPO} {run.get('commit') or ''}".strip()
    one = Prediction(TABLES.get(mode, f"measured batches: {mode}"), str(run.get("path")), "", source)
    read = [_read(batch) for batch in run.get("batches") or []]
    if not read:
        raise UserError("it has no batches")
    usable = [batch for batch in read if batch.reason is None]
    longest = WARM_UP * float(np.median([batch.seconds for batch in usable] or [0.0]))
    predicted: Iterator[float] = iter(())
    try:
        seconds, assumed = _predicted(run, usable, longest)
        one, predicted = replace(one, assumed=assumed), iter(seconds.tolist())
    except ODD as error:
        one = replace(one, reason=why(error))
    rows = []
    for index, batch in enumerate(read):
        if batch.reason is not None:
            rows.append(replace(one, row=f"batch {index}", reason=batch.reason))
            continue
        name, second = f"batch {index}, documents {_check_sum(batch.lists):08x}", next(predicted, None)
        left_out = _SLOW if second is not None and batch.seconds > longest else None
        rows.append(replace(one, row=name, measured_seconds=batch.seconds, predicted_seconds=second, left_out=left_out))
    return rows


def _read(batch: Any) -> _MeasuredBatch:
    try:
        lists = [[whole(length) or 0 for length in of_list] for of_list in batch["documents"]]
        if not any(lists) or 0 in _joined(lists):
            raise UserError("its documents are no lists of positive lengths")
        return _MeasuredBatch(lists, positive(batch, "ms") / 1e3)
    except ODD as error:
        return _MeasuredBatch([], 0.0, why(error))


def _predicted(run: dict[str, Any], batches: Sequence[_MeasuredBatch], longest: float) -> tuple[Seconds, str]:
    """Seconds of every batch, and the assumptions; raises ``UserError`` if the setting is not recovered."""
    described = _described(run, tuple(batch.lists for batch in batches))
    candidates = _CANDIDATES[described.mode](described)
    measured = np.array([batch.seconds for batch in batches])
    typical = measured <= longest
    spreads = {name: _spread(measured[typical] / seconds[typical]) for name, seconds in candidates.items()}
    setting = min(spreads, key=spreads.__getitem__)
    if described.mode == "wlbllm" and spreads[setting] > _RECOVERED:
        raise UserError(
            f"packer not recovered from how measured seconds follow predicted ones: under each of {len(spreads)} "
            f"settings their ratio varies by {spreads[setting]:.1%} or more from batch to batch, over {_RECOVERED:.0%}"
        )
    chosen = f" (of {len(spreads)} settings, measured over predicted seconds vary least under this one)"
    return candidates[setting], (
        f"{setting}{chosen if len(spreads) > 1 else ''}; H200, FlashAttention-2, "
        f"{'eager' if described.eager else 'fused'} kernels, no recomputation, weights kept whole on every rank"
    )


def _described(run: dict[str, Any], batches: tuple[Lists, ...]) -> _Run:
    """Describe ``run`` as the benchmark ran it.

    Until commit 52a1e36 (21 August 2025), which added ``cp_size``, WLB-LLM made one context-parallel group of all
    ranks. DistCA always has ``dp_size`` ranks, whatever ``cp_size`` says.
    """
    config = run["config"]
    mode, shape = stated(config, "mode"), published_shape(stated(config, "model_path"))
    if mode not in TABLES:
        raise UserError(f"mode {mode!r} is not simulated")
    dp, cp, early = size(config, "dp_size"), 1, "cp_size" not in config
    if mode == "wlbllm":
        dp, cp = (1, dp) if early else (dp, size(config, "cp_size"))
    date = re.search(r"20\d{6}", stated(run, "path"))
    return _Run(
        mode=mode,
        shape=replace(shape, layers=size(config, "num_layers")),
        eager=date is not None and date.group() < _FUSED_SINCE,
        tp=size(config, "tp_size"),
        dp=dp,
        cp=cp,
        early=early,
        batches=batches,
    )


def _plain(run: _Run) -> dict[str, Seconds]:
    """Deal lists to ranks adjacently or in turn."""

    def adjacent(lists: Lists) -> Lists:
        bounds = [len(lists) * rank // run.dp for rank in range(run.dp + 1)]
        return [_joined(lists[start:stop]) for start, stop in pairwise(bounds)]

    def in_turn(lists: Lists) -> Lists:
        return [_joined(lists[rank :: run.dp]) for rank in range(run.dp)]

    return {"adjacent lists on a rank": _dealt(run, adjacent), "lists dealt in turn": _dealt(run, in_turn)}


def _wlb_llm(run: _Run) -> dict[str, Seconds]:
    """The repository's packer, ``distca/planner/wlb_planner.py``; for a while its L_max was far over the mean."""
    if run.dp == 1:
        name, seconds = "one context-parallel group", _dealt(run, lambda lists: [_joined(lists)])
        if not run.early:
            return {name: seconds}
        slices = 2 * run.cp * 2 * 2 * run.shape.layers * np.array([len(_joined(lists)) for lists in run.batches])
        return {name: seconds, f"{name}{_IN_PYTHON}": seconds + _SLICE_SECONDS * slices}

    def packed(lists: Lists, length_factor: float) -> Lists:
        lengths = np.array(_joined(lists), np.int64)
        members = evened(lengths, run.dp, breakpoint_tokens(run.shape), length_factor)
        return [lengths[documents].tolist() for documents in members]

    factors = {"L_max is the mean": 1.0, "no L_max": np.inf}
    return {name: _dealt(run, partial(packed, length_factor=factor)) for name, factor in factors.items()}


def _distca(run: _Run) -> dict[str, Seconds]:
    """The first and the second half of the lists are two half-batches, served separately."""
    job = run.job()
    ranks = Ranks(job, job.context_window)

    def seconds(lists: Lists, tolerance: float) -> float:
        lengths = np.array(_joined(lists), np.int64)
        first = len(_joined(lists[: len(lists) // 2]))
        halves = [half for half in (range(first), range(first, len(lengths))) if half]
        return price(distca.serve(halves, lengths, ranks, idle_stages_serve=False, tolerance=tolerance), ranks).seconds

    tolerances = {"attention level": _LEVEL} | ({} if run.early else {"attention within 10%": distca.TOLERANCE})
    return {
        name: np.array([seconds(lists, tolerance) for lists in run.batches]) for name, tolerance in tolerances.items()
    }


_CANDIDATES = {"baseline": _plain, "wlbllm": _wlb_llm, "d2": _distca}


def _dealt(run: _Run, deal: Callable[[Lists], Lists]) -> Seconds:
    """Seconds of batches with one micro-batch on each data-parallel rank."""
    plans = [
        StepPlan(step, tuple((_micro_batch(lengths),) for lengths in deal(lists)))
        for step, lists in enumerate(run.batches)
    ]
    return simulate_steps(plans, run.job()).seconds


def _micro_batch(lengths: Sequence[int]) -> MicroBatch:
    return MicroBatch(tuple(Segment(index, 0, length) for index, length in enumerate(lengths)), 0.0)


def _joined(lists: Sequence[Sequence[int]]) -> list[int]:
    return [length for of_list in lists for length in of_list]


def _spread(ratios: Seconds) -> float:
    """Mean distance from the median over the median, for the ``_COUNTED`` share nearest to it."""
    distances = np.sort(np.abs(ratios / np.median(ratios) - 1))
    return float(distances[: math.ceil(_COUNTED * len(distances))].mean())


def _check_sum(lists: Lists) -> int:
    """A checksum of the lengths, independent of their order and lists."""
    return crc32(np.sort(np.array(_joined(lists), np.int64)).tobytes())
