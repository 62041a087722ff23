"""Whether a job fits the memory of its devices, and the largest L_max that does.

``walk`` predicts the worst step that packing may produce: every micro-batch has L_max tokens, or as many micro-batches
as the documents of a global batch fill.
"""

import math
from bisect import bisect_left
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

from wlb.job.job import Job
from wlb.job.memory.layers import THOUSANDTHS, TokenMemory, product_bytes
from wlb.job.memory.walk import BATCH_BYTES, MemoryEstimate, Walk, gib, largest_share, predict_memory
from wlb.schedules.operations import BACKWARD, FORWARD, round_size

HELD = ("activations", "received keys and values", "scores")  # held from forward to backward
_EVEN_ROUNDS = 4  # of pp micro-batches: fill the pipeline, allocate all gradients, one more, drain it
_PLANNED_ROUNDS = 2  # the same in planned lists, which are as full after a round
_EVEN_MICRO_BATCHES = 2  # of a rank in level steps: more of the same need no more memory
# Of what planned lists hold, in gaps between activations of micro-batches of different sizes (assumed; expandable
# segments return whole pages only).
_FRAGMENTS = 0.04
_FACTORS = 64  # values of L_max that are tried per context window


def predicted_memory(job: Job, limit: float = math.inf) -> MemoryEstimate:
    """The peak memory of a process in the worst step; or the first peak over ``limit`` bytes, if any.

    A full pipeline of equal micro-batches holds the same in every round, except for token ids, so only the first rounds
    are walked through. Planned lists hold as much as memory allows (``most_in_flight``).
    """
    if job.plans_operations:
        estimates = (planned.within(job.memory_limit.number_of_bytes) for planned in _planned(job))
        return max(estimates, key=lambda estimate: estimate.total)
    longest = job.max_tokens
    count = _EVEN_MICRO_BATCHES if job.levels_steps else job.rank_micro_batches
    walked = min(count, _EVEN_ROUNDS * round_size(job.layout.pp, count))
    most = count * longest if job.most_step_tokens is None or job.levels_steps else job.most_step_tokens
    tokens = [min(longest, max(0, most - place * longest)) for place in range(walked)]
    more = (count - walked) * largest_share(job, longest) * BATCH_BYTES * (tokens[-1] == longest)  # else none is left
    estimate = predict_memory(job, tokens, limit - more)
    return replace(estimate, parts=estimate.parts | {"batches": estimate.parts["batches"] + more})


def most_in_flight(job: Job) -> list[int]:
    """Memory that each pipeline rank may hold at once, in thousandths of the activations of a token in a block.

    The limit is the memory of the fullest rank in the named schedule, with micro-batches of ``job.in_flight_length``
    tokens; plus a document of a context window, because all its slices are held at once, and lists without slices need
    that room to be no slower than the named schedule; plus the keys and values kept of slices. Or what memory allows,
    if that is less.
    """
    token, most, limit = TokenMemory(job), 0, job.memory_limit.number_of_bytes
    for of_rank in job.layout.operations(job.rank_micro_batches):
        changes = [token.stages[one.stage] * ((one.kind == FORWARD) - (one.kind == BACKWARD)) for one in of_rank]
        most = max(most, max(accumulate(changes)) * job.in_flight_length)
    most += THOUSANDTHS * token.window
    most += int(token.slice * token.in_slices(most / THOUSANDTHS))
    rooms = ((planned.static.pipeline_rank, planned.room(limit)) for planned in _planned(job))
    limits = {
        rank: most if room is None else min(most, int(THOUSANDTHS * room / token.of_block)) for rank, room in rooms
    }
    return [limits[rank] for rank in Walk(job).like_ranks]


def starving(job: Job) -> float:
    """How many times as long planned lists take at least, because memory holds too few micro-batches.

    A stage holds the activations of a micro-batch while it goes through all later stages and back. So tokens held times
    seconds (Little's law) bound what the first rank runs with its memory.
    """
    layout, stages = job.layout, TokenMemory(job).stages[:: job.layout.pp]
    held = sum(share * (1 - chunk / layout.virtual_pp) for chunk, share in enumerate(stages))
    tokens = job.global_batch * job.context_window / job.step_micro_batches
    return max(1.0, layout.pp * tokens * held / max(1, most_in_flight(job)[0]))


class _Planned(NamedTuple):
    """Memory with planned lists: ``static``, and what forwards hold, at ``least`` and at ``most``."""

    static: MemoryEstimate
    least: dict[str, int]
    most: dict[str, int]

    @property
    def in_full(self) -> int:
        return self._with(self.most).total

    def room(self, limit: float) -> int | None:
        """Bytes that forwards may hold, if they may not hold their most within ``limit`` bytes; at least ``least``."""
        within = int((limit - self.static.total) / (1 + _FRAGMENTS))
        return None if self.in_full <= limit else max(sum(self.least.values()), within)

    def within(self, limit: float) -> MemoryEstimate:
        """The peak memory if lists keep within ``limit`` bytes as far as they can."""
        room = self.room(limit)
        return self._with(self.most if room is None else {"activations": room})

    def _with(self, held: dict[str, int]) -> MemoryEstimate:
        parts = [self.static.parts, held, {"fragments": int(_FRAGMENTS * sum(held.values()))}]
        return replace(self.static, parts={name: sum(of.get(name, 0) for of in parts) for of in parts for name in of})


