"""Pipelines that run long sequences in slices: the time and memory of their plans, and their best layout.

A ``SlicedPlan`` says which tokens are in every micro-batch. Slices of a sequence run forward in order and backward in
reverse; a slice's keys and values are kept until its backward. The simulator itself (``wlb.simulate.step``) prices
plans, with the same kernels, links, FSDP and stages as our own slices.

Assumed of all, in their favour where nothing is published: documents in a micro-batch are kept apart; context-parallel
groups share every slice by document; ranks recompute no more than they have to. All run 1F1B over slices as Seq1F1B
does; if sequences have different numbers of slices, ranks of a stage run ahead only as far as the next sequence needs.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.job.job import Job
from wlb.job.memory.fit import HELD
from wlb.job.memory.layers import TokenMemory
from wlb.job.memory.walk import Walk
from wlb.schedules.layout import dealt_blocks
from wlb.schedules.operations import BACKWARD, FORWARD, INPUT, WEIGHT, Operation, RankOperations
from wlb.sharding import price_shards
from wlb.sharding.latency import Phases
from wlb.simulate.decide import with_stages
from wlb.simulate.search import job_on, meshes
from wlb.simulate.space import SearchSpace
from wlb.simulate.step import Steps
from wlb.workload.base import Checkpointing
from wlb_studies.policies.filling import Integers, best_fit, longest_first
from wlb_studies.policies.layouts import layout_of
from wlb_studies.policies.plan import Ranks
from wlb_studies.policies.policy import Outcome, Policy, PricedStep, batches_of_draws, best_of
from wlb_studies.policies.pricing import StepPrice, ideal_seconds, own_costs, received_bytes

TILE = 128  # tokens; slices of even work start at multiples
_ROUNDS = 4  # micro-batches per pipeline rank for predicting memory
_ROWS = (4096, 16_384)  # of micro-batches for which memory is predicted
_FINE = 16  # micro-batches per pipeline rank that leave few bubbles
_WITHOUT_HEAD = 0.75  # of a step's lower bound, which includes a last stage that waits for its output head
_KINDS: tuple[Checkpointing, ...] = ("none", "keep_attention")  # ranks recompute more if they do not hold the rest
_NEAREST = 4  # layouts that are tried with every setting, and on every draw
_LEAST_TOKENS = 4096  # of a window, on each context-parallel rank


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` of a document."""

    document: int
    start: int
    stop: int


Setting = tuple[tuple[str, int | str], ...]
Slice = Sequence[Piece]  # a micro-batch; only its first piece may start inside a document
Column = Sequence[Sequence[Slice]]  # what a pipeline runs: sequences of one or more slices


@dataclass(frozen=True, eq=False)
class SlicedPlan:
    """A step of equal pipelines, one column each.

    The last ``keeps`` slices of a sequence keep their activations; the others run forward again before their backward.
    With ``splits_backward`` a backward has two parts if nothing is recomputed. With ``exchanges`` the slices of a
    sequence share their attention evenly; with ``spreads_head`` stages share the output head. If forward and backward
    are packed separately, ``backward`` has the columns for the backwards.
    """

    lengths: Integers
    columns: Sequence[Column]
    keeps: int | None = None
    splits_backward: bool = False
    exchanges: bool = False
    spreads_head: bool = False
    backward: Sequence[Column] | None = None

    @property
    def trained(self) -> Integers:
        pieces = [piece for column in self.columns for sequence in column for slice_ in sequence for piece in slice_]
        documents = np.unique([piece.document for piece in pieces])
        return np.asarray(self.lengths[documents])


def packed_sequences(lengths: Integers, window: int) -> list[list[int]]:
    """Pack whole documents into sequences of at most a window, longest first by best fit."""
    return best_fit(longest_first(lengths), lengths, window)


def cut_at(documents: Sequence[int], lengths: Integers, cuts: Sequence[int]) -> list[Slice]:
    """``documents`` one after another, cut at ``cuts``, which run from 0 to the sequence's tokens."""
    ends = [*accumulate(lengths[list(documents)].tolist())]
    pieces = [(document, end - int(lengths[document]), end) for document, end in zip(documents, ends, strict=True)]
    return [
        [
            Piece(document, max(first, begin) - begin, min(last, end) - begin)
            for document, begin, end in pieces
            if begin < last and end > first
        ]
        for first, last in pairwise(cuts)
    ]


