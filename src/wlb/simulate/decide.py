"""Decides what a job leaves "auto": first its pools, by simulation, then weights and L_max, by its memory.

Trainer, dry run, simulator, batches, report and rivals all call ``decide``, so that the same job runs everywhere.

It chooses the size of pools, their number of micro-batches and the grouping of documents; without a pipeline it may
choose level steps. More micro-batches fill a pipeline better, and larger pools hold more of a document. But a long
document is alone in a small micro-batch, and K/V traffic goes further in large pools. The fastest choice depends on the
whole job and its documents. So choices are ranked by a lower bound of their step time, and the most promising one is
simulated, until the best one has been simulated. Choices that do not fit into memory come last. In a pipeline, choices
use slices; at the end, whole documents are tried with the best choice, because they exchange less.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.reader import DocumentLengths
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.job.memory.fit import fits, largest_factor, too_large
from wlb.job.planner import documents_together
from wlb.packing.options import Grouping
from wlb.packing.plan import StepPlan
from wlb.schedules.layout import dealt_blocks, divisors
from wlb.settings import MOST_MICRO_BATCHES
from wlb.sharding import price_shards
from wlb.simulate.costs import JobCosts
from wlb.simulate.filling import global_batches
from wlb.simulate.rate import rate
from wlb.simulate.step import Steps
from wlb.workload import Costs
from wlb.workload.base import Checkpointing

_STEPS = 4  # simulated for every choice; fewer if they are large
_SIMULATED = 128  # most context windows in all these steps
_DOCUMENTS = 65_536  # most documents in all these steps
_WINDOWS = 256  # of a step; for a larger global batch, a part of it decides
_FILLINGS = (1, 1.5, 2, 2.5, 3, 4, 6)  # micro-batches of a pool for each of its pipeline ranks
_SLICED_FILLINGS = (2, 3, 4, 6, 8)  # the same with slices
_FEWEST = (1, 1.15, 1.5)  # times the fewest micro-batches that fit, if the usual numbers do not fit into memory
_ONE_STEP = 0.08  # choices slower by more than this share on one step are not simulated on others
_FAR = 0.05  # behind what is wanted, with _ONE_STEP: then other numbers of micro-batches are not tried
_LEAST_WINDOWS = 0.5  # in a mean micro-batch
_LEAST_SLICED = 0.125  # the same where long documents are cut and memory does not hold more
_FEWER_BUBBLES = 0.1  # share of bubbles saved by light micro-batches at both ends; measured on random jobs
_FORWARD_SHARE = 0.3  # of the computing of a micro-batch: just under a third if attention takes most of it


def decide(job: Job, lengths: DocumentLengths, *, lock_step: bool = False, least_rate: float | None = None) -> Job:
    """``job`` with nothing left "auto"; the same job and documents always give the same result.

    Context-parallel groups become the pools: those given, or the fastest on documents of ``lengths``. Weights are kept
    if ``job.memory_limit`` allows it. L_max becomes the largest that it allows. ``lock_step`` excludes level steps, for
    loops with fixed context-parallel groups. Raises ``UserError`` if given pools cannot run, if no pools can, or if
    L_max is "auto" and memory does not hold one context window. Pools and an L_max that do not fit into memory are not
    refused, unless ``least_rate`` is given: then pools that do not fit, or do fewer than ``least_rate`` seconds of
    ``job.work_prices`` in a second, count as pools that cannot run.
    """
    job = with_stages(job, lengths)
    if not job.pools_decided:
        job = _with_fastest_pools(job, lengths, lock_step, least_rate)
    decided = _with_length(_with_weights(job))
    if not job.packing.is_balanced and job.packing.max_length_factor == "auto" and (problem := too_large(decided)):
        raise UserError(problem)
    return decided


def with_stages(job: Job, lengths: DocumentLengths) -> Job:
    """``job`` with its blocks dealt to pipeline stages by the seconds of blocks and output head.

    Seconds are for the documents of one global batch, or for a part of a large one.
    """
    if job.layout.pp == 1 or job.layout.stage_blocks is not None or not len(lengths):
        return job
    windows = min(job.global_batch, _WINDOWS)
    documents = next(global_batches(lengths, job.data, windows * job.context_window))
    blocks, head = blocks_and_head(job, documents)
    in_blocks = round(head * job.shape.layers / blocks, 2)  # so that machines agree
    return replace(job, layout=replace(job.layout, stage_blocks=dealt_blocks(job.shape.layers, job.layout, in_blocks)))


def blocks_and_head(job: Job, documents: NDArray[np.int64]) -> tuple[float, float]:
    """Seconds of one tensor-parallel group for ``documents``: in all blocks, and in the output head."""
    (blocks,), (head,) = Packed(documents, np.zeros(len(documents), np.int64), 1).blocks_and_heads(job)
    return float(blocks), float(head)


class Packed:
    """Micro-batches before a job runs them; ``owner`` is that of each of the ``documents`` (tokens)."""

    def __init__(self, documents: NDArray[np.int64], owner: NDArray[np.int64], micro_batches: int) -> None:
        self.documents, self._owner, self._micro_batches = documents, owner, micro_batches
        self._known: dict[tuple[Costs, Checkpointing], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    @classmethod
    def of_plan(cls, plan: StepPlan) -> Packed:
        counts = [len(part.segments) for part in plan.micro_batches]
        lengths = [segment.length for part in plan.micro_batches for segment in part.segments]
        return cls(np.array(lengths, np.int64), np.repeat(np.arange(len(counts)), counts), len(counts))

    def blocks_and_heads(self, job: Job) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``blocks_and_head`` of each micro-batch, shape (micro-batches,); the same for all cp, pp and dp."""
        key = job.costs, job.activation_checkpointing
        if key not in self._known:
            costs, again = job.costs, job.activation_checkpointing != "none"
            lengths, places = np.unique(self.documents, return_inverse=True)
            seconds = np.asarray(costs.attention_seconds(lengths))[places]
            attention = np.bincount(self._owner, seconds, self._micro_batches)
            tokens = np.bincount(self._owner, self.documents, self._micro_batches)
            blocks = attention + costs.blocks_seconds(tokens) + (2 + again) * costs.tp_seconds(tokens)
            blocks += again * costs.blocks_seconds(tokens, "forward")
            self._known[key] = blocks, np.asarray(costs.head_seconds(tokens))
        return self._known[key]


