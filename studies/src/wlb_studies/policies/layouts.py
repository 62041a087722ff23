"""The layouts that a policy without fixed context-parallel groups may run: tp, pp, checkpointing and token cap.

All powers of two are considered, tp inside a node. The memory model says how many tokens of a micro-batch a rank may
hold, with groups as large as a whole window then needs. A bound that assumes even ranks and no exchange orders the
layouts that fit; the most promising are tried, and the policy's own losses decide among them. Without a pipeline, FSDP
may free weights after every micro-batch or keep them to the end of the step: both are tried.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import get_args

import numpy as np

from wlb.errors import UserError
from wlb.job.job import Job, limit_of_gpu
from wlb.schedules.layout import Weights
from wlb.settings import MOST_RANKS
from wlb.simulate.decide import with_stages
from wlb.simulate.search import job_on, meshes
from wlb.simulate.space import SearchSpace
from wlb.workload.base import Checkpointing
from wlb_studies.policies.filling import power_of_two
from wlb_studies.policies.plan import Integers, Ranks
from wlb_studies.policies.pricing import ideal_seconds, peak_memory

HANDLINGS: tuple[Weights, ...] = ("gathered", "kept")  # of weights, without a pipeline
_TRIED = 6  # layouts tried of each kind, before other token caps of the fastest
_LEAST_TOKENS = 1024  # of a rank
_PROBED = (4096, 2**18)  # tokens of a rank whose memory is predicted
_FINER = (1.0, 0.5, 0.25)  # of the most tokens that fit: smaller micro-batches, documents on more ranks
_ROUNDS = (2, 4)  # micro-batches of a rank for each pipeline stage


def candidate_ranks(
    space: SearchSpace,
    documents: Integers,
    *,
    pipelines: bool = True,
    interleaves: bool = True,
    handlings: Sequence[Weights] = HANDLINGS,
) -> list[Ranks]:
    """Layouts to try with their largest token cap, most promising first; blocks go to stages by seconds.

    Raises ``UserError`` if none fits in memory.
    """
    of_all = documents.tobytes()

    def ideal(ranks: Ranks) -> float:
        return _ideal_seconds(of_all, ranks)

    found: list[Ranks] = []
    for weights in (*handlings, *["auto"] * pipelines):
        fitting = (ranks for ranks in _fitting(space, weights) if interleaves or ranks.job.layout.virtual_pp == 1)
        found += sorted(_largest(fitting), key=ideal)[:_TRIED]
    if not found:
        raise no_layout("the policy", space)
    return [replace(one, job=with_stages(one.job, documents)) for one in sorted(found, key=ideal)]


@lru_cache(maxsize=1024)
def _ideal_seconds(documents: bytes, ranks: Ranks) -> float:
    return ideal_seconds(np.frombuffer(documents, np.int64), ranks)


def no_layout(policy: str, space: SearchSpace) -> UserError:
    """The error to raise if nothing fits in memory."""
    return UserError(
        f"{policy} finds no layout with power-of-two sizes on {space.gpus} GPUs that fits in memory with "
        f"windows of {space.context_window} tokens; give more GPUs or a shorter window"
    )


def other_capacities(ranks: Ranks, space: SearchSpace) -> list[Ranks]:
    """The same layout with other token caps and other activation checkpointing."""
    blocks, plain = ranks.job.layout.stage_blocks, _with_stages(ranks, None)
    same = [other for other in _fitting(space, ranks.job.layout.weights) if other.job == plain.job and other != plain]
    same += [other for other in checkpointed(plain, space) if other.job != plain.job]
    return [_with_stages(other, blocks) for other in same]


def _with_stages(ranks: Ranks, blocks: tuple[int, ...] | None) -> Ranks:
    return replace(ranks, job=replace(ranks.job, layout=replace(ranks.job.layout, stage_blocks=blocks)))


def checkpointed(ranks: Ranks, space: SearchSpace) -> list[Ranks]:
    """The same layout with each activation checkpointing that fits, at its largest token cap."""
    kind = ranks.job.activation_checkpointing
    return [
        other
        for other in _largest(_fitting(space, ranks.job.layout.weights))
        if replace(other.job, activation_checkpointing=kind) == ranks.job
    ]


def _largest(choices: Iterable[Ranks]) -> list[Ranks]:
    """Of choices with the same job, keep the one with the largest token cap."""
    largest: dict[Job, Ranks] = {}
    for ranks in choices:
        known = largest.get(ranks.job)
        largest[ranks.job] = ranks if known is None or ranks.capacity > known.capacity else known
    return [*largest.values()]


def layout_of(job: Job) -> str:
    """The layout that is set for ``job``, in one line."""
    layout = job.layout
    interleaved = f" x {layout.virtual_pp} stages" if layout.virtual_pp > 1 else ""
    experts = f" ep {layout.ep}" if layout.ep > 1 else ""
    order = "" if layout.schedule == "auto" else f" {layout.schedule}"
    gathering = "" if layout.keeps_weights else ", weights gathered again"
    head = ", head dealt" if layout.deals_head else ""
    return f"tp {layout.tp} cp {layout.cp} pp {layout.pp}{interleaved} dp {layout.dp}{experts}{order}{head}{gathering}"


def layout_text(ranks: Ranks) -> str:
    job = ranks.job
    interleaved = f" x {job.layout.virtual_pp} stages" if job.layout.virtual_pp > 1 else ""
    gathered = "" if job.layout.keeps_weights else ", weights gathered again"
    return (
        f"tp {job.layout.tp} pp {job.layout.pp}{interleaved}, {ranks.count} ranks of {ranks.capacity:,} tokens, "
        f"{job.activation_checkpointing}{gathered}"
    )


@lru_cache(maxsize=8)
def _fitting(space: SearchSpace, weights: Weights) -> tuple[Ranks, ...]:
    """Layouts that handle weights so without a pipeline, or pipelines for "auto"."""
    layouts = (one for one in meshes(space) if one.cp == 1 and (one.pp > 1) == (weights == "auto"))
    jobs = (job_on(space, "fixed-4d", replace(one, weights=weights), global_batch=one.dp * one.pp) for one in layouts)
    return tuple(ranks for job in jobs if job is not None for ranks in _capacities(job, space))


def _capacities(job: Job, space: SearchSpace) -> Iterator[Ranks]:
    """Token caps worth trying, each with the cheapest activation checkpointing that fits.

    Unlike L_max of a job (``wlb.job.memory.fit``), a cap holds for one rank, whatever its group.
    """
    even = space.global_batch * space.context_window // job.layout.dp
    least = -(-space.context_window // job.layout.dp)
    known: set[int] = set()
    for kind in get_args(Checkpointing):  # cheapest first
        most = _most_tokens(replace(job, activation_checkpointing=kind), space)
        wanted = (
            [int(most * part) for part in _FINER]
            if job.layout.pp == 1
            else [even // (r * job.layout.pp) for r in _ROUNDS]
        )
        for tokens in (most, *wanted):
            capacity = min(tokens, most, max(even, least))
            if capacity >= least and capacity >= _LEAST_TOKENS and capacity not in known:
                known.add(capacity)
                yield Ranks(replace(job, activation_checkpointing=kind), capacity)


def _most_tokens(job: Job, space: SearchSpace) -> int:
    """The most tokens that fit on a rank; 0 if too few to be worth trying.

    Memory grows almost evenly with tokens, so the search starts on the line through two token counts.
    """
    limit = limit_of_gpu(space.hardware.memory_bytes).number_of_bytes

    def peak(tokens: int) -> float:
        group = 2 * power_of_two(-(-space.context_window // tokens))  # some policies double the ranks of a document
        return peak_memory(Ranks(job, tokens), tokens, min(group, MOST_RANKS))

    low, high = map(peak, _PROBED)
    most = _PROBED[0] + (limit - low) * (_PROBED[1] - _PROBED[0]) / (high - low)
    tokens = max(0, min(int(most), _PROBED[1])) // _LEAST_TOKENS * _LEAST_TOKENS
    while tokens and peak(tokens) > limit:
        tokens -= _LEAST_TOKENS
    return tokens
