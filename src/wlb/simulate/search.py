"""The fastest layout of a preset: the one search of ``check``, ``simulate --search``, ``serve``, ``report`` and rivals.

A preset is rated itself, in every layout that fits the memory: all tp inside a node, cp, pp and dp, one, two or four
stages a pipeline rank, and every kind of activation checkpointing. No other preset stands in for it, as each has its
own fastest layout: what costs one little may be all that another loses.

Layouts are tried in the order of a bound that no plan can beat (``least_seconds``), until that falls behind what was
found. The nearest ones are then rated over more steps, and the last few over other draws of the documents: a draw is
another order of the corpus, that of the next seed. The mean of the draws decides, as a few steps of a layout that
balances badly may be lucky ones. Speed is at equal work, priced for all by a single GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from statistics import fmean
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.reader import DocumentLengths
from wlb.errors import UserError
from wlb.job.config import PackingConfig
from wlb.job.job import Job
from wlb.job.memory.fit import fits, largest_factor
from wlb.job.planner import StepPlanner
from wlb.schedules.layout import Layout
from wlb.simulate.decide import blocks_and_head, decide, with_stages
from wlb.simulate.job import preset_sections, simulated_job
from wlb.simulate.no_layout import no_division, no_memory
from wlb.simulate.rate import rate
from wlb.simulate.space import BATCH_TOKENS as BATCH_TOKENS
from wlb.simulate.space import SearchSpace as SearchSpace
from wlb.simulate.space import search_space as search_space
from wlb.workload.base import Checkpointing, DocumentPrices
from wlb.workload.phases import segment_seconds

DRAWS = 3
# Layouts are rated on steps of so many windows, then those that are near the fastest on more of them, at most _STEPS
# steps, and in the end those not _NEARER slower than the best so far on the other draws too. A rate is less certain
# the fewer windows it is of: in _CERTAIN windows those within _NEAR are near, in fewer those within up to _FARTHEST.
_FIRST_WINDOWS, _WINDOWS = 16, 256
_STEPS = 4
_NEAR, _FARTHEST, _NEARER = 0.1, 0.15, 0.03
_CERTAIN = 64
_POOLS_NEAR = 0.01  # whose choices are many, and dear to simulate
_WARM_UP = 4  # steps that are planned before those that count, where documents wait; not when layouts are first rated
_LARGEST_TP = 32
_LARGEST_PP = 32
_STAGES_PER_RANK = (1, 2, 4)

Adapt = Callable[[Job], Job]


class Rated(NamedTuple):
    """A job with nothing left "auto", and the seconds of work that it does in a second: the mean of the draws."""

    job: Job
    work_rate: float


@dataclass(frozen=True)
class SearchResult:
    """The layouts that were nearest to the fastest, which is the first; of how many that fit the memory."""

    ranking: list[Rated]
    layouts: int

    @property
    def job(self) -> Job:
        return self.ranking[0].job


def fastest_layout(
    space: SearchSpace, lengths: DocumentLengths, preset: str, *, adapt: Adapt = lambda job: job, draws: int = DRAWS
) -> SearchResult:
    """``preset`` in the layouts in which it is fastest on documents of ``lengths``; ``adapt`` completes each job.

    Raises ``UserError`` where no layout fits the memory, or none can run the global batch. Of a layout that is fixed
    the job that comes nearest to fitting is returned, as whoever fixed it wants to know what it would do.
    """
    untried = [with_stages(adapt(job), lengths) for job in _jobs(space, preset)]
    if not untried:
        raise no_division(space, _LARGEST_TP, _LARGEST_PP, lambda other: any(_jobs(other, preset)))
    segments, prices = _segments(untried[0], lengths), untried[0].work_prices
    work = float(segment_seconds(prices, segments).sum())
    bounded = sorted(((work / least_seconds(job, segments), job) for job in untried), key=lambda pair: -pair[0])
    first, more = (max(1, min(_STEPS, windows // space.micro_batches)) for windows in (_FIRST_WINDOWS, _WINDOWS))
    near = min(_FARTHEST, _NEAR * math.sqrt(_CERTAIN / (first * space.micro_batches)))
    found: list[Rated] = []
    settled: set[Layout] = set()  # with the cheapest checkpointing that leaves nothing to gain from more
    for most, untried_job in bounded:
        if found and most < found[0].work_rate:
            break
        if untried_job.layout in settled:
            continue
        job = _fitting(untried_job, lengths, (1 - _POOLS_NEAR) * found[0].work_rate if found else 0.0)
        if job is None:
            continue
        if job.pools is None and (job.packing.max_length_factor == untried_job.packing.max_length_factor):
            settled.add(job.layout)
        found.append(_rated(job, lengths, first, prices))
        found.sort(key=lambda one: -one.work_rate)
    if not found:
        if space.layout is not None:
            least = untried[-1]  # with full checkpointing
            if least.pools is None:
                least = least.with_length_factor(least.least_length_factor)
            return SearchResult([Rated(decide(least, lengths), 0.0)], 0)
        raise no_memory(space, len(untried), _has_room)
    nearest = [one for one in found if one.work_rate >= (1 - near) * found[0].work_rate]
    if more > first or any(_warm_up(one.job) for one in nearest):
        nearest = [_rated(one.job, lengths, more, prices, _warm_up(one.job)) for one in nearest]
    ranking: list[Rated] = []
    for one in sorted(nearest, key=lambda one: -one.work_rate):
        if ranking and one.work_rate < (1 - _NEARER) * ranking[0].work_rate:
            break
        others = (_rated(drawn(one.job, draw), lengths, more, prices, _warm_up(one.job)) for draw in range(1, draws))
        ranking.append(Rated(one.job, fmean(rated.work_rate for rated in (one, *others))))
        ranking.sort(key=lambda one: -one.work_rate)
    return SearchResult(ranking, len(found))


def drawn(job: Job, draw: int) -> Job:
    """``job`` on another draw of its documents: in the order of a later seed."""
    return replace(job, data=job.data.model_copy(update={"seed": job.data.seed + draw}))


def least_seconds(job: Job, segments: NDArray[np.int64]) -> float:
    """What ``job`` takes for ``segments`` at least, in however many steps, however they are packed and sharded.

    Its busiest pipeline rank computes its share of all of them, as if in one micro-batch and spread evenly over dp and
    cp, exchanging and waiting for nothing.
    """
    blocks, head = blocks_and_head(job, segments[:, 2])
    share = [job.stage_shares[mine].sum() for mine in job.layout.rank_stages]
    last = [job.layout.stages - 1 in mine for mine in job.layout.rank_stages]
    busiest = max(part * blocks + has_head * head for part, has_head in zip(share, last, strict=True))
    return float(busiest / job.layout.replicas)


def layout_of(job: Job) -> str:
    """A layout in one line."""
    layout = job.layout
    interleaved = f" x {layout.virtual_pp} stages" if layout.virtual_pp > 1 else ""
    return f"tp {layout.tp} cp {layout.cp} pp {layout.pp}{interleaved} dp {layout.dp}"


def meshes(space: SearchSpace) -> Iterator[Layout]:
    """All tp that divide a node, and all cp and pp, that divide the GPUs; dp is the rest of them.

    A pipeline comes with one, two and four stages a rank. Whether a model, or a global batch, can be cut that way is
    not asked.
    """
    small = [size for size in range(1, math.isqrt(space.gpus) + 1) if space.gpus % size == 0]
    sizes = sorted({*small, *(space.gpus // size for size in small)})
    tps = [tp for tp in sizes if tp <= _LARGEST_TP and space.hardware.node_size % tp == 0]
    for tp, cp, pp in product(tps, sizes, [pp for pp in sizes if pp <= _LARGEST_PP]):
        dp, rest = divmod(space.gpus, tp * cp * pp)
        if rest or not dp:
            continue
        yield Layout(tp, cp, pp, dp)
        if pp > 1:
            for stages in _STAGES_PER_RANK[1:]:
                yield Layout(tp, cp, pp, dp, virtual_pp=stages)


def _layouts(space: SearchSpace, *, pooled: bool) -> Iterator[Layout]:
    """Those to try. In pools cp is the least size of a pool, so without it all sizes are tried in one layout."""
    fixed = dict(space.fixed)
    if space.layout is not None:
        yield space.layout
        return
    if pooled and not {"cp", "dp"} & fixed.keys():
        fixed["cp"] = 1
    for layout in meshes(space):
        held = space.shape.kv_heads % layout.tp == 0  # no head on several ranks, which not every trainer can
        if held and all(getattr(layout, name) == size for name, size in fixed.items()):
            yield layout


def _jobs(space: SearchSpace, preset: str) -> Iterator[Job]:
    """``preset`` in every layout that can run the global batch, with every kind of activation checkpointing."""
    pooled = preset_sections(preset, {})[0].pools("auto") is not None
    for layout in _layouts(space, pooled=pooled):
        micro_batches, rest = divmod(space.micro_batches, layout.dp)
        if pooled:
            job = job_on(space, preset, layout, 1, global_batch=space.micro_batches)
        else:
            job = None if rest or micro_batches < layout.pp else job_on(space, preset, layout, micro_batches)
        if job is not None:
            yield from (replace(job, activation_checkpointing=kind) for kind in get_args(Checkpointing))


def job_on(space: SearchSpace, system: str, layout: Layout, micro_batches: int, **packing: int) -> Job | None:
    """The job of ``system`` on one of ``meshes``, with so many micro-batches a rank; None where it cannot be so.

    Of a layout that was given the ``UserError`` says why.
    """
    given: dict[str, Any] = {"hardware": space.hardware, "packing": packing, "micro_batches": micro_batches} | vars(
        layout
    )
    try:
        return simulated_job(space.shape, space.context_window, system, **given)
    except UserError:
        if space.layout is not None:
            raise
        return None


def _fitting(job: Job, lengths: DocumentLengths, least_rate: float) -> Job | None:
    """``job`` decided, with its L_max or the largest below it that fits the memory; None where it does not fit.

    Pools that do not fit, or work at less than ``least_rate``, are not looked at.
    """
    if job.pools is None and job.packing.reads("max_length_factor"):
        room = largest_factor(job)
        return None if room is None else job.with_length_factor(min(float(job.packing.max_length_factor), room))
    try:
        decided = decide(job, lengths, least_rate=least_rate)
    except UserError:  # no pool can run the global batch in this pipeline
        return None
    return decided if fits(decided) else None


def _has_room(space: SearchSpace) -> bool:
    """Whether micro-batches of one window fit the memory, of plain-4d in the layouts that need the least."""
    jobs = [
        job
        for job in _jobs(space, "plain-4d")
        if job.activation_checkpointing == "full" and job.layout.virtual_pp == dict(space.fixed).get("virtual_pp", 1)
    ]
    most = max((job.layout.tp for job in jobs), default=1)
    return any(fits(job) for job in jobs if job.layout.tp == most)


def _segments(job: Job, lengths: DocumentLengths) -> NDArray[np.int64]:
    """What the first steps of ``job`` train: the same in every layout, but for documents that wait."""
    packing = job.packing
    if job.pools is not None:  # in which no document is cut or waits, as in other packing by the global batch
        packing = PackingConfig().changed(method="fixed_greedy", window=1, micro_batches=job.global_batch)
    alone = replace(job, layout=Layout(), packing=packing)
    plans = StepPlanner(alone, lengths).plans(_warm_up(alone))
    return np.concatenate([plan.table for plan in islice(plans, _STEPS)])


def _rated(job: Job, lengths: DocumentLengths, steps: int, prices: DocumentPrices, warm_up: int = 0) -> Rated:
    return Rated(job, rate(job, lengths, steps, prices, warm_up).work_rate)


def _warm_up(job: Job) -> int:
    return _WARM_UP if job.packing.max_delay else 0
