"""Decides what a job leaves "auto": first its pools, by simulation, then weights and L_max, by its memory.

Trainer, dry run, simulator, batches, report and rivals call it, so that the same job runs everywhere. The search of
layouts (``wlb.simulate.search``) has the same engine, ``fastest_first``: every choice has a lower bound of its
step time, the most promising one is simulated, and one that is still ahead after all steps is settled.

``decide`` chooses the size of pools, their number of micro-batches, the grouping of documents and where the output head
is; without a pipeline it may choose level steps. More micro-batches fill a pipeline better, and larger pools hold more
of a document. But a long document is alone in a small micro-batch, and K/V traffic goes further in large pools. So the
fastest choice depends on the whole job and its documents. Choices that do not fit into memory come last. In a pipeline,
choices use slices; whole documents are tried with the best choice, because they exchange less.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from wlb.documents.order import ByIdentity, DataConfig
from wlb.documents.store.reader import DocumentLengths
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.job.memory.fit import fits, fits_in_full, largest_factor, starving, too_large
from wlb.job.planner import check_documents_together, documents_together
from wlb.packing.options import Grouping
from wlb.packing.plan import StepPlan
from wlb.schedules.layout import dealt_blocks, divisors
from wlb.settings import MOST_MICRO_BATCHES
from wlb.sharding import price_shards
from wlb.sharding.pieces import Shards
from wlb.simulate.costs import JobCosts
from wlb.simulate.filling import global_batches
from wlb.simulate.rate import rate
from wlb.simulate.step import Array, Steps
from wlb.workload import Costs
from wlb.workload.base import DocumentPrices

_WINDOWS = 256  # of a step; for a larger global batch, a part of it decides
_FILLINGS = (1, 1.5, 2, 2.5, 3, 4, 6)  # micro-batches of a pool for each of its pipeline ranks
_SLICED_FILLINGS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)  # the same with slices
_FEWEST = (1, 1.15, 1.5)  # times the fewest micro-batches that fit, if the usual numbers do not fit into memory
_LEAST_WINDOWS, _LEAST_SLICED = 1 / 2, 1 / 32  # in a mean micro-batch, and where long documents are cut
_FEWER_BUBBLES = 0.1  # share of bubbles saved by light micro-batches at both ends; measured on random jobs
_FORWARD_SHARE = 0.3  # of the computing of a micro-batch: just under a third if attention takes most of it
# A choice is simulated for _FIRST windows, and for _MOST if it is still ahead, in at most _STEPS steps with at most
# _DOCUMENTS documents. The fewer windows, the less certain is the first rate: it may be behind by _ONE_STEP with
# _CERTAIN windows, and by up to _FARTHEST. Balanced steps differ less.
_FIRST, _MOST, _STEPS, _DOCUMENTS = 16, 256, 4, 65_536
_ONE_STEP, _FARTHEST, _CERTAIN = 0.1, 0.15, 64
_ONE_BALANCED, _MOST_BALANCED = 0.08, 128
_FAR = 0.05  # behind what is wanted, with the margin of the first rate
_WARM_UP = 4  # steps planned before the counted ones if documents may wait; none in the first rate

Bounded = tuple[float, Job]  # seconds per second of work that the job takes at least


class Choice(NamedTuple):
    """A job and its seconds per second of work: a lower bound, or simulated. Choices sort most promising first."""

    turn: int  # those of an earlier turn come first, to rule out later ones
    exceeds: bool  # the memory
    no_room: bool  # for some document, which would wait for the next step
    seconds: float
    rounds: int  # of simulation: 1 for the first steps, 2 for all; -1 for a job that leaves something open
    number: int  # so that jobs are never compared
    tokens_per_second: float
    job: Job

    @classmethod
    def open(cls, job: Job, seconds: float, number: int, turn: int = 0) -> Self:
        """Everything that ``job`` leaves open, which takes at least ``seconds``."""
        return cls(turn, False, False, seconds, -1, number, 0.0, job)


def decide(job: Job, lengths: DocumentLengths, *, lock_step: bool = False) -> Job:
    """``job`` with nothing left "auto"; the same job and documents always give the same result.

    Pools are those given, or the fastest on documents of ``lengths``. Weights are kept if ``job.memory_limit`` allows
    it. L_max becomes the largest that it allows. ``lock_step`` excludes level steps, for loops with fixed
    context-parallel groups. Raises ``UserError`` if given pools cannot run, if no pools can, if a step has too many
    documents, or if L_max is "auto" and memory does not hold one context window. Pools and an L_max that do not fit
    into memory are not refused.
    """
    jobs = [job]
    if len(lengths):
        if job.packing.is_balanced or job.layout.pp > 1:  # else no document is read here
            check_documents_together(job, lengths)
        jobs = [with_stages(one, lengths) for one in with_heads(job)]
    if lock_step and job.levels_steps:
        raise UserError(
            "grouping = 'level' gives each rank its own number of micro-batches, which this loop cannot run; "
            "leave it out"
        )
    nothing_open = len(jobs) == 1 and job.pools_decided
    decided = by_memory(jobs[0] if nothing_open else _with_pools(jobs, lengths, lock_step))
    if not job.packing.is_balanced and job.packing.max_length_factor == "auto" and (problem := too_large(decided)):
        raise UserError(problem)
    return decided


def by_memory(job: Job) -> Job:
    """``job`` with weights kept, if that fits, and the largest L_max that fits, if it is "auto"; or the smallest."""
    job = _with_weights(job)
    if job.packing.max_length_factor != "auto":
        return job
    return job.with_length_factor(largest_factor(job) or job.least_length_factor)


def with_heads(job: Job) -> list[Job]:
    """``job`` with its output head on the last stage and dealt, if that is open; or only as it is."""
    if job.layout.pp == 1 or job.layout.head != "auto" or not job.packing.is_balanced:
        return [job]
    return [replace(job, layout=replace(job.layout, head=head)) for head in ("dealt", "last")]


def with_stages(job: Job, lengths: DocumentLengths) -> Job:
    """``job`` with its blocks dealt to pipeline stages by the seconds of blocks, and of an output head on the last.

    Seconds are for the documents of one global batch, or for a part of a large one.
    """
    if job.layout.pp == 1 or job.layout.stage_blocks is not None:
        return job
    windows = min(job.global_batch, _WINDOWS)
    documents = _first_documents(ByIdentity(lengths), job.data, windows * job.context_window, 1)
    (blocks,), (head,) = Packed([documents]).blocks_and_heads(job)
    on_last = float(head) * job.head_shares[-1]
    in_blocks = round(on_last * job.shape.layers / float(blocks), 2)  # so that machines agree
    return replace(job, layout=replace(job.layout, stage_blocks=dealt_blocks(job.shape.layers, job.layout, in_blocks)))


class Packed:
    """Micro-batches before a job runs them, each as the lengths of its documents."""

    def __init__(self, micro_batches: Sequence[NDArray[np.int64]]) -> None:
        self._documents, self._count = np.concatenate(micro_batches), len(micro_batches)
        self._owner = np.repeat(np.arange(self._count), [*map(len, micro_batches)])
        self._known: dict[Costs, tuple[Array, Array]] = {}

    @classmethod
    def of_plan(cls, plan: StepPlan, *, whole: bool = False) -> Self:
        """The micro-batches of ``plan``, or the ``whole`` step as one."""
        return cls([plan.table[:, 2]] if whole else [np.array(one.lengths, np.int64) for one in plan.micro_batches])

    def blocks_and_heads(self, job: Job) -> tuple[Array, Array]:
        """Seconds of a tensor-parallel group in all blocks and in the output head; shape (micro-batches,).

        They are the same for all cp, pp and dp.
        """
        costs = job.costs
        if costs not in self._known:
            again = costs.recomputed != "none"
            lengths, places = np.unique(self._documents, return_inverse=True)
            seconds = np.asarray(costs.attention_seconds(lengths))[places]
            attention, tokens = (np.bincount(self._owner, of, self._count) for of in (seconds, self._documents))
            exchanged = costs.tp_seconds(tokens) + costs.expert_seconds(tokens)
            blocks = attention + costs.blocks_seconds(tokens) + (2 + again) * exchanged
            blocks += again * costs.blocks_seconds(tokens, "forward")
            self._known[costs] = blocks, np.asarray(costs.head_seconds(tokens))
        return self._known[costs]


def fastest_first(
    waiting: list[Choice],
    choices: Callable[[Job], Iterable[Bounded]],
    lengths: DocumentLengths,
    work_prices: DocumentPrices,
    *,
    near: float = 0.0,
    exceeding: bool = False,
    may_be_whole: bool = True,
    on_popped: Callable[[Choice], None] = lambda choice: None,
) -> Iterator[Choice]:
    """The best of the ``choices`` for each open job in ``waiting``: the fastest of a turn, then those ``near`` it.

    Choices that do not fit the memory are left out or, if ``exceeding``, come last.
    """
    heapify(waiting)
    number, most_seconds, behind, starved = count(len(waiting)), math.inf, set[object](), set[int]()
    while waiting:
        best = heappop(waiting)
        job = best.job
        layout, packing = replace(job.layout, pool=None, weights="auto"), job.packing
        of_layout = layout, packing.micro_batch_windows, job.activation_checkpointing
        alike = of_layout, job.layout.pool, packing.grouping
        # The margin of the first rate leaves room enough to be near.
        wanted = most_seconds * (1 - near if best.rounds == 1 else 1)
        if best.seconds > wanted or of_layout in behind or alike in behind:
            continue
        on_popped(best)
        if best.rounds < 0:
            for bound, one in choices(job):
                found = best._replace(seconds=max(bound, best.seconds), rounds=0, number=next(number), job=one)
                heappush(waiting, found)
        elif best.rounds == 0 and not best.exceeds and not holds(job):
            if exceeding:
                heappush(waiting, best._replace(exceeds=True))
        elif best.rounds == 0 and best.number not in starved and job.plans_operations:
            starved.add(best.number)
            filled = 1 + (layout.pp - 1) / (layout.virtual_pp * job.rank_micro_batches)  # part of the bound already
            heappush(waiting, best._replace(seconds=best.seconds * max(1.0, starving(job) / filled)))
        elif best.rounds < 2:
            simulated = _simulated(best, lengths, work_prices)
            heappush(waiting, simulated)
            if simulated.seconds > (1 + _FAR) * most_seconds:  # other numbers of micro-batches are not so much faster
                behind.add(alike)
        else:
            behind.add(of_layout)
            best = _whole_documents(best, lengths, work_prices) if may_be_whole else best
            most_seconds = min(most_seconds, best.seconds / (1 - near))
            yield best


def _simulated(choice: Choice, lengths: DocumentLengths, prices: DocumentPrices) -> Choice:
    """``choice`` simulated for the first steps, less a margin for the others; or for all, if it has the first."""
    job = by_memory(_part_of(choice.job))
    windows, balanced, most = job.global_batch, job.packing.is_balanced, simulated_steps(job, lengths)
    first = 1 if balanced else max(1, min(most, _FIRST // windows))
    is_last = choice.rounds == 1 or (first == most and not warm_up(job))
    steps = most if is_last else first
    rated = rate(job, lengths, steps, prices, warm_up(job) if is_last else 0)
    margin = _ONE_BALANCED if balanced else min(_FARTHEST, _ONE_STEP * math.sqrt(_CERTAIN / (steps * windows)))
    return choice._replace(
        no_room=is_last and balanced and rated.tokens < steps * windows * job.context_window,
        seconds=(1 if is_last else 1 - margin) / rated.work_rate,
        rounds=1 + is_last,
        tokens_per_second=rated.tokens_per_second,
    )


def simulated_steps(job: Job, lengths: DocumentLengths) -> int:
    """The number of steps that decide between choices."""
    most = _MOST_BALANCED if job.packing.is_balanced else _MOST
    return max(1, min(_STEPS, most // job.global_batch, _DOCUMENTS // max(1, documents_together(job, lengths))))


def warm_up(job: Job) -> int:
    """The number of steps to plan before the counted ones."""
    return _WARM_UP if job.packing.max_delay else 0


def _whole_documents(choice: Choice, lengths: DocumentLengths, prices: DocumentPrices) -> Choice:
    """``choice``, or the same with whole documents instead of slices, if that is faster."""
    job = choice.job
    if not job.slices_documents or by_memory(job).max_tokens < job.context_window:
        return choice
    whole = replace(job, packing=job.packing.changed(grouping="even"))
    return min(choice, _simulated(choice._replace(rounds=1, job=whole, number=-1), lengths, prices))


def _with_pools(jobs: Sequence[Job], lengths: DocumentLengths, lock_step: bool) -> Job:
    """The fastest of ``jobs``, which differ in where the head is, with the pools that are given or the fastest."""
    job = jobs[0]
    layout, given = job.layout, job.packing.rank_micro_batches
    if len(jobs) == 1 and layout.pool is not None and given != "auto":
        return job.with_pools(_usual_grouping(job), layout.pool, given)
    if job.packing.grouping == "level":  # leaves no choice, and a stream has no lengths to simulate
        return job.with_pools("level", layout.dp_cp)
    choices, may_be_whole = partial(pool_choices, lengths=lengths, lock_step=lock_step), job.packing.grouping == "auto"
    waiting = [Choice.open(one, 0.0, number) for number, one in enumerate(jobs)]
    search = fastest_first(waiting, choices, lengths, job.work_prices, exceeding=True, may_be_whole=may_be_whole)
    if found := next(search, None):
        return found.job
    if given != "auto":
        job.with_pools(_usual_grouping(job), layout.pool or layout.dp_cp, given)  # says what it refuses
    raise UserError(
        f"no pool of dp x cp = {layout.dp_cp} ranks can run a global batch of {job.global_batch} context windows "
        "in this pipeline; give pool and rank_micro_batches to learn why"
    )


def pool_choices(job: Job, lengths: DocumentLengths, *, lock_step: bool = False) -> Iterator[Bounded]:
    """Every size of pools, number of micro-batches and grouping that ``job`` leaves open, with lower bounds."""
    packing, layout = job.packing, job.layout
    free = (packing.grouping, packing.rank_micro_batches) == ("auto", "auto") and not lock_step
    free &= job.phases is None and job.packed_by is None  # which level steps cannot price
    sizes = [layout.cp * number for number in divisors(layout.dp)] if layout.pool is None else [layout.pool]
    sizes = [size for size in sizes if size % layout.ep_ranks == 0]
    if free and layout.pp == 1 and layout.keeps_weights and layout.dp_cp in sizes:
        yield 0.0, job.with_pools("level", layout.dp_cp)
    least = _LeastSeconds(job, lengths)
    for size in sizes:
        yield from ((least.of(one), one) for one in _with_counts(job, size))


def _with_counts(job: Job, size: int) -> list[Job]:
    """Pools of this size with the usual numbers of micro-batches, or with others if none of these fits the memory."""
    pp, pools, parts = job.layout.pp, job.layout.dp_cp // size, _parts(job)
    slices = _usual_grouping(job) == "slices"
    if (given := job.packing.rank_micro_batches) != "auto":
        return _that_run(job, size, [given])
    most = int(min(job.global_batch / (_LEAST_SLICED if slices else _LEAST_WINDOWS), MOST_MICRO_BATCHES) / pools)
    of_part = [round(filling * pp) for filling in (_SLICED_FILLINGS if slices else _FILLINGS)]
    counts = [-(-one * parts // pp) * pp if parts > 1 else one for one in of_part]  # a pipeline may need whole rounds
    counts = [one for one in counts if one <= most] or counts[:1]
    usual = _that_run(job, size, counts)
    more = range(-(-counts[-1] // pp) * pp, most + 1, pp)
    if any(holds(one) for one in (usual[:1] + usual[-1:])):  # the fewest need no gathered gradients, the most least
        return usual

    def run(one: int) -> bool:
        return any(map(holds, _that_run(job, size, [one])))

    others = of_part if parts > 1 else []
    if more:
        fewest = more[bisect_left(more[:-1], True, key=run)]
        others += [min(more[-1], math.ceil(times * fewest / pp) * pp) for times in _FEWEST]
    return _that_run(job, size, others) if others else usual


def _that_run(job: Job, size: int, counts: Iterable[int]) -> list[Job]:
    """Jobs with these numbers of micro-batches that can run."""
    jobs = []
    for one in sorted(set(counts)):
        with suppress(UserError):  # the pipeline needs whole rounds, or L_max is too small
            jobs.append(_with_weights(job.with_pools(_usual_grouping(job), size, one)))
    return jobs


def _usual_grouping(job: Job) -> Grouping:
    """The grouping of ``job`` or, if it is "auto", slices where possible and else even."""
    may_slice = job.plans_operations and job.phases is None
    return job.packing.grouping if job.packing.grouping != "auto" else "slices" if may_slice else "even"


def _parts(job: Job) -> int:
    """The number of equal parts of a global batch, of which one decides."""
    return -(-job.global_batch // _WINDOWS) if job.packing.is_balanced else 1


def _part_of(job: Job) -> Job:
    """``job`` with one of ``_parts`` of its global batch, and of its micro-batches."""
    if (parts := _parts(job)) == 1:
        return job
    packing, pp = job.packing.changed(global_batch=job.global_batch // parts), job.layout.pp
    if not job.levels_steps:
        packing = packing.changed(rank_micro_batches=-(-job.rank_micro_batches // (parts * pp)) * pp)
    return replace(job, packing=packing)


class _LeastSeconds:
    """Lower bounds of pools of ``job``: ranks of a stage share the work evenly and exchange nothing."""

    def __init__(self, job: Job, lengths: DocumentLengths) -> None:
        self._known = dict[tuple[int, str], float]()
        windows = job.global_batch // _parts(job)
        self._steps = max(1, min(_STEPS, _MOST_BALANCED // windows))
        self._documents = _first_documents(ByIdentity(lengths), job.data, windows * job.context_window, self._steps)
        self._alone = _priced_alone(ByIdentity(self._documents), job.costs, job.sharding.strategy)
        self._work = float(job.work_prices.document_seconds(self._documents).sum())

    def of(self, job: Job) -> float:
        """Seconds per second of work of one of its pools."""
        filled = self._least_filled(_part_of(job))
        if (key := (filled, job.layout.weights)) not in self._known:
            self._known[key] = self._seconds(job, filled)
        return self._known[key]

    def _least_filled(self, job: Job) -> int:
        """Non-empty micro-batches of a pool, if each holds as many tokens as the longest document that is not cut."""
        if job.slices_documents:
            return job.rank_micro_batches
        tokens, longest = float(self._documents.sum()), float(self._documents.max())
        rounds = math.ceil(tokens / longest / (self._steps * job.layout.pools * job.layout.pp))
        return min(job.rank_micro_batches, rounds * job.layout.pp)

    def _seconds(self, job: Job, micro_batches: int) -> float:
        layout, alone = job.layout, self._alone
        shares = self._steps * layout.dp_cp * micro_batches
        forward, backward = alone.attention_forward / shares, alone.attention_backward / shares
        share = alone._replace(tokens=alone.tokens // shares, attention_forward=forward, attention_backward=backward)
        everywhere = share.map(lambda column: np.repeat(column, micro_batches, axis=0))  # all ranks are equal
        steps = Steps.of_shards(everywhere.reshaped(1, 1, micro_batches), JobCosts(job))
        filling = (layout.pp - 1) / (layout.virtual_pp * micro_batches)  # filling and draining, over computing
        if job.plans_operations:  # gradients of weights fill the time of draining
            filling *= _FORWARD_SHARE if job.splits_backward else 1.0
            steps = replace(steps, modelled=steps.modelled - {"bubbles"})
            of_stages = steps.stages.both[0, 0].sum(axis=1)
            busy = [of_stages[mine].sum() for mine in layout.rank_stages]
            filling = (1 + filling) * max(1.0, max(busy) * layout.pp / (sum(busy) + float(steps.heads.sum()))) - 1
        seconds = float(steps.seconds[0]) * (1 + filling * job.plans_operations)
        return (1 - _FEWER_BUBBLES * filling / (1 + filling)) * seconds * self._steps / self._work


@lru_cache(maxsize=16)
def _first_documents(lengths: ByIdentity, data: DataConfig, tokens: int, steps: int) -> NDArray[np.int64]:
    """Lengths of the documents of the first ``steps`` steps of ``tokens``."""
    return np.concatenate([*islice(global_batches(lengths.lengths, data, tokens), steps)])


@lru_cache(maxsize=64)
def _priced_alone(documents: ByIdentity, costs: Costs, strategy: str) -> Shards:
    """All documents in a single micro-batch of one rank."""
    return price_shards([np.asarray(documents.lengths).tolist()], 1, strategy, costs)


def _with_weights(job: Job) -> Job:
    """``job`` with weights kept, or gathered again if memory does not hold them."""
    if job.layout.pp > 1 or job.layout.weights != "auto":
        return job
    kept = replace(job, layout=replace(job.layout, weights="kept"))
    fitting = job.levels_steps or holds(kept)
    return kept if fitting else replace(job, layout=replace(job.layout, weights="gathered"))


@lru_cache(maxsize=4096)
def holds(job: Job) -> bool:
    """Whether micro-batches of L_max fit into memory; if it is "auto", of the smallest L_max.

    Where lists cannot hold their most, more stages per pipeline rank only starve.
    """
    job = job if job.packing.max_length_factor != "auto" else job.with_length_factor(job.least_length_factor)
    return fits_in_full(job) if job.layout.virtual_pp > 1 else fits(job)