def even_cuts(tokens: int, parts: int, seconds: Callable[[Integers], NDArray[np.float64]] | None = None) -> list[int]:
    """Cuts of a sequence into at most ``parts`` of equal tokens, or of equal ``seconds`` of one document."""
    tiles = np.append(np.arange(0, tokens, TILE), tokens)
    work = tiles if seconds is None else seconds(tiles)
    places = np.searchsorted(work, work[-1] * np.arange(1, parts) / parts)
    return [*dict.fromkeys([0, *tiles[places].tolist(), tokens])]


@lru_cache(maxsize=256)
def one_forward_one_backward(counts: tuple[int, ...], pp: int, stages: int, *, split: bool = False) -> RankOperations:
    """1F1B over the slices of sequences with ``counts`` slices; interleaved where a rank has several ``stages``.

    Before a sequence's backwards, the last rank has run its forwards; the next sequence's forwards are spread over
    them, one per backward if all sequences have equally many slices. Each earlier rank is one or two forwards further
    ahead. With ``split`` backwards, rank r runs the weight gradients r backwards later, as ZB-H1 does (arXiv
    2401.10241).
    """
    bounds = _rounds(counts, pp) if stages > pp else [0, sum(counts)]
    ahead = [*range(sum(counts))]
    back = [end - 1 - place for end, count in zip(accumulate(counts), counts, strict=True) for place in range(count)]

    def passes(own: Sequence[int], order: Sequence[int], kind: str) -> list[Operation]:
        rounds = [order[start:stop] for start, stop in pairwise(bounds)]
        return [Operation(stage, micro_batch, kind) for round_ in rounds for stage in own for micro_batch in round_]

    lists = []
    before = _forwards_before(
        passes(range(pp - 1, stages, pp), ahead, FORWARD), passes(range(stages - 1, -1, -pp), back, BACKWARD)
    )
    for rank in range(pp):
        own, mine = range(rank, stages, pp), list[Operation]()
        forwards, backwards = passes(own, ahead, FORWARD), passes(own[::-1], back, INPUT if split else BACKWARD)
        weights = [operation._replace(kind=WEIGHT) for operation in backwards if split]
        done = 0
        for at, operation in enumerate(backwards):
            begun = before[at] + (2 if stages > pp else 1) * (pp - 1 - rank)
            mine += [*forwards[done:begun], operation, *weights[max(0, at - rank) : max(0, at - rank + 1)]]
            done = max(done, begun)
        lists.append((*mine, *weights[max(0, len(backwards) - rank) :]))
    return tuple(lists)


def _rounds(counts: Sequence[int], pp: int) -> list[int]:
    """Bounds of the rounds of interleaved stages: whole sequences, at least ``pp`` slices each."""
    bounds = [0]
    for end in accumulate(counts):
        if end - bounds[-1] >= pp:
            bounds.append(end)
    return [*bounds[: max(1, len(bounds) - 1)], sum(counts)]


def _forwards_before(forwards: Sequence[Operation], backwards: Sequence[Operation]) -> list[int]:
    """How many of the last rank's ``forwards`` precede each of its ``backwards``: at most one more each time."""
    last = backwards[0].stage
    number = {one.micro_batch: at + 1 for at, one in enumerate(forwards) if one.stage == last}
    places, needed = [0], [number[backwards[0].micro_batch]]
    for at, one in enumerate(backwards):
        if one.stage == last and number[one.micro_batch] > needed[-1]:
            places.append(at)
            needed.append(number[one.micro_batch])
    order = np.arange(len(backwards))
    spread = np.ceil(np.interp(order, places, needed)).astype(np.int64)
    more = np.maximum.accumulate((spread - order)[::-1])[::-1]
    in_time: list[int] = ((more.max() if len({one.stage for one in backwards}) > 1 else more) + order).tolist()
    return in_time


@dataclass(frozen=True)
class _Taken(Steps):
    """Steps whose stages take the given seconds."""

    taken: Phases = field(kw_only=True)

    @cached_property
    def stages(self) -> Phases:
        return self.taken


