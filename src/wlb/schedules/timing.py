"""The duration of a pipeline-parallel step, from the seconds of every forward and backward.

Each rank runs its list of operations in order (``rank_operations``). An operation starts as soon as its rank is free
and its input has arrived: the forward of stage s waits for the forward of stage s - 1, a backward for the backward of
stage s + 1 (on the last stage for its own forward, or for a dealt head, which waits for that), and the weight part of a
backward for its input part. A weight part that follows another of its stage on the rank is in the same product, and
takes less. A transfer from another rank takes ``transfer`` seconds, during which both ranks may compute.

Which operation waits for which does not depend on seconds, so operations are sorted once into waves that depend only on
earlier waves. A wave is then one NumPy operation over all its ranks, and over all steps and data-parallel ranks that
are priced together.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.errors import UserError
from wlb.schedules.operations import BACKWARD, FORWARD, HEAD, INPUT, WEIGHT, Operation, RankOperations, rank_operations

Array = NDArray[np.float64]


class PipelineTimes(NamedTuple):
    """When every operation of many pipelines starts and ends, in seconds after the step's start.

    ``seconds`` and ``ends`` have shape (operations, ...), in the order of ``operations``; ``rank_ends`` is when each
    rank has finished, shape (pp, ...).
    """

    operations: tuple[Operation, ...]
    seconds: Array
    ends: Array
    rank_ends: Array

    @property
    def starts(self) -> Array:
        return self.ends - self.seconds


def pipeline_makespan(schedule: str, forward: ArrayLike, backward: ArrayLike, virtual_stages: int = 1) -> Array:
    """Return the seconds from the first forward to the last backward of a pipeline, or of many of them.

    ``forward`` and ``backward`` are seconds of shape (..., stages, micro_batches), stages in model order; rank r of
    pp = stages / ``virtual_stages`` runs every pp-th stage from stage r on. ``schedule`` is one of ``SCHEDULES``.
    Transfers take no time. The result has shape (...); for a single pipeline ().

    Raises ``UserError`` for times of any other shape or sign, and as ``rank_operations`` does.
    """
    forward, backward = (np.asarray(seconds, np.float64) for seconds in (forward, backward))
    shape = forward.shape
    if shape != backward.shape:
        raise UserError(f"forward seconds have shape {shape}, backward seconds {backward.shape}; they must be the same")
    if len(shape) < 2 or 0 in shape:
        raise UserError(f"pipeline seconds have shape {shape}; expected (..., stages, micro_batches), none of them 0")
    if not np.minimum(forward, backward).min() >= 0:  # or NaN
        raise UserError("pipeline seconds contain a negative value or NaN; every time must be 0 or more")
    stages, micro_batches = shape[-2:]
    if virtual_stages < 1 or stages % virtual_stages:
        raise UserError(f"{stages} stages cannot be dealt {virtual_stages} to a rank; give pp * virtual_stages rows")
    operations = rank_operations(schedule, stages // virtual_stages, micro_batches, virtual_stages)
    return np.asarray(pipeline_times(operations, forward, backward).rank_ends.max(axis=0))


def pipeline_times(
    operations: RankOperations,
    forward: Array,
    backward: Array,
    weight: ArrayLike = 0.0,
    joined: ArrayLike = 0.0,
    head: ArrayLike = 0.0,
    transfer: ArrayLike = 0.0,
) -> PipelineTimes:
    """When each operation runs in pipelines whose ranks have these ``operations``; seconds as ``pipeline_makespan``.

    ``weight`` is the weight part of a ``backward`` in two parts, and ``joined`` is what it loses in the product of the
    one before. ``head`` is the time of a dealt head, and ``transfer`` that of a micro-batch from one rank to the next,
    in both directions; they broadcast to (..., micro_batches).
    """
    *batch, stages, micro_batches = forward.shape
    later = np.minimum(weight, backward)
    phases = forward, backward, backward - later, later, later - np.minimum(joined, later)
    waves = _waves(operations)
    heads, sent = (np.broadcast_to(of, (*batch, micro_batches)).reshape(-1, micro_batches) for of in (head, transfer))
    by_stage = [times.reshape(-1, stages * micro_batches) for times in phases]
    stage, micro_batch, kind = waves.table
    row = (kind + waves.joins) * stages + np.where(kind == _KINDS.index(HEAD), 0, stage)
    seconds = np.concatenate([*by_stage, heads], axis=1).T[row * micro_batches + micro_batch]
    # Seconds of every transfer: 0 for none, then of every micro-batch; shape (1 + micro_batches, pipelines).
    delays = np.concatenate([np.zeros((1, len(sent))), sent.T])
    # Row 0 is the start of the step; row k + 1 is when the k-th operation ends.
    ends = np.zeros((len(seconds) + 1, seconds.shape[1]))
    if alone := seconds.shape[1] == 1:  # lists are faster for a single pipeline
        travels, done = delays[:, 0].tolist(), [0.0]
        for second, previous, input_, travelling in zip(seconds[:, 0].tolist(), *waves.waits_for.tolist(), strict=True):
            done.append(max(done[input_] + travels[travelling], done[previous]) + second)
        ends[:, 0] = done
    for start, stop in () if alone else waves.bounds:
        previous, input_, travelling = waves.waits_for[:, start:stop]
        arrival = np.maximum(ends[input_] + delays[travelling], ends[previous])
        np.add(arrival, seconds[start:stop], out=ends[start + 1 : stop + 1])
    by_pipeline = (seconds, ends[1:], ends[waves.last_of_rank])
    return PipelineTimes(waves.in_order, *(times.reshape(-1, *batch) for times in by_pipeline))


def planned_times(operations: Sequence[Sequence[RankOperations]], forward: Array, *seconds: ArrayLike) -> PipelineTimes:
    """``pipeline_times`` of pipelines with different lists, ``operations[step][dp]``, and with all its ``seconds``.

    These have shape (steps, dp, stages, micro_batches). All pipelines run the same operations, in different orders
    and heads on different ranks; the result has them in the order of the first pipeline.
    """
    steps, dp, _, micro_batches = forward.shape
    shapes = *[forward.shape] * (len(seconds) - 2), *[(steps, dp, micro_batches)] * 2  # of heads and transfers
    columns = [forward, *map(np.broadcast_to, seconds, shapes)]
    lists = {place: operations[place[0]][place[1]] for place in np.ndindex(steps, dp)}
    found = [pipeline_times(of, *(column[place] for column in columns)) for place, of in lists.items()]
    tables = [np.lexsort(_waves(of).table) for of in lists.values()]
    first = np.argsort(tables[0])  # from sorted to the order of the first
    in_order = [
        (times.seconds[t[first]], times.ends[t[first]], times.rank_ends) for times, t in zip(found, tables, strict=True)
    ]
    together = (np.stack(of, axis=1).reshape(-1, steps, dp) for of in zip(*in_order, strict=True))
    return PipelineTimes(found[0].operations, *together)


def in_dependency_order(operations: RankOperations) -> tuple[Operation, ...]:
    """The operations of all ranks in one order, each after those it waits for; ranks advance side by side."""
    return _waves(operations).in_order


_KINDS = FORWARD, BACKWARD, INPUT, WEIGHT, "weight part that joins a product", HEAD


class _Waves(NamedTuple):
    """Operations in wave order, and for each the rows of ``ends`` of the two operations that it waits for."""

    in_order: tuple[Operation, ...]
    table: NDArray[np.intp]  # the same: stage, micro-batch, and place of the kind in ``_KINDS``; (3, operations)
    joins: NDArray[np.bool_]  # whether it is a weight part in the product of the one before; (operations,)
    # (3, operations): the previous operation on the rank and the input, 0 for none; then the transfer, which is
    # 1 + the micro-batch if the input comes from another rank, else 0
    waits_for: NDArray[np.intp]
    bounds: tuple[tuple[int, int], ...]  # first and past-the-last operation of every wave
    last_of_rank: NDArray[np.intp]  # (pp,)


@lru_cache(maxsize=512)
def _waves(operations: RankOperations) -> _Waves:
    pending = [list(reversed(of_rank)) for of_rank in operations]
    stages = 1 + max(operation.stage for of_rank in operations for operation in of_rank)
    dealt = any(operation.kind == HEAD for of_rank in operations for operation in of_rank)

    def place_of(operation: Operation) -> int:
        """The place of a pass in those of its micro-batch: up through the stages, its dealt head, and down again."""
        stage, _, kind = operation
        return stage if kind == FORWARD else stages if kind == HEAD else 2 * stages - 1 + dealt - stage

    row: dict[tuple[int, int], tuple[int, int]] = {}  # of each pass, and the rank that ran it, by place and micro-batch
    last_of_rank = [0] * len(operations)
    in_order: list[Operation] = []
    joins: list[bool] = []
    waiting: list[tuple[int, int, int]] = []
    bounds: list[tuple[int, int]] = []
    while any(pending):
        following = {rank: of_rank[-1] for rank, of_rank in enumerate(pending) if of_rank}
        # A weight part waits for the input part of the same backward.
        inputs = {rank: (place_of(one) - (one.kind != WEIGHT), one.micro_batch) for rank, one in following.items()}
        ready = [rank for rank, input_ in inputs.items() if input_ in row or input_[0] < 0]
        assert ready, "the schedule deadlocks"
        bounds.append((len(in_order), len(in_order) + len(ready)))
        for rank in ready:
            operation = pending[rank].pop()
            place, sender = row.get(inputs[rank], (0, rank))
            waiting.append((last_of_rank[rank], place, 0 if sender == rank else 1 + operation.micro_batch))
            before = in_order[last_of_rank[rank] - 1][::2] if last_of_rank[rank] else ()
            joins.append(before == operation[::2] == (operation.stage, WEIGHT))
            in_order.append(operation)
            last_of_rank[rank] = len(in_order)
            if operation.kind != WEIGHT:
                row[place_of(operation), operation.micro_batch] = len(in_order), rank
    return _Waves(
        tuple(in_order),
        np.array([(stage, micro_batch, _KINDS.index(kind)) for stage, micro_batch, kind in in_order]).T,
        np.array(joins),
        np.array(waiting).T.copy(),
        tuple(bounds),
        np.array(last_of_rank),
    )
