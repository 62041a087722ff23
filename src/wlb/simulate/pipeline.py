"""How long a pipeline-parallel step takes, from the seconds of every forward and backward.

Each rank runs its list of operations in order (``rank_operations``); an operation starts as soon as its rank
is free and its input is there: the forward of stage s waits for the forward of stage s - 1, a backward for
that of stage s + 1, the last stage's backward for its own forward. Transfers take no time.

Which operation waits for which does not depend on the seconds, so the operations are sorted once into waves
that depend only on earlier waves. A wave is then one NumPy operation over all its ranks and, where many steps
or data-parallel ranks are priced together, over all of those.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.errors import UserError
from wlb.simulate.schedules import SCHEDULES, Operation, RankOperations, rank_operations

__all__ = [
    "SCHEDULES",
    "Operation",
    "RankOperations",
    "pipeline_makespan",
    "pipeline_makespans",
    "rank_operations",
]


def pipeline_makespan(schedule: str, forward: ArrayLike, backward: ArrayLike, virtual_stages: int = 1) -> float:
    """Return the seconds from the first forward to the last backward of one pipeline.

    ``forward`` and ``backward`` are seconds of shape (stages, micro_batches), stages in model order; stage s
    runs on rank s % pp, where pp = stages / ``virtual_stages``. ``schedule`` is one of ``SCHEDULES``.

    Raises ``UserError`` for times of any other shape or sign, and for what ``rank_operations`` refuses.
    """
    times = np.asarray(forward, dtype=np.float64)
    if times.ndim != 2:
        raise UserError(f"forward seconds have shape {times.shape}; expected (stages, micro_batches)")
    return float(pipeline_makespans(schedule, times, backward, virtual_stages))


def pipeline_makespans(
    schedule: str, forward: ArrayLike, backward: ArrayLike, virtual_stages: int = 1
) -> NDArray[np.float64]:
    """``pipeline_makespan`` of many pipelines at once.

    ``forward`` and ``backward`` have shape (..., stages, micro_batches); the result has shape (...).
    """
    forward_times, backward_times = _checked_times(forward, backward, virtual_stages)
    *batch, stages, micro_batches = forward_times.shape
    waves = _waves(schedule, stages // virtual_stages, micro_batches, virtual_stages)

    by_operation = np.concatenate(
        [times.reshape(-1, stages * micro_batches) for times in (forward_times, backward_times)], axis=1
    )
    seconds = by_operation.T[waves.operations]
    # Row 0 is the start of the step; row k + 1 is when the k-th operation ends.
    ends = np.zeros((len(seconds) + 1, seconds.shape[1]))
    for start, stop in waves.bounds:
        free = ends[waves.previous_on_rank[start:stop]]
        np.maximum(free, ends[waves.input[start:stop]], out=free)
        np.add(free, seconds[start:stop], out=ends[start + 1 : stop + 1])
    makespans: NDArray[np.float64] = ends[waves.last_of_rank].max(axis=0).reshape(batch)
    return makespans


def _checked_times(
    forward: ArrayLike, backward: ArrayLike, virtual_stages: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    forward_times = np.asarray(forward, dtype=np.float64)
    backward_times = np.asarray(backward, dtype=np.float64)
    if forward_times.shape != backward_times.shape:
        raise UserError(
            f"forward seconds have shape {forward_times.shape}, backward seconds {backward_times.shape}; "
            "they must be the same"
        )
    if forward_times.ndim < 2 or forward_times.size == 0:
        raise UserError(
            f"pipeline seconds have shape {forward_times.shape}; expected (..., stages, micro_batches), none of them 0"
        )
    if virtual_stages < 1 or forward_times.shape[-2] % virtual_stages:
        raise UserError(
            f"{forward_times.shape[-2]} stages cannot be dealt {virtual_stages} to a rank; "
            "give pp * virtual_stages rows"
        )
    # The negated form also catches NaN.
    if not (forward_times.min() >= 0 and backward_times.min() >= 0):
        raise UserError("pipeline seconds contain a negative value or NaN; every time must be 0 or more")
    return forward_times, backward_times


class _Waves(NamedTuple):
    """Operations in wave order, and for each the row of ``ends`` of the two operations it waits for."""

    operations: NDArray[np.intp]  # index into forward, then backward, times; (operations,)
    previous_on_rank: NDArray[np.intp]  # (operations,), 0 where there is none
    input: NDArray[np.intp]  # (operations,), 0 where there is none
    bounds: tuple[tuple[int, int], ...]  # first and past-the-last operation of every wave
    last_of_rank: NDArray[np.intp]  # (pp,)


@lru_cache(maxsize=64)
def _waves(schedule: str, pp: int, micro_batches: int, virtual_stages: int) -> _Waves:
    pending = [list(reversed(ops)) for ops in rank_operations(schedule, pp, micro_batches, virtual_stages)]
    stages = pp * virtual_stages
    row: dict[Operation | None, int] = {None: 0}
    last_of_rank = [0] * pp
    operations: list[int] = []
    previous_on_rank: list[int] = []
    inputs: list[int] = []
    bounds: list[tuple[int, int]] = []
    while any(pending):
        ready = [rank for rank in range(pp) if pending[rank] and _input_of(pending[rank][-1], stages) in row]
        assert ready, "the schedule deadlocks"
        bounds.append((len(operations), len(operations) + len(ready)))
        for rank in ready:
            operation = pending[rank].pop()
            inputs.append(row[_input_of(operation, stages)])
            previous_on_rank.append(last_of_rank[rank])
            stage, micro_batch, backward = operation
            operations.append((backward * stages + stage) * micro_batches + micro_batch)
            last_of_rank[rank] = row[operation] = len(operations)
    return _Waves(
        np.array(operations),
        np.array(previous_on_rank),
        np.array(inputs),
        tuple(bounds),
        np.array(last_of_rank),
    )


def _input_of(operation: Operation, stages: int) -> Operation | None:
    stage, micro_batch, backward = operation
    if backward:
        is_last = stage == stages - 1
        return Operation(stage, micro_batch, False) if is_last else Operation(stage + 1, micro_batch, True)
    return Operation(stage - 1, micro_batch, False) if stage else None