def _with_weights(job: Job) -> Job:
    """``job`` with weights kept, or gathered again if memory does not hold them."""
    if job.layout.pp > 1 or job.layout.weights != "auto":
        return job
    kept = replace(job, layout=replace(job.layout, weights="kept"))
    fitting = job.levels_steps or _holds(kept)
    return kept if fitting else replace(job, layout=replace(job.layout, weights="gathered"))


def _with_length(job: Job) -> Job:
    """``job`` with the largest L_max that fits, if it is "auto"; if none fits, with the smallest."""
    if job.packing.max_length_factor != "auto":
        return job
    return job.with_length_factor(largest_factor(job) or job.least_length_factor)


def _with_fastest_pools(job: Job, lengths: DocumentLengths, lock_step: bool, least_rate: float | None) -> Job:
    packing, layout = job.packing, job.layout
    if job.levels_steps:
        if lock_step:
            raise UserError(
                "grouping = 'level' gives each rank its own number of micro-batches, which this loop cannot run; "
                "leave it out"
            )
        return job.with_pools("level", layout.dp_cp)
    if layout.pool is not None and packing.rank_micro_batches != "auto":
        return job.with_pools(_usual_grouping(job), layout.pool, packing.rank_micro_batches)
    parts = -(-job.global_batch // _WINDOWS)
    found = _fastest_for_part(job, lengths, parts, lock_step, least_rate)
    if parts > 1 and not _holds(found):  # fewer micro-batches may need less memory
        found = _fastest_for_part(job, lengths, 1, lock_step, least_rate)
    return found


def _fastest_for_part(job: Job, lengths: DocumentLengths, parts: int, lock_step: bool, least_rate: float | None) -> Job:
    """``job`` with pools, decided for one of ``parts`` equal parts of its global batch."""
    given, pp = job.packing.rank_micro_batches, job.layout.pp
    settings: dict[str, Any] = {"global_batch": job.global_batch // parts}
    if parts > 1 and given != "auto":
        settings["rank_micro_batches"] = max(1, given // (parts * pp)) * pp
    part = replace(job, packing=job.packing.changed(**settings))
    fastest = _PoolSearch(part, parts, lock_step, lengths).fastest(least_rate)
    if fastest is None:
        if given != "auto":
            job.with_pools(_usual_grouping(job), job.layout.pool or job.layout.dp_cp, given)  # says what it refuses
        raise UserError(
            f"no pool of dp x cp = {job.layout.dp_cp} ranks can run a global batch of {part.global_batch} "
            "context windows in this pipeline; give pool and rank_micro_batches to learn why"
        )
    count = given
    if given == "auto" and fastest.grouping != "level":
        count = fastest.micro_batches * parts
        if parts > 1:  # a pipeline may need whole rounds
            count = -(-count // pp) * pp
    return job.with_pools(fastest.grouping, fastest.size, count)


class _PricedPools(NamedTuple):
    """Pools, and their seconds per second of work: simulated, or a lower bound. They sort best first."""

    too_large: bool  # for the memory
    no_room: bool  # for some document, which would wait for the next step
    seconds: float
    steps: int  # number of simulated steps
    size: int
    micro_batches: int  # of a pool; 0 for level steps
    grouping: Grouping
    job: Job  # never compared, as the fields before it differ


@dataclass(frozen=True)
class _PoolSearch:
    """Search for the fastest pools of ``job``, for one of ``parts`` equal parts of its global batch."""

    job: Job
    parts: int
    lock_step: bool
    lengths: DocumentLengths
    with_length: dict[tuple[int, int], Job] = field(default_factory=dict)  # of choices that were simulated

    def fastest(self, least_rate: float | None) -> _PricedPools | None:
        """The fastest pools; None if no pools can run or, with ``least_rate``, if none fit and are that fast."""
        most_seconds = 1 / least_rate if least_rate else math.inf
        choices = [choice for choice in self._choices() if least_rate is None or not choice.too_large]
        heapify(choices)
        while choices and choices[0].steps < self._steps and choices[0].seconds <= most_seconds:
            simulated = self._simulated(choices[0])
            heapreplace(choices, simulated)
            if simulated.seconds > (1 + _FAR) * most_seconds:  # other numbers of micro-batches are not that much faster
                alike = simulated.size, simulated.grouping
                choices = [one for one in choices if (one.size, one.grouping) != alike or one.seconds > most_seconds]
                heapify(choices)
        if not choices or choices[0].seconds > most_seconds:
            return None
        found = choices[0]
        may_be_whole = self.job.packing.grouping == "auto" and found.grouping == "slices"
        if may_be_whole and self._decided(found).max_tokens >= self.job.context_window:
            found = min(found, self._simulated(found._replace(grouping="even")))
        return found

    def _choices(self) -> Iterator[_PricedPools]:
        """Every size, number of micro-batches and grouping, with lower bounds."""
        packing, layout, grouping = self.job.packing, self.job.layout, _usual_grouping(self.job)
        sizes = [layout.cp * size for size in divisors(layout.dp)] if layout.pool is None else [layout.pool]
        bounds: dict[int, float] = {}
        for size in sizes:
            for large, job in self._with_counts(size):
                filled = self._least_filled(job)
                if filled not in bounds:
                    bounds[filled] = self._least_seconds(filled)
                yield _PricedPools(large, False, bounds[filled], 0, size, job.rank_micro_batches, grouping, job)
        free = (packing.grouping, packing.rank_micro_batches) == ("auto", "auto") and not self.lock_step
        if free and layout.pp == 1 and layout.keeps_weights and layout.dp_cp in sizes:
            job = self.job.with_pools("level", layout.dp_cp)
            yield _PricedPools(not _holds(job), False, 0.0, 0, layout.dp_cp, 0, "level", job)

    def _with_counts(self, size: int) -> list[tuple[bool, Job]]:
        """Pools of this size with the usual numbers of micro-batches, or with more if none of these fits."""
        if (given := self.job.packing.rank_micro_batches) != "auto":
            return self._that_run(size, [given])
        pp, dp_cp = self.job.layout.pp, self.job.layout.dp_cp
        slices = _usual_grouping(self.job) == "slices"
        most, most_sliced = (
            int(min(self.job.global_batch / least, MOST_MICRO_BATCHES / self.parts) * size / dp_cp)
            for least in (_LEAST_WINDOWS, _LEAST_SLICED)
        )
        counts = [round(filling * pp) for filling in (_SLICED_FILLINGS if slices else _FILLINGS)]
        counts = [count for count in counts if count <= most] or counts[:1]
        usual = self._that_run(size, counts)
        more = range(-(-counts[-1] // pp) * pp, (most_sliced if slices else most) + 1, pp)
        if not more or not all(large for large, _ in usual):
            return usual

        def holds(count: int) -> bool:
            return any(not large for large, _ in self._that_run(size, [count]))

        fewest = more[bisect_left(more[:-1], True, key=holds)]
        return self._that_run(size, [min(more[-1], math.ceil(times * fewest / pp) * pp) for times in _FEWEST])

    def _that_run(self, size: int, counts: Iterable[int]) -> list[tuple[bool, Job]]:
        """Jobs with these numbers of micro-batches that can run; each with whether it is too large for memory."""
        jobs, grouping = [], _usual_grouping(self.job)
        for count in sorted(set(counts)):
            with suppress(UserError):  # the pipeline needs whole rounds, or L_max is too small
                jobs.append(_with_weights(self.job.with_pools(grouping, size, count)))
        return [(not _holds(job), job) for job in jobs]

    @cached_property
    def _steps(self) -> int:
        documents = documents_together(self.job, self.lengths)
        return max(1, min(_STEPS, _SIMULATED // self.job.global_batch, _DOCUMENTS // max(1, documents)))

    @cached_property
    def _documents(self) -> NDArray[np.int64]:
        """Lengths of the documents of all simulated steps."""
        batches = global_batches(self.lengths, self.job.data, self.job.global_batch * self.job.context_window)
        return np.concatenate([*islice(batches, self._steps)])

    def _least_filled(self, job: Job) -> int:
        """Non-empty micro-batches of a pool, if each holds as many tokens as the longest document that is not cut."""
        if job.slices_documents:
            return job.rank_micro_batches
        tokens, longest = float(self._documents.sum()), float(self._documents.max())
        rounds = math.ceil(tokens / longest / (self._steps * job.layout.pools * job.layout.pp))
        return min(job.rank_micro_batches, rounds * job.layout.pp)

    def _least_seconds(self, micro_batches: int) -> float:
        """Seconds per second of work, if ranks share it evenly in ``micro_batches`` and exchange nothing."""
        layout, documents = self.job.layout, self._documents
        alone = price_shards([documents.tolist()], 1, self.job.sharding.strategy, self.job.costs)
        shares = self._steps * layout.dp_cp * micro_batches
        forward, backward = alone.attention_forward / shares, alone.attention_backward / shares
        share = alone._replace(tokens=alone.tokens // shares, attention_forward=forward, attention_backward=backward)
        everywhere = share.map(lambda column: np.repeat(column, micro_batches, axis=0))  # all ranks are equal
        steps = Steps.of_shards(everywhere.reshaped(1, 1, micro_batches), JobCosts(self.job))
        filling = (layout.pp - 1) / (layout.virtual_pp * micro_batches)  # filling and draining, over computing
        if self.job.plans_operations:  # gradients of weights fill the time of draining
            filling *= _FORWARD_SHARE if self.job.splits_backward else 1.0
            steps = replace(steps, modelled=steps.modelled - {"bubbles"})
        seconds = float(steps.seconds[0]) * (1 + filling * self.job.plans_operations)
        work = float(self.job.work_prices.document_seconds(documents).sum())
        return (1 - _FEWER_BUBBLES * filling / (1 + filling)) * seconds * self._steps / work

    def _decided(self, choice: _PricedPools) -> Job:
        key = choice.size, choice.micro_batches
        if key not in self.with_length:
            self.with_length[key] = _with_length(choice.job)
        return self.with_length[key]

    def _simulated(self, choice: _PricedPools) -> _PricedPools:
        """``choice`` simulated for one step, with a margin for the others; or for all steps, if it already has one."""
        steps = self._steps if choice.steps else 1
        job = self._decided(choice)
        job = replace(job, packing=job.packing.changed(grouping=choice.grouping))
        rated = rate(job, self.lengths, steps, self.job.work_prices)
        no_room = sum(rated.step_tokens) < steps * job.global_batch * job.context_window
        seconds = 1 / rated.work_rate * (1.0 if steps == self._steps else 1 - _ONE_STEP)
        return choice._replace(no_room=no_room and steps == self._steps, seconds=seconds, steps=steps)


def _usual_grouping(job: Job) -> Grouping:
    """The grouping of ``job`` or, if it is "auto", slices where possible and else even."""
    may_slice = job.plans_operations and job.phases is None
    return job.packing.grouping if job.packing.grouping != "auto" else "slices" if may_slice else "even"


def _holds(job: Job) -> bool:
    """Whether micro-batches of L_max fit into memory; if it is "auto", of the smallest L_max."""
    return fits(job if job.packing.max_length_factor != "auto" else job.with_length_factor(job.least_length_factor))
