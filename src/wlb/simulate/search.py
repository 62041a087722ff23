"""The search for the fastest layout of a preset, which ``check``, ``report`` and rivals share.

The search simulates the preset itself in every layout that fits the memory: all tp inside a node, cp, pp and dp, one to
eight stages per pipeline rank, weights kept or gathered again, and every kind of activation checkpointing. Each preset
has its own fastest layout, because a cost that hardly matters to one may be the main loss of another.

Layouts are choices like those of ``wlb.simulate.decide``, whose engine tries them in the order of a lower bound on
their time. It finds those near the fastest on one draw of the documents; the mean of several draws decides among them,
because a layout that balances badly may be lucky in a few steps. A draw is a shuffle of the corpus with the next seed.
All rates count the same work, priced on a single GPU.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, product
from statistics import fmean
from typing import Any, NamedTuple, get_args

import numpy as np

from wlb.documents.store.reader import DocumentLengths
from wlb.errors import UserError
from wlb.job.config import PackingConfig
from wlb.job.job import Job
from wlb.job.memory.walk import gib
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.schedules.layout import Layout, divisors
from wlb.settings import MOST_RANKS
from wlb.simulate.decide import (
    Bounded,
    Choice,
    Packed,
    by_memory,
    decide,
    fastest_first,
    holds,
    pool_choices,
    simulated_steps,
    warm_up,
    with_heads,
    with_stages,
)
from wlb.simulate.job import preset_sections, simulated_job
from wlb.simulate.rate import rate
from wlb.simulate.space import SearchSpace
from wlb.terminal import number_of
from wlb.workload.base import Checkpointing, DocumentPrices
from wlb.workload.phases import segment_seconds

DRAWS = 3
_NEAR, _POOLS_NEAR = 0.06, 0.01  # of the best on the first draw; pools have many choices
_NEARER = 0.03  # of the best on all draws: layouts that are rated on the other draws too
_POOLS_FAR = 0.1  # behind the best: more stages per pipeline rank do not catch up with that
_BOUNDED = 4  # steps for bounds
_LARGEST_TP = 32
_LEAST_EP, _MOST_EP = 8, 64
_MOST_TOKENS = 65_536  # of a micro-batch with several windows, where nobody says
_LARGEST_PP = 32
_STAGES_PER_RANK = (1, 2, 4, 8)

Told = Callable[[float, float], None]  # the share of a search that is done, and tokens per second of the fastest so far


class Rated(NamedTuple):
    """A job without any "auto", and seconds of work and tokens that it does per second: means of draws, if several."""

    job: Job
    work_rate: float
    tokens_per_second: float


class SearchResult(NamedTuple):
    """The fastest layouts, best first, and how many layouts were simulated."""

    ranking: list[Rated]
    layouts: int

    @property
    def job(self) -> Job:
        return self.ranking[0].job


@contextmanager
def without_collection() -> Iterator[None]:
    """Switch the garbage collector off: searches make many lists and no cycles, and it takes 30% of their time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def fastest_layout(
    space: SearchSpace,
    lengths: DocumentLengths,
    preset: str,
    *,
    draws: int = DRAWS,
    on_progress: Told = lambda done, rate: None,
) -> SearchResult:
    """The fastest layouts of ``preset`` on documents of ``lengths``.

    Raises ``UserError`` if no layout fits the memory, or none can run the global batch. If the layout is fixed and does
    not fit, the job that comes closest is returned, because the caller wants to know what it would do.
    """
    jobs = [*_jobs(space, preset)]
    if not jobs:
        raise _no_division(space)
    prices, balanced = jobs[0].work_prices, jobs[0].packing.is_balanced
    # A bound depends on the windows of a micro-batch; a pool may hold all documents of a step in one.
    of_windows = {job.packing.micro_batch_windows: job for job in jobs}
    plans = {windows: _packed(job, lengths) for windows, job in of_windows.items()}
    packed = {windows: [Packed.of_plan(one, whole=balanced) for one in found] for windows, found in plans.items()}
    work = float(segment_seconds(prices, np.concatenate([plan.table for plan in plans[min(plans)]])).sum())
    kinds = get_args(Checkpointing) if space.checkpointing is None else [space.checkpointing]
    near = _POOLS_NEAR if balanced else _NEAR
    tried, simulated, best = 0, dict[int, Choice](), 0.0
    roomy = set[tuple[Layout, int]]()  # less memory gains nothing there

    def choices(job: Job) -> Iterator[Bounded]:
        if job.packing.is_balanced:
            yield from () if _gains_little(job, simulated.values()) else pool_choices(job, lengths)
        elif (alike := (job.layout, job.packing.micro_batch_windows)) not in roomy:
            fitting = _with_room(job)
            if fitting.packing.max_length_factor == job.packing.max_length_factor and holds(fitting):
                roomy.add(alike)
            yield 0.0, fitting

    def told(choice: Choice) -> None:
        nonlocal tried, best
        tried += choice.rounds < 0
        if choice.rounds > 0:
            simulated[choice.number], best = choice, max(best, choice.tokens_per_second)
        on_progress(tried / (len(jobs) * len(kinds)), best)

    of_kinds = (replace(job, activation_checkpointing=kind) for job, kind in product(jobs, kinds))
    waiting = [
        Choice.open(job, least_seconds(job, packed[job.packing.micro_batch_windows]) / work, number, _turn(job))
        for number, job in enumerate(with_stages(job, lengths) for job in of_kinds)
    ]
    nearest = [
        Rated(by_memory(choice.job), 1 / choice.seconds, choice.tokens_per_second)
        for choice in fastest_first(waiting, choices, lengths, prices, near=near, on_popped=told)
    ]
    if not nearest:
        if space.layout is None:
            raise _no_memory(space, len(jobs))
        least = replace(jobs[0], activation_checkpointing=kinds[-1])
        return SearchResult([Rated(decide(_with_room(least), lengths), 0.0, 0.0)], 0)
    if len(nearest) == 1:
        return SearchResult(nearest, len(simulated))
    ranking: list[Rated] = []
    best_of_first = max(one.work_rate for one in nearest)
    for one in sorted(nearest, key=lambda one: -one.work_rate):
        if one.work_rate < (1 - _NEARER) * min([best_of_first, *(other.work_rate for other in ranking[:1])]):
            break
        others = (_rated(drawn(one.job, draw), lengths, prices) for draw in range(1, draws))
        _, *rates = zip(one, *others, strict=True)
        ranking.append(Rated(one.job, *map(fmean, rates)))
        ranking.sort(key=lambda one: -one.work_rate)
    return SearchResult(ranking, len(simulated))


