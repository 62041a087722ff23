"""A simulated step of one or several systems as a trace for Perfetto (ui.perfetto.dev) or the tracing page of Chrome.

The file is JSON of the Trace Event Format. It has a process for each data-parallel rank of a system, a thread for each
pipeline and context-parallel rank, and an event for each operation, named by phase and micro-batch. Inside an operation
waiting and communication are an event of their own; the gaps between operations are pipeline bubbles. Tensor-parallel
ranks run alike and share a thread.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wlb.report.timeline import Timeline
from wlb.schedules.operations import BACKWARD, FORWARD, HEAD, INPUT, WEIGHT, Operation

MOST_TRACKS = 256  # drawn of a system
_MICROSECONDS = 1e6
_PHASES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward", WEIGHT: "weight gradients", HEAD: "head"}
_SHORTEST_SECONDS = 1e-9  # anything shorter is rounding


def write_trace(path: Path, lines: Mapping[str, Timeline]) -> None:
    """Write steps of several systems, by name, to ``path``: below each other, all from the same time on.

    A job with over ``MOST_TRACKS`` tracks shows the slowest data-parallel rank only, and of that its first
    context-parallel ranks if there are still too many.
    """
    events: list[dict[str, Any]] = []
    first_process = 0
    for name, line in lines.items():
        events += (event | {"pid": first_process + event["pid"]} for event in _events(name, line, *_drawn(line)))
        first_process += line.job.layout.pools
    details = {name: {"step": line.plan.step, "seconds": line.seconds} for name, line in lines.items()}
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"simulated": "by wlb simulate", **details},
    }
    path.write_text(json.dumps(trace, allow_nan=False), encoding="utf-8")


def _drawn(line: Timeline) -> tuple[Sequence[int], Sequence[int]]:
    """The data-parallel and context-parallel ranks to draw."""
    layout, slowest = line.job.layout, int(line.rank_ends.max(axis=0).argmax())
    dp_ranks = range(layout.pools) if layout.pp * layout.dp_cp <= MOST_TRACKS else [slowest]
    return dp_ranks, range(min(layout.pool_size, max(1, MOST_TRACKS // (layout.pp * len(dp_ranks)))))


def _events(name: str, line: Timeline, dp_ranks: Sequence[int], cp_ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    layout = line.job.layout
    for dp in dp_ranks:
        yield {"ph": "M", "name": "process_name", "pid": dp, "args": {"name": f"{name} dp {dp}"}}
        for pp in range(layout.pp):
            for cp in cp_ranks:
                thread = pp * layout.pool_size + cp
                rank = f"pp {pp} cp {cp}" if layout.pool_size > 1 else f"pp {pp}"
                yield {"ph": "M", "name": "thread_name", "pid": dp, "tid": thread, "args": {"name": rank}}
                yield {"ph": "M", "name": "thread_sort_index", "pid": dp, "tid": thread, "args": {"sort_index": thread}}
                yield from _after_the_last(line, dp, pp, thread)
        for cp in cp_ranks:
            for index in line.operations_of(dp, cp):
                yield from _of_operation(line, index, line.operations[index], dp, cp)


def _of_operation(line: Timeline, index: int, operation: Operation, dp: int, cp: int) -> Iterator[dict[str, Any]]:
    thread = int(line.pipeline_ranks[index, dp]) * line.job.layout.pool_size + cp
    start, end = float(line.starts[index, dp]), float(line.ends[index, dp])
    compute = float(line.compute[index, dp, cp])
    phase = _PHASES[operation.kind]
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


def _span(
    name: str, category: str, start: float, end: float, process: int, thread: int, details: dict[str, Any]
) -> dict[str, Any]:
    """A complete event; times in the format are microseconds."""
    times = {"ts": start * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS}
    return {"ph": "X", "name": name, "cat": category, **times, "pid": process, "tid": thread, "args": details}
