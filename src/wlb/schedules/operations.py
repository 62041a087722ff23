"""The order in which each pipeline rank runs its forwards and backwards.

A schedule is nothing but one list of operations for each rank; who waits for whom follows from the lists
(``wlb.schedules.timing``). The orders are those of ``torch.distributed.pipelining`` 2.13 (``ScheduleGPipe``,
``Schedule1F1B``, ``ScheduleInterleaved1F1B``, ``ScheduleInterleavedZeroBubble``, ``ScheduleZBVZeroBubble``), derived
here without torch; the tests compare them. Interleaved 1F1B needs several stages on a rank; of one it is 1F1B.

The zero-bubble schedules (arXiv 2401.10241) cut a backward in two: the gradient of the input, for which the stage
before waits, and that of the weights, for which nobody does and which fills the gaps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from typing import Literal, NamedTuple

from wlb.errors import UserError, choose_from

Part = Literal["whole", "input", "weight"]


class Operation(NamedTuple):
    """The forward (or backward, or one part of it) of one micro-batch through one stage of the model."""

    stage: int
    micro_batch: int
    backward: bool
    part: Part = "whole"


RankOperations = tuple[tuple[Operation, ...], ...]

SCHEDULES = ("1f1b", "interleaved_1f1b", "gpipe", "interleaved_zero_bubble", "zbv_zero_bubble")
TRAINED_SCHEDULES = ("1f1b", "interleaved_1f1b")  # those that the trainer runs; the others are simulated only
ZERO_BUBBLE = ("interleaved_zero_bubble", "zbv_zero_bubble")
_SEVERAL_STAGES = ("interleaved_1f1b", *ZERO_BUBBLE)


@lru_cache(maxsize=256)
def rank_operations(schedule: str, pp: int, micro_batches: int, virtual_stages: int = 1) -> RankOperations:
    """Return, for each of ``pp`` ranks, its operations in the order in which the rank runs them.

    Rank r holds the stages that ``stages_of_rank`` names. ``interleaved_1f1b`` with one stage on each rank is ``1f1b``,
    as the trainer runs it. ``1f1b`` also takes fewer micro-batches than ranks, which torch's ``Schedule1F1B`` refuses
    to build and Megatron-Core runs.

    Raises ``UserError`` for an unknown schedule, a size below 1, more than one stage for each rank where the schedule
    runs one, and micro-batches that do not fill whole rounds.
    """
    if schedule == "interleaved_1f1b" and virtual_stages == 1:
        schedule = "1f1b"
    _check(schedule, pp, micro_batches, virtual_stages)
    of_rank: dict[str, Callable[[int], tuple[Operation, ...]]] = {
        "gpipe": lambda rank: _gpipe(rank, micro_batches),
        "1f1b": lambda rank: _one_forward_one_backward(rank, pp, micro_batches),
        "interleaved_1f1b": lambda rank: _interleaved(rank, pp, micro_batches, virtual_stages),
        "interleaved_zero_bubble": lambda rank: _interleaved_zero_bubble(rank, pp, micro_batches, virtual_stages),
        "zbv_zero_bubble": lambda rank: _zbv_zero_bubble(rank, pp, micro_batches),
    }
    return tuple(of_rank[schedule](rank) for rank in range(pp))


def stages_of_rank(schedule: str, rank: int, pp: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """The stages that ``rank`` holds: every pp-th, or for ``zbv_zero_bubble`` one on the way down a V and one up."""
    if schedule == "zbv_zero_bubble":
        return (rank, 2 * pp - 1 - rank)
    return tuple(range(rank, pp * virtual_stages, pp))


def _check(schedule: str, pp: int, micro_batches: int, virtual_stages: int) -> None:
    if schedule not in SCHEDULES:
        raise UserError(f"unknown pipeline schedule {schedule!r}; {choose_from(schedule, SCHEDULES)}")
    for name, value in (("pp", pp), ("micro_batches", micro_batches), ("virtual_stages", virtual_stages)):
        if value < 1:
            raise UserError(f"{name} = {value} is below 1; raise it")
    if virtual_stages > 1 and schedule not in _SEVERAL_STAGES:
        raise UserError(
            f"schedule {schedule!r} runs one stage on each rank, not {virtual_stages}; use 'interleaved_1f1b'"
        )
    if schedule == "zbv_zero_bubble" and virtual_stages != 2:
        raise UserError(f"schedule 'zbv_zero_bubble' runs two stages on each rank, not {virtual_stages}")
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and micro_batches % round_size(pp, micro_batches):
        raise UserError(
            f"interleaved schedules run micro-batches in equal rounds of at least pp = {pp}; {micro_batches} "
            f"micro-batches cannot be divided into {micro_batches // pp}"
        )


def round_size(pp: int, micro_batches: int) -> int:
    """Micro-batches that interleaved schedules take through a stage before the rank's next stage has its turn.

    There are ``micro_batches // pp`` rounds of this size, or a single smaller one; what is left over cannot be run.
    """
    return micro_batches // max(1, micro_batches // pp)


def _gpipe(rank: int, micro_batches: int) -> tuple[Operation, ...]:
    return tuple(
        Operation(rank, micro_batch, backward) for backward in (False, True) for micro_batch in range(micro_batches)
    )


def _one_forward_one_backward(rank: int, pp: int, micro_batches: int) -> tuple[Operation, ...]:
    forwards = [Operation(rank, micro_batch, False) for micro_batch in range(micro_batches)]
    backwards = [Operation(rank, micro_batch, True) for micro_batch in range(micro_batches)]
    return _warm_up_then_alternate(forwards, backwards, warm_up=pp - 1 - rank)


def _interleaved(rank: int, pp: int, micro_batches: int, virtual_stages: int) -> tuple[Operation, ...]:
    forwards, backwards = _in_rounds(rank, pp, micro_batches, virtual_stages)
    # One round through every stage of this rank but its last, and two operations for each rank after it.
    warm_up = (virtual_stages - 1) * round_size(pp, micro_batches) + 2 * (pp - 1 - rank)
    return _warm_up_then_alternate(forwards, backwards, warm_up)


def _in_rounds(rank: int, pp: int, micro_batches: int, virtual_stages: int) -> tuple[list[Operation], list[Operation]]:
    """Forwards and backwards, round after round of micro-batches, each through all stages of the rank."""
    local_stages = range(rank, pp * virtual_stages, pp)
    size = round_size(pp, micro_batches)
    rounds = [range(start, start + size) for start in range(0, micro_batches, size)]
    forwards = [Operation(s, i, False) for round_ in rounds for s in local_stages for i in round_]
    backwards = [Operation(s, i, True) for round_ in rounds for s in reversed(local_stages) for i in round_]
    return forwards, backwards


def _warm_up_then_alternate(
    forwards: list[Operation], backwards: list[Operation], warm_up: int
) -> tuple[Operation, ...]:
    """``warm_up`` forwards; then a forward and a backward in turn; then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    alternating = [operation for pair in zip(forwards[warm_up:], backwards, strict=False) for operation in pair]
    cool_down = backwards[len(forwards) - warm_up :]
    return (*forwards[:warm_up], *alternating, *cool_down)