def drawn(job: Job, draw: int) -> Job:
    """``job`` on another draw of its documents: shuffled with a later seed."""
    return replace(job, data=job.data.model_copy(update={"seed": job.data.seed + draw}))


def least_seconds(job: Job, steps: Sequence[Packed]) -> float:
    """A lower bound on the seconds that ``job`` takes for ``steps``, which are not dealt to ranks yet.

    The busiest pipeline rank computes its share of all micro-batches, with the collectives of tensor and expert
    parallelism, and waits for no peer. If packing or dealing depends on prices, and so on the layout, data-parallel
    ranks share the work evenly; else each has the micro-batches that it is dealt, and a named schedule fills and drains
    its pipeline.
    """
    layout = job.layout
    in_turn = job.packing.method == "sequential" and job.packing.assignment == "arrival"
    share = np.array([job.stage_shares[mine].sum() for mine in layout.rank_stages])
    has_head = np.array([job.head_shares[mine].sum() for mine in layout.rank_stages])
    of_steps = [step.blocks_and_heads(job) for step in steps]
    if not in_turn:
        blocks, head = (sum(float(each.sum()) for each in of_all) for of_all in zip(*of_steps, strict=True))
        return max(float((share * blocks + has_head * head).max()), (blocks + head) / layout.pp) / layout.dp_cp
    seconds = 0.0
    for of_blocks, of_head in of_steps:
        dealt_to = [slice(rank, None, layout.pools) for rank in range(layout.pools)]
        busy = [share * of_blocks[mine].sum() + has_head * of_head[mine].sum() for mine in dealt_to]
        shortest = float(of_blocks.min() * job.stage_shares.min()) * (not job.plans_operations)
        seconds += float((np.max(busy, axis=0) + shortest * np.arange(layout.pp)).max()) / layout.pool_size
    return seconds


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
        for stages in sorted({*_STAGES_PER_RANK, space.fixed.get("virtual_pp", 1)}) if pp > 1 else [1]:
            yield Layout(tp, cp, pp, dp, virtual_pp=stages)


