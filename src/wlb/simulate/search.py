"""The search for the fastest layout of a preset, which ``check``, ``report`` and rivals share.

The search simulates the preset itself in every layout that fits the memory: all tp inside a node, cp, pp and dp, one to
eight stages per pipeline rank, weights kept or gathered again, and every kind of activation checkpointing. Each preset
has its own fastest layout, because a cost that hardly matters to one may be the main loss of another.

Layouts are tried in the order of a lower bound on their time (``least_seconds``), and left out if the bound is worse
than the best result; pooled presets are first tried without a pipeline, whose level steps are cheap to plan and hard to
beat. The best layouts are then rated over more steps, and the last few over other draws of the documents: a
draw is a shuffle of the corpus with the next seed. The mean of the draws decides, because a layout that balances badly
may be lucky in a few steps. All rates count the same work, priced on a single GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from statistics import fmean
from typing import Any, NamedTuple, get_args

import numpy as np

from wlb.documents.store.reader import DocumentLengths
from wlb.errors import UserError
from wlb.job.config import PackingConfig
from wlb.job.job import Job
from wlb.job.memory.fit import fits, largest_factor
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.schedules.layout import Layout, divisors
from wlb.simulate.decide import Packed, decide, with_stages
from wlb.simulate.job import preset_sections, simulated_job
from wlb.simulate.no_layout import no_division, no_memory
from wlb.simulate.rate import rate
from wlb.simulate.space import BATCH_TOKENS as BATCH_TOKENS
from wlb.simulate.space import SearchSpace as SearchSpace
from wlb.simulate.space import search_space as search_space
from wlb.workload.base import Checkpointing, DocumentPrices
from wlb.workload.phases import segment_seconds

DRAWS = 3
# Layouts are first rated on _FIRST_WINDOWS windows, those near the fastest again on _WINDOWS, in at most _STEPS steps.
# In the end those within _NEARER of the best are rated on the other draws too; a bound may be as much behind. Fewer
# windows make a rate less certain: from _CERTAIN windows on "near" means within _NEAR, with fewer windows within up to
# _FARTHEST.
_FIRST_WINDOWS, _WINDOWS = 16, 256
_STEPS = 4
_NEAR, _FARTHEST, _NEARER = 0.1, 0.15, 0.03
_CERTAIN = 64
# Pools have many choices, and are expensive to simulate. Without interleaved stages a layout is tried if it may be
# within _POOLS_FAR of the best; if not, it is not tried with them, as slices leave few bubbles to interleave.
_POOLS_NEAR, _POOLS_FAR = 0.01, 0.1
_WARM_UP = 4  # steps planned before the counted ones if documents may wait; none when layouts are first rated
_LARGEST_TP = 32
_LARGEST_PP = 32
_STAGES_PER_RANK = (1, 2, 4, 8)

Adapt = Callable[[Job], Job]
_Key = tuple[Layout, Checkpointing]
Told = Callable[[float, float], None]  # the share of a search that is done, and tokens per second of the fastest so far


class Rated(NamedTuple):
    """A job without any "auto", and seconds of work and tokens that it does per second: means of draws, if several."""

    job: Job
    work_rate: float
    tokens_per_second: float


@dataclass(frozen=True)
class SearchResult:
    """The fastest layouts, best first, and how many layouts were simulated."""

    ranking: list[Rated]
    layouts: int

    @property
    def job(self) -> Job:
        return self.ranking[0].job


def fastest_layout(
    space: SearchSpace,
    lengths: DocumentLengths,
    preset: str,
    *,
    adapt: Adapt = lambda job: job,
    draws: int = DRAWS,
    on_progress: Told = lambda done, rate: None,
) -> SearchResult:
    """The fastest layouts of ``preset`` on documents of ``lengths``; ``adapt`` completes each job.

    Raises ``UserError`` if no layout fits the memory, or none can run the global batch. If the layout is fixed and does
    not fit, the job that comes closest is returned, because the caller wants to know what it would do.
    """
    untried = [with_stages(adapt(job), lengths) for job in _jobs(space, preset)]
    if not untried:
        raise no_division(space, _LARGEST_TP, _LARGEST_PP, lambda other: any(_jobs(other, preset)))
    plans, prices = _packed(untried[0], lengths), untried[0].work_prices
    work = float(segment_seconds(prices, np.concatenate([plan.table for plan in plans])).sum())
    packed = [Packed.of_plan(plan) for plan in plans]
    bounded = sorted(((work / least_seconds(job, packed), job) for job in untried), key=_first_tried)
    first, more = (max(1, min(_STEPS, windows // space.global_batch)) for windows in (_FIRST_WINDOWS, _WINDOWS))
    certain = min(_FARTHEST, _NEAR * math.sqrt(_CERTAIN / (first * space.global_batch)))
    found: list[Rated] = []
    settled: set[_Key] = set()  # less memory would gain nothing there
    for tried, (most, untried_job) in enumerate(bounded):
        on_progress(tried / len(bounded), found[0].tokens_per_second if found else 0.0)
        if _key(untried_job) in settled or (found and most < (1 - _NEARER) * found[0].work_rate):
            continue
        interleaved = _interleaved(untried_job)
        near = _POOLS_FAR if interleaved else _POOLS_NEAR
        job = _fitting(untried_job, lengths, (1 - near) * found[0].work_rate if found else 0.0)
        if job is None:
            settled |= {_key(other) for other in interleaved}
            continue
        settled |= {*_settled_by(job, untried_job)}
        found.append(_rated(job, lengths, first, prices))
        found.sort(key=lambda one: -one.work_rate)
    if not found:
        if space.layout is not None:
            least = untried[-1]  # with full checkpointing
            if not least.packing.is_balanced:
                least = least.with_length_factor(least.least_length_factor)
            return SearchResult([Rated(decide(least, lengths), 0.0, 0.0)], 0)
        raise no_memory(space, len(untried), _has_room)
    nearest = [one for one in found if one.work_rate >= (1 - certain) * found[0].work_rate]
    if len(nearest) == 1:
        return SearchResult(nearest, len(found))
    if more > first or any(_warm_up(one.job) for one in nearest):
        nearest = [_rated(one.job, lengths, more, prices, _warm_up(one.job)) for one in nearest]
    ranking: list[Rated] = []
    for one in sorted(nearest, key=lambda one: -one.work_rate):
        if ranking and one.work_rate < (1 - _NEARER) * ranking[0].work_rate:
            break
        others = (_rated(drawn(one.job, draw), lengths, more, prices, _warm_up(one.job)) for draw in range(1, draws))
        _, *rates = zip(one, *others, strict=True)
        ranking.append(Rated(one.job, *map(fmean, rates)))
        ranking.sort(key=lambda one: -one.work_rate)
    return SearchResult(ranking, len(found))


def drawn(job: Job, draw: int) -> Job:
    """``job`` on another draw of its documents: shuffled with a later seed."""
    return replace(job, data=job.data.model_copy(update={"seed": job.data.seed + draw}))


def least_seconds(job: Job, steps: Sequence[Packed]) -> float:
    """A lower bound on the seconds that ``job`` takes for ``steps``, which are not dealt to ranks yet.

    The busiest pipeline rank computes its share of all micro-batches without communication or waiting for peers. If
    packing or dealing depends on prices, and so on the layout, data-parallel ranks share the work evenly; else each has
    the micro-batches that it is dealt, and a named schedule fills and drains its pipeline.
    """
    layout = job.layout
    dealt = job.packing.method == "sequential" and job.packing.assignment == "arrival"
    share = np.array([job.stage_shares[mine].sum() for mine in layout.rank_stages])
    has_head = np.array([layout.stages - 1 in mine for mine in layout.rank_stages])
    of_steps = [step.blocks_and_heads(job) for step in steps]
    if not dealt:
        blocks, head = (sum(float(each.sum()) for each in of_all) for of_all in zip(*of_steps, strict=True))
        return float((share * blocks + has_head * head).max() / layout.dp_cp)
    seconds = 0.0
    for of_blocks, of_head in of_steps:
        dealt_to = [slice(rank, None, layout.pools) for rank in range(layout.pools)]
        busy = [share * of_blocks[mine].sum() + has_head * of_head[mine].sum() for mine in dealt_to]
        shortest = float(of_blocks.min() * job.stage_shares.min()) * (not job.plans_operations)
        seconds += float((np.max(busy, axis=0) + shortest * np.arange(layout.pp)).max()) / layout.pool_size
    return seconds


def layout_of(job: Job) -> str:
    """The layout that is set for ``job``, in one line."""
    layout = job.layout
    interleaved = f" x {layout.virtual_pp} stages" if layout.virtual_pp > 1 else ""
    order = "" if layout.schedule == "auto" else f" {layout.schedule}"
    gathering = "" if layout.keeps_weights else ", weights gathered again"
    return f"tp {layout.tp} cp {layout.cp} pp {layout.pp}{interleaved} dp {layout.dp}{order}{gathering}"


def meshes(space: SearchSpace) -> Iterator[Layout]:
    """All tp that divide a node and the GPUs, with all cp and pp that divide the GPUs; dp is the rest.

    Pipelines have one to eight stages per rank, or as many as are fixed. Nothing checks whether a model or a global
    batch can be cut so.
    """
    sizes = divisors(space.gpus)
    tps = [tp for tp in sizes if tp <= _LARGEST_TP and space.hardware.node_size % tp == 0]
    for tp, cp, pp in product(tps, sizes, [pp for pp in sizes if pp <= _LARGEST_PP]):
        dp, rest = divmod(space.gpus, tp * cp * pp)
        if rest or not dp:
            continue
        yield Layout(tp, cp, pp, dp)
        if pp > 1:
            for stages in sorted({*_STAGES_PER_RANK[1:], int(dict(space.fixed).get("virtual_pp", 2))} - {1}):
                yield Layout(tp, cp, pp, dp, virtual_pp=stages)


def _layouts(space: SearchSpace, *, pooled: bool) -> Iterator[Layout]:
    """The layouts to try. With pools, cp is the smallest pool size, so one layout with cp 1 covers all sizes.

    For packers that plan the order of a pipeline's operations, every pipeline is also tried with 1F1B, which needs less
    memory.
    """
    if space.layout is not None:
        yield from _handlings(space.layout)
        return
    fixed = dict(space.fixed)
    schedule = str(fixed.pop("schedule", "auto"))
    weights: Any = fixed.pop("weights", "auto")
    if weights == "gathered":
        fixed.setdefault("pp", 1)
    if pooled and not {"cp", "dp"} & fixed.keys():
        fixed["cp"] = 1
    for layout in meshes(space):
        held = space.shape.kv_heads % layout.tp == 0  # not every trainer can replicate a head over ranks
        if held and all(getattr(layout, name) == size for name, size in fixed.items()):
            yield from _handlings(replace(layout, schedule=schedule, weights=weights))
            if pooled and layout.pp > 1 and schedule == "auto":
                yield replace(layout, schedule="1f1b" if layout.virtual_pp == 1 else "interleaved_1f1b")


def _handlings(layout: Layout) -> Iterator[Layout]:
    """``layout`` with its weights kept and, without a pipeline, gathered again; or as it says."""
    if layout.pp > 1 or layout.weights != "auto":
        yield layout
    else:
        yield from (replace(layout, weights=handling) for handling in ("kept", "gathered"))


def _jobs(space: SearchSpace, preset: str) -> Iterator[Job]:
    """``preset`` in every layout that can run the global batch, with every kind of activation checkpointing."""
    packing, _ = preset_sections(preset, {})
    pooled = packing.is_balanced
    together = space.micro_batch_windows if packing.reads("micro_batch_windows") else 1
    kinds = get_args(Checkpointing) if space.checkpointing is None else [space.checkpointing]
    for layout in _layouts(space, pooled=pooled):
        each, rest = divmod(space.global_batch, layout.dp * together)
        if not pooled and (rest or each < layout.pp):
            continue
        job = job_on(space, preset, layout, **{"micro_batch_windows": together} if together > 1 else {})
        if job is not None:
            yield from (replace(job, activation_checkpointing=kind) for kind in kinds)


def job_on(space: SearchSpace, system: str, layout: Layout, **packing: Any) -> Job | None:
    """The job of ``system`` in one of ``meshes``; None if it cannot run.

    Raises ``UserError`` instead if the layout was given.
    """
    packing = {"global_batch": space.global_batch} | packing
    try:
        return simulated_job(
            space.shape, space.context_window, system, hardware=space.hardware, packing=packing, **vars(layout)
        )
    except UserError:
        if space.layout is not None:
            raise
        return None


def _fitting(job: Job, lengths: DocumentLengths, least_rate: float) -> Job | None:
    """``job`` with everything decided, and with the largest L_max up to its own that fits; None if none fits.

    Pools that do not fit, or are slower than ``least_rate``, are skipped.
    """
    if not job.packing.is_balanced and job.packing.reads("max_length_factor"):
        room = largest_factor(job)
        return None if room is None else job.with_length_factor(min(float(job.packing.max_length_factor), room))
    try:
        decided = decide(job, lengths, least_rate=least_rate)
    except UserError:  # no pool can run the global batch in this pipeline
        return None
    return decided if fits(decided) else None


def _key(job: Job) -> _Key:
    return replace(job.layout, stage_blocks=None), job.activation_checkpointing


def _settled_by(job: Job, untried: Job) -> Iterator[_Key]:
    """What need not be tried if ``job``, decided from ``untried``, fits: what needs less memory and takes longer."""
    layout, _ = _key(untried)
    layouts = [layout] if layout.pp > 1 else [layout, replace(layout, weights="gathered")]
    whole = not job.packing.is_balanced and job.packing.max_length_factor == untried.packing.max_length_factor
    kinds = get_args(Checkpointing) if whole else [untried.activation_checkpointing]
    return product(layouts, kinds)


def _has_room(space: SearchSpace) -> bool:
    """Whether micro-batches of one window fit the memory, of plain-4d in the layouts that need the least."""
    jobs = [
        job
        for job in _jobs(space, "plain-4d")
        if job.activation_checkpointing == (space.checkpointing or "full")
        and job.layout.virtual_pp == dict(space.fixed).get("virtual_pp", 1)
    ]
    most = max((job.layout.tp for job in jobs), default=1)
    return any(fits(job) for job in jobs if job.layout.tp == most)


def _first_tried(bounded: tuple[float, Job]) -> tuple[bool, float]:
    most, job = bounded
    return job.packing.is_balanced and job.layout.pp > 1, -most


def _interleaved(job: Job) -> list[Job]:
    """``job``, if it may run slices with one stage per rank, with more stages per rank."""
    layout = job.layout
    if not job.packing.is_balanced or layout.pp == 1 or layout.virtual_pp > 1 or layout.schedule != "auto":
        return []
    more = (replace(layout, virtual_pp=stages, stage_blocks=None) for stages in _STAGES_PER_RANK[1:])
    return [replace(job, layout=one) for one in more if one.stages <= job.shape.layers]


def _packed(job: Job, lengths: DocumentLengths) -> list[StepPlan]:
    """The first steps of ``job``: the same in every layout, except for delayed documents and pools."""
    packing = job.packing
    if packing.is_balanced:  # it neither cuts nor delays documents, like other packing by the global batch
        packing = PackingConfig().changed(method="fixed_greedy", window=1, global_batch=job.global_batch)
    alone = replace(job, layout=Layout(), packing=packing)
    return [*islice(StepPlanner(alone, lengths).plans(_warm_up(alone)), _STEPS)]


def _rated(job: Job, lengths: DocumentLengths, steps: int, prices: DocumentPrices, warm_up: int = 0) -> Rated:
    rated = rate(job, lengths, steps, prices, warm_up)
    return Rated(job, rated.work_rate, sum(rated.step_tokens) / rated.seconds)


def _warm_up(job: Job) -> int:
    return _WARM_UP if job.packing.max_delay else 0
