"""The duration of a pipeline-parallel step, from the seconds of every forward and backward.

Each rank runs its list of operations in order (``rank_operations``); an operation starts as soon as its rank
is free and its input is there: the forward of stage s waits for the forward of stage s - 1, a backward for
that of stage s + 1, the last stage's backward for its own forward. What comes from another rank takes ``transfer``
seconds on the way, during which both ranks may compute.

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
from wlb.schedules.operations import ZERO_BUBBLE, Operation, rank_operations, stages_of_rank

_WEIGHT_SHARE = 0.5  # of a backward: one of its two matrix products with each weight gives the weight's gradient


class PipelineTimes(NamedTuple):
    """When every operation of many pipelines starts and ends, in seconds after the step's start.

    ``starts`` and ``ends`` have shape (operations, ...), in the order of ``operations``; ``rank_ends`` is when each
    rank has run all of its own, shape (pp, ...).
    """

    operations: tuple[Operation, ...]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    rank_ends: NDArray[np.float64]


def pipeline_makespan(
    schedule: str,
    forward: ArrayLike,
    backward: ArrayLike,
    virtual_stages: int = 1,
    *,
    weight: ArrayLike | None = None,
    transfer: ArrayLike = 0.0,
) -> float:
    """Return the seconds from the first forward to the last backward of one pipeline.

    ``forward`` and ``backward`` are seconds of shape (stages, micro_batches), stages in model order; which rank runs
    stage s is the schedule's (``stages_of_rank``), where pp = stages / ``virtual_stages``. ``schedule`` is one of
    ``SCHEDULES``. ``weight`` is the part of ``backward`` that the zero-bubble schedules put off, by default half of
    it. ``transfer`` is what a micro-batch takes from one rank to the next, forwards as well as backwards, a number
    or of shape (micro_batches,).

    Raises ``UserError`` for times of any other shape or sign, and for what ``rank_operations`` refuses.
    """
    times = np.asarray(forward, dtype=np.float64)
    if times.ndim != 2:
        raise UserError(f"forward seconds have shape {times.shape}; expected (stages, micro_batches)")
    return float(pipeline_makespans(schedule, times, backward, virtual_stages, weight=weight, transfer=transfer))


def pipeline_makespans(
    schedule: str,
    forward: ArrayLike,
    backward: ArrayLike,
    virtual_stages: int = 1,
    *,
    weight: ArrayLike | None = None,
    transfer: ArrayLike = 0.0,
) -> NDArray[np.float64]:
    """``pipeline_makespan`` of many pipelines at once.

    ``forward``, ``backward`` and ``weight`` have shape (..., stages, micro_batches), ``transfer`` one that broadcasts
    to (..., micro_batches); the result has shape (...).
    """
    *_, rank_ends = _run(schedule, forward, backward, virtual_stages, weight, transfer)
    makespans: NDArray[np.float64] = rank_ends.max(axis=0)
    return makespans


def pipeline_times(
    schedule: str,
    forward: ArrayLike,
    backward: ArrayLike,
    virtual_stages: int = 1,
    *,
    weight: ArrayLike | None = None,
    transfer: ArrayLike = 0.0,
    together: ArrayLike | None = None,
) -> PipelineTimes:
    """When each operation of the pipelines runs; arguments as for ``pipeline_makespans``.

    ``together``, shape (..., micro_batches), joins pipelines: those that have the same number in a micro-batch, from 0
    to the number of pipelines, begin each of its operations when all of them can.
    """
    waves, seconds, ends, rank_ends = _run(schedule, forward, backward, virtual_stages, weight, transfer, together)
    batch = rank_ends.shape[1:]
    return PipelineTimes(
        waves.in_order,
        (ends[1:] - seconds).reshape(-1, *batch),
        ends[1:].reshape(-1, *batch),
        rank_ends,
    )


def _run(
    schedule: str,
    forward: ArrayLike,
    backward: ArrayLike,
    virtual_stages: int,
    weight: ArrayLike | None,
    transfer: ArrayLike,
    together: ArrayLike | None = None,
) -> tuple[_Waves, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Waves, seconds and ends of all operations, shapes (operations, pipelines), ends with a row 0 of zeros before
    them; and ends of ranks, (pp, ...)."""
    phases = _checked_times(forward, backward, virtual_stages)
    *batch, stages, micro_batches = phases[0].shape
    waves = _waves(schedule, stages // virtual_stages, micro_batches, virtual_stages)
    if schedule in ZERO_BUBBLE:
        phases = [phases[0], *_split_backward(phases[1], weight)]
    by_operation = np.concatenate([times.reshape(-1, stages * micro_batches) for times in phases], axis=1)
    seconds = by_operation.T[waves.operations]
    delays = _delays(transfer, batch, micro_batches)
    joined = None if together is None else np.asarray(together, np.int64).reshape(-1, micro_batches).T
    micro_batch = waves.operations % micro_batches
    # Row 0 is the start of the step; row k + 1 is when the k-th operation ends.
    ends = np.zeros((len(seconds) + 1, seconds.shape[1]))
    for start, stop in waves.bounds:
        arrival = ends[waves.input[start:stop]]
        if delays is not None:
            arrival += delays[waves.travelling[start:stop]]
        np.maximum(arrival, ends[waves.previous_on_rank[start:stop]], out=arrival)
        if joined is not None:
            arrival = _latest(arrival, joined[micro_batch[start:stop]])
        np.add(arrival, seconds[start:stop], out=ends[start + 1 : stop + 1])
    return waves, seconds, ends, ends[waves.last_of_rank].reshape(-1, *batch)


def _latest(arrival: NDArray[np.float64], joined: NDArray[np.int64]) -> NDArray[np.float64]:
    """The latest arrival among joined pipelines, for each of them; shapes (operations, pipelines)."""
    operations, pipelines = arrival.shape
    place = joined + pipelines * np.arange(operations)[:, None]
    latest = np.zeros(arrival.size)
    np.maximum.at(latest, place.ravel(), arrival.ravel())
    return np.asarray(latest[place], np.float64)


def _checked_times(forward: ArrayLike, backward: ArrayLike, virtual_stages: int) -> list[NDArray[np.float64]]:
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
    return [forward_times, backward_times]


def _split_backward(backward: NDArray[np.float64], weight: ArrayLike | None) -> tuple[NDArray[np.float64], ...]:
    weights = _WEIGHT_SHARE * backward if weight is None else np.asarray(weight, dtype=np.float64)
    if weights.shape != backward.shape:
        raise UserError(f"weight seconds have shape {weights.shape}, backward seconds {backward.shape}")
    if not (weights.min() >= 0 and np.all(weights <= backward)):
        raise UserError("weight seconds must lie between 0 and the backward seconds of which they are a part")
    return backward - weights, weights


def _delays(transfer: ArrayLike, batch: list[int], micro_batches: int) -> NDArray[np.float64] | None:
    """Seconds under way of nothing, then of every micro-batch; (1 + micro_batches, pipelines), None if all are 0."""
    seconds = np.asarray(transfer, dtype=np.float64)
    if not np.all(seconds >= 0):
        raise UserError("transfer seconds contain a negative value or NaN; every time must be 0 or more")
    if not seconds.any():
        return None
    by_micro_batch = np.broadcast_to(seconds, (*batch, micro_batches)).reshape(-1, micro_batches).T
    return np.concatenate([np.zeros((1, by_micro_batch.shape[1])), by_micro_batch])


class _Waves(NamedTuple):
    """Operations in wave order, and for each the row of ``ends`` of the two operations it waits for."""

    in_order: tuple[Operation, ...]
    operations: NDArray[np.intp]  # index into the times of forwards, then backwards (then weights); (operations,)
    previous_on_rank: NDArray[np.intp]  # (operations,), 0 where there is none
    input: NDArray[np.intp]  # (operations,), 0 where there is none
    travelling: NDArray[np.intp]  # (operations,), 1 + the micro-batch where the input comes from another rank, or 0
    bounds: tuple[tuple[int, int], ...]  # first and past-the-last operation of every wave
    last_of_rank: NDArray[np.intp]  # (pp,)


@lru_cache(maxsize=64)
def _waves(schedule: str, pp: int, micro_batches: int, virtual_stages: int) -> _Waves:
    pending = [list(reversed(ops)) for ops in rank_operations(schedule, pp, micro_batches, virtual_stages)]
    stages = pp * virtual_stages
    home = {s: rank for rank in range(pp) for s in stages_of_rank(schedule, rank, pp, virtual_stages)}
    row: dict[Operation | None, int] = {None: 0}
    last_of_rank = [0] * pp
    in_order: list[Operation] = []
    previous_on_rank: list[int] = []
    inputs: list[int] = []
    travelling: list[int] = []
    bounds: list[tuple[int, int]] = []
    while any(pending):
        ready = [rank for rank in range(pp) if pending[rank] and _input_of(pending[rank][-1], stages) in row]
        assert ready, "the schedule deadlocks"
        bounds.append((len(in_order), len(in_order) + len(ready)))
        for rank in ready:
            operation = pending[rank].pop()
            waits_for = _input_of(operation, stages)
            inputs.append(row[waits_for])
            from_afar = waits_for is not None and home[waits_for.stage] != rank
            travelling.append(1 + operation.micro_batch if from_afar else 0)
            previous_on_rank.append(last_of_rank[rank])
            in_order.append(operation)
            last_of_rank[rank] = row[operation] = len(in_order)
    phase = {"whole": 1, "input": 1, "weight": 2}
    return _Waves(
        tuple(in_order),
        np.array([(phase[o.part] * o.backward * stages + o.stage) * micro_batches + o.micro_batch for o in in_order]),
        np.array(previous_on_rank),
        np.array(inputs),
        np.array(travelling),
        tuple(bounds),
        np.array(last_of_rank),
    )


def _input_of(operation: Operation, stages: int) -> Operation | None:
    stage, micro_batch, backward, part = operation
    if not backward:
        return Operation(stage - 1, micro_batch, False) if stage else None
    if part == "weight":
        return Operation(stage, micro_batch, True, "input")
    if stage == stages - 1:
        return Operation(stage, micro_batch, False)
    return Operation(stage + 1, micro_batch, True, part)