def price(plan: SlicedPlan, job: Job, most: float = np.inf) -> StepPrice:
    """The step of ``plan`` in the pipelines of ``job``, one per column.

    Ranks recompute, beyond what ``job`` does, what their memory cannot hold. Seconds are infinite if one rank alone
    needs more than ``most``.
    """
    layout = job.layout
    both = [*plan.columns, *(plan.backward or ())]
    count = max(layout.pp, *(sum(map(len, column)) for column in both))
    columns = _filled(plan.columns, count)
    steps = _steps(columns, job, plan)
    forward, backward = steps.stages
    backwards = columns if plan.backward is None else _filled(plan.backward, count)
    if plan.backward is not None:
        backward = _steps(backwards, job, plan).stages.backward
    of_stages = (forward + backward).sum(axis=(0, 3))  # (dp, stages)
    if max(float(of_stages[:, mine].sum(axis=1).max()) for mine in layout.rank_stages) > most:
        return StepPrice(np.inf, 0.0, 0.0)
    split = plan.splits_backward and job.splits_backward
    lists = tuple(
        one_forward_one_backward((*map(len, column),), layout.pp, layout.stages, split=split) for column in columns
    )
    again, memory = _held(plan, columns, lists, job)
    if again.any():
        full = _steps(backwards, replace(job, activation_checkpointing="full"), plan).stages.backward
        backward = backward + again * (full - backward)
    taken = Phases(forward, backward)
    steps = _Taken(steps.costs, steps.shards, steps.blocks, steps.head, (lists,), taken=taken)
    received = received_bytes(steps.shards, job) / (layout.dp_cp * layout.pp)
    return StepPrice(float(steps.seconds[0]), received, memory)


def _filled(columns: Sequence[Column], count: int) -> list[Column]:
    """Columns padded to ``count`` micro-batches with empty ones."""
    return [[*column, *[[()]] * (count - sum(map(len, column)))] for column in columns]


