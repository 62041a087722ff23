"""Whether a job fits the memory of its devices, and the largest L_max that does.

``walk`` predicts the worst step that packing may produce: every micro-batch has L_max tokens, or as many micro-batches
as the documents of a global batch fill.
"""

import math
from bisect import bisect_left
from dataclasses import replace

from wlb.job.job import Job
from wlb.job.memory.layers import held_of_token, kept_share, kept_tokens, window_tokens
from wlb.job.memory.walk import BATCH_BYTES, MemoryEstimate, gib, largest_share, predict_memory, rank_memories
from wlb.schedules.operations import round_size

HELD = ("activations", "received keys and values", "scores")  # held from forward to backward
_EVEN_ROUNDS = 4  # of pp micro-batches: fill the pipeline, allocate all gradients, one more, drain it
_EVEN_MICRO_BATCHES = 2  # of a rank in level steps: more of the same need no more memory
_FACTORS = 64  # values of L_max that are tried per context window


def predicted_memory(job: Job, limit: float = math.inf) -> MemoryEstimate:
    """The peak memory of a process in the worst step; or the first peak over ``limit`` bytes, if any.

    A full pipeline of equal micro-batches holds the same in every round, except for token ids, so only the first rounds
    are walked through.
    """
    if job.plans_operations:
        return _planned_memory(job, limit)
    longest, rest = job.max_tokens, job.most_step_tokens
    count = _EVEN_MICRO_BATCHES if job.levels_steps else job.rank_micro_batches
    walked = min(count, _EVEN_ROUNDS * round_size(job.layout.pp, count))
    if rest is None or job.levels_steps or rest // longest >= walked:  # as full as a step of only longest micro-batches
        more = (count - walked) * largest_share(job, longest) * BATCH_BYTES
        estimate = predict_memory(job, [longest] * walked, limit - more)
        return replace(estimate, parts=estimate.parts | {"batches": estimate.parts["batches"] + more})
    tokens = []
    for _ in range(walked):  # all others are empty
        tokens.append(min(longest, rest))
        rest -= tokens[-1]
    return predict_memory(job, tokens, limit)


def _planned_memory(job: Job, limit: float) -> MemoryEstimate:
    """Memory with planned lists, in which ranks hold as much as in the named schedule (``wlb.job.pipeline``).

    That is micro-batches of ``job.in_flight_length`` and a document of a context window beside them; or all
    micro-batches with slices of one document, if they hold more. The longest micro-batch needs more while it runs, and
    keys and values are kept of slices.
    """
    count, usual = job.rank_micro_batches, largest_share(job, job.in_flight_length)
    walked = min(count, _EVEN_ROUNDS * round_size(job.layout.pp, count))
    ranks = rank_memories(job, [usual] * walked, limit)
    if ranks[-1].total > limit:
        return ranks[-1]
    static = max(ranks, key=lambda rank: rank.total - _held(rank.parts))
    held, kept = _and_kept(job, ranks, in_flight=True)
    if job.slices_documents:
        alone = rank_memories(job, [largest_share(job, job.sliced_length)])
        held, kept = max((held, kept), _and_kept(job, alone, in_flight=False), key=lambda one: _held(one[0]) + one[1])
    parts = static.parts | {name: held[name] for name in HELD if name in held}
    longest, short = (predict_memory(job, [tokens]) for tokens in (job.max_tokens, job.in_flight_length))
    for name, value in longest.parts.items():
        parts[name] = parts.get(name, 0) + max(0, value - short.parts.get(name, 0))
    return replace(static, parts=parts | {"kept keys and values": kept})


def _and_kept(job: Job, ranks: list[MemoryEstimate], *, in_flight: bool) -> tuple[dict[str, int], int]:
    """The parts of the fullest rank, and the keys and values kept of a document or of everything in flight."""
    held = max(ranks, key=lambda rank: _held(rank.parts)).parts.copy()
    token = held_of_token(job)
    held["activations"] = held.get("activations", 0) + in_flight * int(token * window_tokens(job))
    return held, int(kept_share(job) * token * kept_tokens(job, in_flight * _held(held) / token))


def _held(parts: dict[str, int]) -> int:
    return sum(parts.get(name, 0) for name in HELD)


def fits(job: Job) -> bool:
    """Whether the worst step is within ``job.memory_limit``."""
    limit = job.memory_limit.number_of_bytes
    return predicted_memory(job, limit).total <= limit


def largest_factor(job: Job) -> float | None:
    """The largest L_max that fits into memory, in context windows; None if not even the smallest does.

    A multiple of 1/64 window; if the tokens of a step are bounded, one of 64 values from the smallest to the largest.
    """
    most = job.packing.largest_auto_factor(job.step_micro_batches, job.global_batch)
    if job.most_step_tokens is None:
        factors = [count / _FACTORS for count in range(_FACTORS, math.ceil(most * _FACTORS) + 1)]
    else:
        least = job.least_length_factor
        steps = _FACTORS * (job.layout.pool_size if job.levels_steps else 1)  # steps of the share of a rank
        factors = [least + (most - least) * count / steps for count in range(steps + 1)]
    fitting = bisect_left(factors, True, key=lambda factor: not fits(job.with_length_factor(factor)))
    return factors[fitting - 1] if fitting else None


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
