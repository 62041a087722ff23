"""A simulated step as a trace for Perfetto (ui.perfetto.dev) or Chrome's tracing page.

The file is JSON of the Trace Event Format: a process for each data-parallel rank, in it a thread for each pipeline and
context-parallel rank, and on that an event for each operation, named by phase and micro-batch. Inside an operation the
part that a rank waits or communicates is an event of its own; what lies between operations is the pipeline's bubble.
Tensor-parallel ranks run alike and share a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.schedules.operations import Operation
from wlb.simulate.timeline import Timeline

MOST_TRACKS = 256  # that are drawn unless ranks are named
_MICROSECONDS = 1e6
_SHORTEST_SECONDS = 1e-9  # what is shorter is rounding


def write_trace(
    path: Path, line: Timeline, *, dp_ranks: Sequence[int] | None = None, cp_ranks: Sequence[int] | None = None
) -> int:
    """Write ``line`` to ``path``, of all ranks or of those named; returns the number of tracks.

    Of a job with over ``MOST_TRACKS`` of them only the slowest data-parallel rank is drawn, and if that is still too
    many, its first context-parallel ranks. Raises ``UserError`` for ranks that do not exist and a file that cannot be
    written.
    """
    layout = line.job.layout
    slowest = int(line.rank_ends.max(axis=0).argmax())
    if dp_ranks is None:
        dp_ranks = range(layout.dp) if layout.pp * layout.replicas <= MOST_TRACKS else [slowest]
    if cp_ranks is None:
        cp_ranks = range(min(layout.cp, max(1, MOST_TRACKS // (layout.pp * len(dp_ranks)))))
    for name, ranks, size in (("dp", dp_ranks, layout.dp), ("cp", cp_ranks, layout.cp)):
        if missing := [rank for rank in ranks if not 0 <= rank < size]:
            raise UserError(f"the job has no {name} rank {missing[0]}; there are {size}, from 0")
    trace = {
        "traceEvents": [*_events(line, dp_ranks, cp_ranks)],
        "displayTimeUnit": "ms",
        "otherData": {"simulated": "by wlb simulate", "step": line.plan.step, "seconds": line.seconds},
    }
    try:
        path.write_text(json.dumps(trace, allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise UserError(f"trace {path} cannot be written: {error.strerror}") from None
    return len(dp_ranks) * len(cp_ranks) * layout.pp


def _events(line: Timeline, dp_ranks: Sequence[int], cp_ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    layout = line.job.layout
    for dp in dp_ranks:
        yield {"ph": "M", "name": "process_name", "pid": dp, "args": {"name": f"dp {dp}"}}
        for pp in range(layout.pp):
            for cp in cp_ranks:
                thread = pp * layout.cp + cp
                name = f"pp {pp} cp {cp}" if layout.cp > 1 else f"pp {pp}"
                yield {"ph": "M", "name": "thread_name", "pid": dp, "tid": thread, "args": {"name": name}}
                yield {"ph": "M", "name": "thread_sort_index", "pid": dp, "tid": thread, "args": {"sort_index": thread}}
                yield from _after_the_last(line, dp, pp, thread)
        for index, operation in enumerate(line.operations):
            members = line.plan.ranks[dp][operation.micro_batch].ranks
            for cp in cp_ranks:
                if not members or cp in members:
                    yield from _of_operation(line, index, operation, dp, cp)


def _of_operation(line: Timeline, index: int, operation: Operation, dp: int, cp: int) -> Iterator[dict[str, Any]]:
    thread = line.pipeline_ranks[index] * line.job.layout.cp + cp
    start, end = float(line.starts[index, dp]), float(line.ends[index, dp])
    compute = float(line.compute[index, dp, cp])
    phase = _phase(operation)
    micro_batch = line.plan.ranks[dp][operation.micro_batch]
    details = {
        "micro-batch": operation.micro_batch,
        "stage": operation.stage,
        "tokens": micro_batch.tokens,
        "documents": len(micro_batch.segments),
        "longest": max(micro_batch.lengths, default=0),
        "compute ms": 1e3 * compute,
    }
    yield _span(f"{phase} {operation.micro_batch}", phase, start, end, dp, thread, details)
    if end - start - compute > _SHORTEST_SECONDS:
        yield _span("wait and communicate", "wait", start + compute, end, dp, thread, {})


def _after_the_last(line: Timeline, dp: int, pp: int, thread: int) -> Iterator[dict[str, Any]]:
    own_end, begin = float(line.rank_ends[pp, dp]), float(line.rank_ends[pp].max())
    middle = begin + float(line.reduction[pp])
    end = middle + float(line.optimizer[pp])
    spans = (("wait for dp ranks", own_end, begin), ("gradient reduction", begin, middle), ("optimizer", middle, end))
    for name, start, stop in spans:
        if stop - start > _SHORTEST_SECONDS:
            yield _span(name, "step end", start, stop, dp, thread, {})


def _phase(operation: Operation) -> str:
    if not operation.backward:
        return "forward"
    return "backward" if operation.part == "whole" else f"backward {operation.part}"


def _span(
    name: str, category: str, start: float, end: float, process: int, thread: int, details: dict[str, Any]
) -> dict[str, Any]:
    """A complete event; times in the format are microseconds."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "pid": process,
        "tid": thread,
        "args": details,
    }
