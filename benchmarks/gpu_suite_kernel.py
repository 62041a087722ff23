"""Times and achieved FLOP/s of the attention kernel over numbers of queries and keys (as WLB-LLM, Figure 10).

A document attends itself causally; "prefix" is queries over keys that all come before them, as a context-parallel rank
attends what it received. Short work is measured many at a time, as it comes in a micro-batch. The second shape has a
quarter of the key/value heads (or half, where that is what there is).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpu_suite_setting import Result, Row, Setting, Workloads, measure

from wlb.profiling.timing import Case, Timing
from wlb.workload import ModelShape
from wlb.workload.flops import ATTENTION_BACKWARD_FACTOR, attended_pairs

Key = tuple[str, int, int]  # kind, queries, keys


def kernel(setting: Setting, workloads: Workloads) -> Result:
    grouped = replace(setting.shape, kv_heads=max(1, setting.shape.heads // 4))
    return Result([row for shape in (setting.shape, grouped) for row in _profile(shape, setting)])


def _profile(shape: ModelShape, setting: Setting) -> Iterator[Row]:
    bench = setting.workbench(shape, max(*setting.kernel_documents, *setting.kernel_keys))
    cases: dict[Key, tuple[Case, int]] = {
        ("document", length, length): bench.documents(length) for length in setting.kernel_documents
    }
    for queries in setting.kernel_queries:
        for keys in setting.kernel_keys:
            cases["prefix", queries, keys] = bench.prefix(queries, keys)
    timings = measure({key: case for key, (case, _) in cases.items()}, setting, "kernel")
    for key, timing in timings.items():
        yield _row(key, shape, timing * (1 / cases[key][1]), cases[key][1])


def _row(key: Key, shape: ModelShape, timing: Timing, together: int) -> Row:
    kind, queries, keys = key
    pairs = float(attended_pairs(queries)) if kind == "document" else queries * keys
    flops = 4.0 * shape.heads * shape.head_dim * pairs
    return {
        "heads": f"{shape.heads}/{shape.kv_heads} x {shape.head_dim}",
        "kind": kind,
        "queries": queries,
        "keys": keys,
        "together": together,
        "forward_seconds": timing.forward,
        "backward_seconds": timing.backward,
        "forward_tflops": flops / timing.forward / 1e12,
        "backward_tflops": ATTENTION_BACKWARD_FACTOR * flops / timing.backward / 1e12,
    }
