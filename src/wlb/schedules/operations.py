"""The order in which each pipeline rank runs its forwards and backwards.

A schedule is one list of operations for each rank; which operation waits for which follows from the lists
(``wlb.schedules.timing``). The orders are those of ``torch.distributed.pipelining`` 2.13 (``Schedule1F1B``,
``ScheduleInterleaved1F1B``), derived here without torch; the tests compare them. Interleaved 1F1B needs several stages
on a rank; with one stage it is 1F1B.
"""

from functools import lru_cache
from typing import NamedTuple

from wlb.errors import UserError, choose_from

# Kinds of operations, as ``torch.distributed.pipelining`` names them: a forward, a whole backward, and the two parts of
# a backward: the gradient of the input of the stage, and the gradients of its weights, which may be computed later.
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
# Output head and loss, forward and backward, between the forward and the backward of the last stage. Only where the
# head is dealt: the ``head_ranks`` run it for some micro-batches each, as an operation of the first of their stages.
HEAD = "H"


class Operation(NamedTuple):
    """A pass of one micro-batch through one stage of the model: its ``kind`` is F, B, I, W or H."""

    stage: int
    micro_batch: int
    kind: str


RankOperations = tuple[tuple[Operation, ...], ...]


def head_ranks(pp: int) -> range:
    """The ranks with a dealt head: both of two, and of more all but the first, which has the embedding."""
    return range(pp > 2, pp)


# "planned": each step brings its own lists; 1F1B, or interleaved 1F1B, then only bounds memory. "auto": planned if the
# packer plans lists.
SCHEDULES = ("auto", "1f1b", "interleaved_1f1b", "planned")


@lru_cache(maxsize=256)
def rank_operations(schedule: str, pp: int, micro_batches: int, virtual_stages: int = 1) -> RankOperations:
    """Return the operations of each of ``pp`` ranks, in the order in which the rank runs them.

    Rank r holds every pp-th stage from stage r on. ``interleaved_1f1b`` with one stage per rank is ``1f1b``, as the
    trainer runs it. ``1f1b`` also takes fewer micro-batches than ranks, as in Megatron-Core but not in torch.

    Raises ``UserError`` for an unknown schedule, several stages per rank in a schedule for one, and micro-batches that
    do not fill whole rounds.
    """
    check_operations(schedule, pp, micro_batches, virtual_stages)
    return tuple(_of_rank(rank, pp, micro_batches, virtual_stages) for rank in range(pp))


def check_operations(schedule: str, pp: int, micro_batches: int, virtual_stages: int) -> None:
    """Raise ``UserError`` for what ``rank_operations`` cannot run."""
    if schedule not in SCHEDULES:
        raise UserError(f"unknown pipeline schedule {schedule!r}; {choose_from(schedule, SCHEDULES)}")
    if virtual_stages == 1:
        return
    if schedule == "1f1b":
        raise UserError(
            f"schedule {schedule!r} runs one stage on each rank, not {virtual_stages}; use 'interleaved_1f1b'"
        )
    if micro_batches % round_size(pp, micro_batches):
        raise UserError(
            f"interleaved schedules run micro-batches in equal rounds of at least pp = {pp}; {micro_batches} "
            f"micro-batches cannot be divided into {micro_batches // pp}"
        )


def round_size(pp: int, micro_batches: int) -> int:
    """Micro-batches that interleaved schedules run through a stage before the next stage of the rank.

    There are ``micro_batches // pp`` rounds of this size, or a single smaller one; a remainder cannot be run.
    """
    return micro_batches // max(1, micro_batches // pp)


def _of_rank(rank: int, pp: int, micro_batches: int, virtual_stages: int) -> tuple[Operation, ...]:
    """Forwards to warm up, then a forward and a backward in turn, then the remaining backwards.

    Interleaved, micro-batches go in rounds through all stages of the rank.
    """
    if virtual_stages == 1:
        size, warm_up = micro_batches, pp - 1 - rank
    else:  # one round through every stage of the rank except the last, and two operations for each rank after it
        size = round_size(pp, micro_batches)
        warm_up = (virtual_stages - 1) * size + 2 * (pp - 1 - rank)
    stages = range(rank, pp * virtual_stages, pp)
    rounds = [range(start, start + size) for start in range(0, micro_batches, size)]
    forwards = [Operation(s, i, FORWARD) for round_ in rounds for s in stages for i in round_]
    backwards = [Operation(s, i, BACKWARD) for round_ in rounds for s in reversed(stages) for i in round_]
    alternating = [operation for pair in zip(forwards[warm_up:], backwards, strict=False) for operation in pair]
    return (*forwards[:warm_up], *alternating, *backwards[max(0, len(forwards) - warm_up) :])