def _layouts(space: SearchSpace, *, pooled: bool) -> Iterator[Layout]:
    """The layouts to try. With pools, cp is the smallest pool size, so one layout with cp 1 covers all sizes."""
    if space.layout is not None:
        yield space.layout
        return
    chosen = {name: choice for name, choice in space.fixed.items() if name in ("schedule", "weights", "head")}
    sizes = {name: size for name, size in space.fixed.items() if name not in {*chosen, "ep"}}
    if chosen.get("weights") == "gathered":
        sizes.setdefault("pp", 1)
    if pooled and not {"cp", "dp"} & sizes.keys():
        sizes["cp"] = 1
    for layout in meshes(space):
        held = space.shape.kv_heads % layout.tp == 0  # not every trainer can replicate a head over ranks
        if held and all(getattr(layout, name) == size for name, size in sizes.items()):
            for ep in _expert_groups(space, layout):
                yield replace(layout, **chosen | {"ep": ep} | ({} if layout.pp > 1 else {"head": "auto"}))


def _expert_groups(space: SearchSpace, layout: Layout) -> list[int]:
    """Numbers of GPUs that may share the experts, in whole tensor-parallel groups.

    The fixed one, or else 1 and 8 to 64; fewer than 8 if all GPUs of a stage do.
    """
    experts, gpus = space.shape.experts, layout.dp_cp * layout.tp
    count = experts.count if experts and not space.settings.get("profile") else 1
    sizes = [ep for ep in divisors(count) if gpus % ep == 0 and ep % layout.tp == 0]
    if (given := space.fixed.get("ep")) is not None:
        return [given] if given in {1, *sizes} else []
    return [1, *(ep for ep in sizes if ep > 1 and min(_LEAST_EP, gpus) <= ep <= _MOST_EP)]


def _jobs(space: SearchSpace, preset: str) -> Iterator[Job]:
    """``preset`` in every layout that can run the global batch."""
    packing, _ = preset_sections(preset, {})
    pooled = packing.is_balanced
    windows = _micro_batch_windows(space) if packing.reads("micro_batch_windows") else [1]
    for layout, together in product(_layouts(space, pooled=pooled), windows):
        each, rest = divmod(space.global_batch, layout.dp * together)
        if not pooled and (rest or each < layout.pp):
            continue
        job = job_on(space, preset, layout, **{"micro_batch_windows": together} if together > 1 else {})
        if job is not None:
            yield from with_heads(job)