@lru_cache(maxsize=4096)
def _planned(job: Job, limit: float = math.inf) -> tuple[_Planned, ...]:
    """The memory of ranks that differ; empty where one surely has more than ``limit`` bytes in full.

    Ranks hold at most as much as the fullest in the named schedule, and at least the micro-batches of one document. The
    most are micro-batches of ``job.in_flight_length`` and a document of a context window beside them; or all
    micro-batches with slices of one document, if they hold more. The longest micro-batch needs more while it runs, and
    keys and values are kept of slices.
    """
    count, usual = job.rank_micro_batches, largest_share(job, job.in_flight_length)
    walked = min(count, _PLANNED_ROUNDS * round_size(job.layout.pp, count))
    walk = Walk(job)
    ranks = walk.unlike_ranks([usual] * walked, limit)
    if ranks[-1].total > limit:
        return ()
    alone = cache(lambda tokens: walk.unlike_ranks([largest_share(job, tokens)]))
    one = job.sliced_length if job.slices_documents else job.max_tokens
    least = [_held(job, [rank], in_flight=False) for rank in alone(one)]
    most = max([_held(job, ranks, in_flight=True), *least], key=lambda parts: sum(parts.values()))
    lengths = job.max_tokens, job.in_flight_length
    longest, short = (max(alone(tokens), key=lambda rank: rank.total).parts for tokens in lengths)
    more = {name: max(0, value - short.get(name, 0)) for name, value in longest.items()}
    planned = []
    for rank, own in zip(ranks, least, strict=True):
        static = {name: value for name, value in rank.parts.items() if name not in HELD}
        parts = {name: static.get(name, 0) + more.get(name, 0) for name in static | more}
        parts["working"] = max(parts.get("working", 0), product_bytes(job))
        planned.append(_Planned(replace(rank, parts=parts), own, most))
    return tuple(planned)


def _held(job: Job, ranks: list[MemoryEstimate], *, in_flight: bool) -> dict[str, int]:
    """What forwards hold on the fullest rank, with keys and values kept of a document or of everything in flight."""
    held = max(({name: rank.parts.get(name, 0) for name in HELD} for rank in ranks), key=lambda of: sum(of.values()))
    token = TokenMemory(job)
    held["activations"] = int(held["activations"] * token.growth) + in_flight * int(token.of_block * token.window)
    tokens = token.in_slices(in_flight * sum(held.values()) / token.of_block)
    return held | {"kept keys and values": int(token.of_slice * token.of_block * tokens)}


def fits(job: Job) -> bool:
    """Whether the worst step is within ``job.memory_limit``."""
    limit = job.memory_limit.number_of_bytes
    return predicted_memory(job, limit).total <= limit


def largest_factor(job: Job) -> float | None:
    """The largest L_max that fits into memory, in context windows; None if not even the smallest does.

    It lets planned lists hold their most. Where the smallest L_max does not, they may still fit and hold less. A
    multiple of 1/64 window; if the tokens of a step are bounded, one of 64 values from the smallest to the largest.
    """
    most = job.packing.largest_auto_factor(job.step_micro_batches, job.global_batch)
    if job.most_step_tokens is None:
        factors = [count / _FACTORS for count in range(_FACTORS, math.ceil(most * _FACTORS) + 1)]
    else:
        least = job.least_length_factor
        steps = _FACTORS * (job.layout.pool_size if job.levels_steps else 1)  # steps of the share of a rank
        factors = [least + (most - least) * count / steps for count in range(steps + 1)]
    fitting = bisect_left(factors, True, key=lambda factor: not fits_in_full(job.with_length_factor(factor)))
    return factors[fitting - 1] if fitting else None


def fits_in_full(job: Job) -> bool:
    """``fits``, and planned lists may hold their most."""
    limit = job.memory_limit.number_of_bytes
    if not job.plans_operations:
        return fits(job)
    planned = _planned(job, limit)
    return bool(planned) and all(rank.in_full <= limit for rank in planned)


def too_large(job: Job, *, resumes: bool = False) -> str | None:
    """The memory that a job needs and remedies, in configuration keys; None if the job fits."""
    estimate, limit = predicted_memory(job), job.memory_limit
    if estimate.total <= limit.number_of_bytes:
        return None
    remedies = []
    recomputing = replace(job, activation_checkpointing="full")
    if job.activation_checkpointing != "full" and fits(recomputing):
        smaller = gib(predicted_memory(recomputing).total)
        remedies.append(f'set training.activation_checkpointing = "full" ({smaller} GiB)')
    anew = " (of a new job, with another checkpoint.dir)" if resumes else ""
    shorter = "lower packing.max_length_factor or"
    if job.packing.is_balanced:  # L_max is then what the documents need
        shorter = "raise packing.rank_micro_batches, lower"
    remedies.append(f"{shorter} data.context_window{anew}, raise parallel.cp, tp, pp or dp")
    return (
        f"with micro-batches of {job.max_tokens} tokens a process needs up to {estimate}, over the "
        f"{gib(limit.number_of_bytes)} GiB of {limit.origin}; {', or '.join(remedies)}"
    )