def _interleaved_zero_bubble(rank: int, pp: int, micro_batches: int, virtual_stages: int) -> tuple[Operation, ...]:
    """1F1B whose weight parts follow their input parts at a distance of ``rank`` (ZB-H1 of the paper)."""
    forwards, backwards = _in_rounds(rank, pp, micro_batches, virtual_stages)
    warm_up = min((virtual_stages - 1) * round_size(pp, micro_batches) + pp - 1 - rank, len(forwards))
    operations = forwards[:warm_up]
    for index, backward in enumerate(backwards):
        operations += forwards[warm_up + index : warm_up + index + 1]
        operations.append(backward._replace(part="input"))
        if index >= rank:
            operations.append(backwards[index - rank]._replace(part="weight"))
    late = backwards[max(0, len(backwards) - rank) :]
    return (*operations, *(backward._replace(part="weight") for backward in late))


def _zbv_zero_bubble(rank: int, pp: int, micro_batches: int) -> tuple[Operation, ...]:
    """Two stages for each rank, placed as a V: the rank of the first stage also has the last (ZB-V of the paper).

    The schedule is laid out for at least 2 pp - 1 micro-batches; those that do not exist are left out.
    """
    wanted = max(2 * pp - 1, micro_batches)
    down, down_input, down_weight = _passes(rank)
    up, up_input, up_weight = _passes(2 * pp - 1 - rank)
    ahead = 2 * pp - 1 - rank  # forwards of the first stage before the steady phase, in which it runs the others
    phases = (  # what runs, and how often in a row
        ([down], 2 * (pp - rank) - 1),
        ([up, down], rank),
        ([up, up_input, up_weight], pp - rank),
        ([down, down_input, down_weight, up, up_input, up_weight], wanted - ahead),
        ([down_input, down_weight, up, up_input, up_weight], ahead - pp),
        ([down_input, up_input], rank),
        ([down_input, down_weight], pp - rank),
        ([up_weight], rank),
        ([down_weight], rank),
    )
    next_of: dict[Operation, Iterator[int]] = defaultdict(count)
    order = (operation for operations, times in phases for operation in operations * times)
    numbered = (operation._replace(micro_batch=next(next_of[operation])) for operation in order)
    return tuple(operation for operation in numbered if operation.micro_batch < micro_batches)


def _passes(stage: int) -> tuple[Operation, Operation, Operation]:
    """Forward, and the two parts of the backward, of the first micro-batch."""
    return Operation(stage, 0, False), Operation(stage, 0, True, "input"), Operation(stage, 0, True, "weight")