def _steps(columns: Sequence[Column], job: Job, plan: SlicedPlan) -> Steps:
    """The prices of ``columns``, with the attention and the head that ``plan`` spreads."""
    slices = [slice_ for column in columns for sequence in column for slice_ in sequence]
    costs, shape = own_costs(job), (1, len(columns), len(slices) // len(columns))
    lengths = [[stop - start for _, start, stop in slice_] for slice_ in slices]
    earlier = [slice_[0].start if slice_ and slice_[0].start else None for slice_ in slices]
    shards = price_shards(lengths, job.layout.cp, "per_document", costs.rank, earlier)
    if plan.exchanges:
        counts = np.array([len(sequence) for column in columns for sequence in column])
        first = np.cumsum(counts) - counts
        forward, backward = (
            np.repeat(np.add.reduceat(seconds, first) / counts[:, None], counts, axis=0)
            for seconds in (shards.attention_forward, shards.attention_backward)
        )
        shards = shards._replace(attention_forward=forward, attention_backward=backward)
    steps = Steps.of_shards(shards.reshaped(*shape), costs)
    if plan.spreads_head:
        blocks = Phases(*(block + head for block, head in zip(steps.blocks, steps.head, strict=True)))
        steps = replace(steps, blocks=blocks, head=Phases(*map(np.zeros_like, steps.head)))
    return steps


def _held(
    plan: SlicedPlan, columns: Sequence[Column], lists: Sequence[RankOperations], job: Job
) -> tuple[NDArray[np.float64], float]:
    """The share of each forward that runs again, shape (1, dp, stages, micro-batches), and peak bytes.

    A rank over the limit of memory recomputes the share of its activations that brings it down to the limit. Keys and
    values of slices, and scores, are not recomputed.
    """
    layout, limit = job.layout, job.memory_limit.number_of_bytes
    all_again = replace(job, activation_checkpointing="full")
    of_token = TokenMemory(job)
    token, least = of_token.of_block, TokenMemory(all_again).of_block
    kept, head = of_token.of_slice * token, of_token.of_head * token
    again = np.zeros((1, layout.dp, layout.stages, sum(map(len, columns[0]))))
    of_columns = []  # operations, tokens, and bytes: activations, those with everything recomputed, all else, made anew
    for d, (column, of_column) in enumerate(zip(columns, lists, strict=True)):
        slices = [
            (place < len(one) - (plan.keeps or len(one)), slice_) for one in column for place, slice_ in enumerate(one)
        ]
        forgets = np.array([first for first, _ in slices])
        tokens = np.array([sum(stop - start for _, start, stop in slice_) for _, slice_ in slices])
        cut = [
            [p.stop - p.start for p in slice_ if p.stop - p.start < int(plan.lengths[p.document])]
            for _, slice_ in slices
        ]
        beside = np.outer(job.stage_blocks, kept * np.array([*map(sum, cut)], np.float64))
        beside[-1] += head * tokens / (layout.pp if plan.spreads_head else 1)
        leaves, leaves_least, remade = (
            np.outer(job.stage_blocks, tokens * each)
            for each in (np.where(forgets, least, token), least, np.where(forgets, token - least, 0.0))
        )
        again[0, d] = forgets & (least < token)
        of_columns.append((of_column, tokens, leaves + beside, leaves_least + beside, remade))

    def most(rank: int, *, recomputed: bool) -> float:
        static, of_row = _beside_activations(all_again if recomputed else job, rank)
        return static + max(
            _peak(
                of_column[rank],
                (left_least if recomputed else left).tolist(),
                (of_row * tokens / layout.cp + (0.0 if recomputed else 1.0) * remade).tolist(),
            )
            for of_column, tokens, left, left_least, remade in of_columns
        )

    peaks = []
    for rank, mine in enumerate(layout.rank_stages):
        own = most(rank, recomputed=False)
        if own > limit:
            full = most(rank, recomputed=True)
            over = min(1.0, (own - limit) / max(own - full, 1.0))
            again[:, :, mine] = np.maximum(again[:, :, mine], over)
            own = limit if over < 1 else full
        peaks.append(own)
    return again, float(max(peaks))


def _peak(
    operations: Sequence[Operation], leaves: Sequence[Sequence[float]], needs: Sequence[Sequence[float]]
) -> float:
    """The most bytes at once, if a forward ``leaves`` bytes to its backward, and both ``needs`` more while they run."""
    held = most = 0.0
    for stage, micro_batch, kind in operations:
        if kind == FORWARD:
            held += leaves[stage][micro_batch]
        if kind != WEIGHT:
            most = max(most, held + needs[stage][micro_batch])
        if kind in (BACKWARD, WEIGHT):
            held -= leaves[stage][micro_batch]
    return most


@lru_cache(maxsize=8192)
def _beside_activations(job: Job, rank: int) -> tuple[float, float]:
    """Bytes of a rank for everything but what forwards leave: fixed, and for each token of the rank that is running.

    The latter is less on the last rank if memory peaks when the scores that forwards of these tokens left are gone.
    """
    count, walk = _ROUNDS * job.layout.pp, Walk(job)
    operations = job.layout.operations(count)[rank]
    estimates = [walk.over(rank, [(rows, None)] * count, operations) for rows in _ROWS]
    low, high = (sum(value for name, value in one.parts.items() if name not in HELD) for one in estimates)
    of_row = (high - low) / (_ROWS[1] - _ROWS[0])
    gone = rank == job.layout.pp - 1 and not any("scores" in one.parts for one in estimates)
    token = TokenMemory(job)
    return low - of_row * _ROWS[0], of_row - gone * token.of_head * token.of_block


@dataclass(frozen=True)
class SlicedTrial:
    """A ``LayoutTrial`` of ``plan`` with one of its ``settings``."""

    job: Job
    plan: Callable[..., SlicedPlan]
    setting: Setting

    @property
    def layout(self) -> str:
        chosen = ", ".join(f"{name} {value}" for name, value in self.setting)
        return f"{layout_of(self.job)}, {self.job.activation_checkpointing}; {chosen}"

    def step(self, lengths: Integers) -> PricedStep:
        began = time.process_time()
        plan = self.plan(lengths, self.job, **dict(self.setting))
        planning = time.process_time() - began
        return PricedStep(price(plan, self.job), plan.trained, planning)


@dataclass(frozen=True)
class SlicedPolicy(Policy):
    """``plan`` turns whole documents into a ``SlicedPlan`` for a job with a pipeline.

    The best layouts with the first of its ``settings`` are tried with all settings, then all layouts with the fastest
    setting. With ``interleaves`` a rank may have several stages; ``spreads_head`` says that plans do.
    """

    plan: Callable[..., SlicedPlan]
    settings: Sequence[Mapping[str, int | str]]
    interleaves: bool = True
    spreads_head: bool = False

    def best(self, name: str, space: SearchSpace, lengths: Integers, steps: int | None = None) -> Outcome:
        draws = batches_of_draws(lengths, space, steps)
        jobs = _jobs(space, draws[0][0], interleaves=self.interleaves, spreads_head=self.spreads_head)
        search = _Search(self.plan, draws[0][0], jobs)
        first, *_ = settings = [tuple(setting.items()) for setting in self.settings]
        nearest = search.over_layouts(first)[:_NEAREST]
        found = search.ranked(replace(trial, setting=setting) for trial in nearest for setting in settings)
        if found:
            found = search.over_layouts(found[0].setting)
        return replace(best_of(name, found[:_NEAREST], draws, space), tried=len(found))


@dataclass(frozen=True)
class _Search:
    """Times of trials on the first documents: each layout with one setting, then the best with every setting."""

    plan: Callable[..., SlicedPlan]
    documents: Integers
    jobs: Sequence[tuple[float, Job]]  # and its lower bound, ascending
    seconds: dict[SlicedTrial, float] = field(default_factory=dict)

    def over_layouts(self, setting: Setting) -> list[SlicedTrial]:
        """Trials, fastest first; a layout whose lower bound is slower is not tried."""
        for least, job in self.jobs:
            if least > min(self.seconds.values(), default=np.inf):
                break
            self.ranked([SlicedTrial(job, self.plan, setting)])
        return self.ranked([])

    def ranked(self, trials: Iterable[SlicedTrial]) -> list[SlicedTrial]:
        """All trials so far, fastest first, without those that do not fit in memory."""
        for trial in trials:
            if trial in self.seconds:
                continue
            plan = trial.plan(self.documents, trial.job, **dict(trial.setting))
            step = price(plan, trial.job, min(self.seconds.values(), default=np.inf))
            fits = step.memory_bytes <= trial.job.memory_limit.number_of_bytes
            self.seconds[trial] = step.seconds if fits else np.inf
        fitting = [trial for trial, seconds in self.seconds.items() if seconds < np.inf]
        return sorted(fitting, key=self.seconds.__getitem__)


def _jobs(space: SearchSpace, documents: Integers, *, interleaves: bool, spreads_head: bool) -> list[tuple[float, Job]]:
    """Pipelines and the lower bound of their step (even micro-batches), ascending."""
    found: list[tuple[float, Job]] = []
    for mesh in meshes(space):
        if mesh.cp > 1 or mesh.pp == 1 or (mesh.virtual_pp > 1 and not interleaves):
            continue
        if (on_mesh := job_on(space, "fixed-4d", mesh, global_batch=mesh.dp * mesh.pp)) is None:
            continue
        for kind in _KINDS:
            job = with_stages(replace(on_mesh, activation_checkpointing=kind), documents)
            if spreads_head:
                blocks = dealt_blocks(job.shape.layers, job.layout, head=0.0)
                job = replace(job, layout=replace(job.layout, stage_blocks=blocks))
            capacity = max(_LEAST_TOKENS, space.batch_tokens // (mesh.dp * _FINE * mesh.pp))
            least = ideal_seconds(documents, Ranks(job, capacity)) * (_WITHOUT_HEAD if spreads_head else 1)
            for cp in (1, 2, 4, 8, 16, 32, 64):
                if mesh.dp % cp == 0 and cp * _LEAST_TOKENS <= space.context_window:
                    layout = replace(job.layout, cp=cp, dp=mesh.dp // cp)
                    packing = job.packing.changed(global_batch=layout.dp * layout.pp)
                    found.append((least, replace(job, layout=layout, packing=packing)))
    return sorted(found, key=itemgetter(0))