def _micro_batch_windows(space: SearchSpace) -> list[int]:
    """The numbers of windows in a micro-batch to try: those given, else one.

    Experts gain from more tokens, and so do blocks that a GPU computes faster than a host launches their kernels.
    """
    if space.micro_batch_windows is not None:
        return [space.micro_batch_windows]
    one, prices = space.context_window, space.work_prices
    launching = sum(float(prices.host_seconds(one, phase)) for phase in ("forward", "backward"))
    gains = space.shape.experts is not None or float(prices.blocks_seconds(one)) < launching
    most = max(1, _MOST_TOKENS // one) if gains else 1
    return [windows for windows in (1, 2, 4, 8, 16) if windows <= most]


def job_on(space: SearchSpace, system: str, layout: Layout, **packing: Any) -> Job | None:
    """The job of ``system`` in one of ``meshes``; None if it cannot run.

    Raises ``UserError`` instead if the layout was given.
    """
    packing = {"global_batch": space.global_batch} | packing
    try:
        job = simulated_job(
            space.shape, space.context_window, system, hardware=space.hardware, packing=packing, **vars(layout)
        )
        return replace(job, **space.settings)
    except UserError:
        if space.layout is not None:
            raise
        return None


def _turn(job: Job) -> int:
    """When to try ``job``: first without a pipeline, whose level steps are hard to beat, last with more stages."""
    pipeline = job.packing.is_balanced and job.layout.pp > 1
    return pipeline + (pipeline and job.layout.virtual_pp > 1 and job.layout.schedule == "auto")


def _gains_little(job: Job, simulated: Iterable[Choice]) -> bool:
    """Whether more stages per pipeline rank gain too little: slices leave few bubbles to interleave."""
    if _turn(job) < 2:
        return False
    fastest = min((one.seconds for one in simulated), default=math.inf)

    def kind(of: Job) -> tuple[int, int, str]:
        return of.layout.tp, of.layout.pp, of.activation_checkpointing

    alike = [one.seconds for one in simulated if one.turn == 1 and kind(one.job) == kind(job)]
    return min(alike, default=0.0) > fastest / (1 - _POOLS_FAR)


def _with_room(job: Job) -> Job:
    """``job`` with weights decided, and with the largest L_max up to its own that fits, or the smallest."""
    if job.packing.is_balanced or not job.packing.reads("max_length_factor"):
        return by_memory(job)
    fitting = by_memory(job.with_length_factor("auto"))
    factors = (float(one.packing.max_length_factor) for one in (job, fitting))
    return fitting.with_length_factor(min(factors))


def _packed(job: Job, lengths: DocumentLengths) -> list[StepPlan]:
    """The first steps of ``job``: the same in every layout, except for delayed documents and pools."""
    packing = job.packing
    if packing.is_balanced:  # it neither cuts nor delays documents, like other packing by the global batch
        packing = PackingConfig().changed(method="fixed_greedy", window=1, global_batch=job.global_batch)
    alone = replace(job, layout=Layout(), packing=packing)
    return [*islice(StepPlanner(alone, lengths).plans(warm_up(alone)), _BOUNDED)]


def _rated(job: Job, lengths: DocumentLengths, prices: DocumentPrices) -> Rated:
    rated = rate(job, lengths, simulated_steps(job, lengths), prices, warm_up(job))
    return Rated(job, rated.work_rate, rated.tokens_per_second)


def _no_memory(space: SearchSpace, tried: int) -> UserError:
    return UserError(
        f"no layout of {_given(space)} with {gib(space.hardware.memory_bytes)} GiB each fits this model and window of "
        f"{space.context_window} tokens ({tried} tried); give more --gpus, a shorter --context-window or --hardware "
        f"with more memory{_or_free(space)}"
    )


def _no_division(space: SearchSpace) -> UserError:
    step = f"a step of {number_of(space.global_batch, 'window')} of {space.context_window} tokens"
    return UserError(
        f"{_given(space)} cannot share {step}: dp must divide the windows and leave each rank at least pp of them, tp "
        f"must divide a node ({space.hardware.node_size} GPUs) and the heads, cp is at most {MOST_RANKS} and pp at "
        f"most {_LARGEST_PP}, ep must be 1 or a multiple of tp that divides a stage; give another number of --gpus or "
        f"another --batch-tokens{_or_free(space)}"
    )


def _given(space: SearchSpace) -> str:
    fixed = ", ".join(f"{name} = {size}" for name, size in space.fixed.items())
    return number_of(space.gpus, "GPU") + (f" with {fixed}" if fixed else "")


def _or_free(space: SearchSpace) -> str:
    return f", or leave out {' and '.join(space.fixed)}" if space.fixed else ""
