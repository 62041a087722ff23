"""The attention kernel by itself: is it right, and how fast is it?

``exactness`` puts its results beside the float64 reference on the same inputs. Errors are root mean squares relative to
the exact values; "rounding" is that of storing the exact output in the compute type, below which nobody can get.
``largest`` is the largest error of any value over the largest exact value.

``kernel`` has times and achieved FLOP/s over numbers of queries and keys (as WLB-LLM, Figure 10). A document attends
itself causally; "prefix" is queries over keys that all come before them, as a context-parallel rank attends what it
received. Short work is measured many at a time, as it comes in a micro-batch. The second shape has a quarter of the
key/value heads (or half, where that is what there is).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from benchmarks.parts.gpu.setting import Result, Row, Setting, Workloads, attention_kernels, measure
from wlb.attention.backends import AttentionBackend, reference
from wlb.attention.variable_length import VariableLengthBatch
from wlb.profiling.timing import Timing
from wlb.profiling.workbench import Key
from wlb.workload import ModelShape
from wlb.workload.flops import ATTENTION_BACKWARD_FACTOR, attended_pairs

HEADS = ((8, 8, 128), (8, 2, 128), (8, 1, 64))  # query heads, key/value heads, head_dim
TENSORS = ("output", "log-sum-exp", "query gradient", "key gradient", "value gradient")
LARGEST_ERROR = 3e-2


def exactness(setting: Setting, workloads: Workloads) -> Result:
    rows: list[Row] = [
        {"kernel": kernel_name} | _exactness_row(name, batch, heads, setting)
        for kernel_name in attention_kernels(setting)
        for name, batch in _batches(setting.exact_tokens).items()
        for heads in HEADS
    ]
    wrong = [row["largest"] for row in rows if not row["largest"] <= LARGEST_ERROR]  # NaN, too
    problem = f"attention is wrong by {wrong[0]:.2g} of its largest value" if wrong else None
    return Result(rows, problem=problem)


def _batches(tokens: int) -> dict[str, VariableLengthBatch]:
    """Segments of different mixes, and pieces that attend keys received from other ranks."""
    return {
        "one document": VariableLengthBatch.of_segments((tokens,)),
        "short documents": VariableLengthBatch.of_segments(tuple(range(1, tokens // 16))),
        "around a tile": VariableLengthBatch.of_segments((127, 128, 129, 255, 256, 257, 1)),
        "long and short": VariableLengthBatch.of_segments((3 * tokens // 4, 1, tokens // 8, 37)),
        "received keys": VariableLengthBatch((tokens // 4, 1, 129), (tokens, 17, tokens // 2), causal=False),
        "window": VariableLengthBatch((tokens // 4, 1, 129), (tokens // 2, 17, 129), causal=True, window=tokens // 8),
    }


def _exactness_row(name: str, batch: VariableLengthBatch, heads: tuple[int, int, int], setting: Setting) -> Row:
    inputs = _inputs(batch, heads, setting)
    actual = _results(setting.backend, inputs, batch)
    exact = _results(reference, [tensor.double() for tensor in inputs], batch)
    pairs = list(zip(actual, exact, strict=True))
    return {
        "segments": name,
        "heads": "{}/{} x {}".format(*heads),
        "largest": float(torch.stack([(a - e).abs().max() / e.abs().max() for a, e in pairs]).max()),
        "rounding": _error(exact[0].to(setting.dtype), exact[0]),
        **{tensor: _error(a, e) for tensor, (a, e) in zip(TENSORS, pairs, strict=True)},
    }


def _inputs(batch: VariableLengthBatch, heads: tuple[int, int, int], setting: Setting) -> list[Tensor]:
    """Gradient of the output, query, key and value."""
    query_heads, kv_heads, head_dim = heads
    queries, keys = sum(batch.query_lengths), sum(batch.key_lengths)
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    shapes = ((queries, query_heads), (queries, query_heads), (keys, kv_heads), (keys, kv_heads))
    return [
        torch.randn(*shape, head_dim, generator=generator, device=setting.device).to(setting.dtype) for shape in shapes
    ]


def _results(backend: AttentionBackend, inputs: list[Tensor], batch: VariableLengthBatch) -> list[Tensor]:
    """The back end's ``TENSORS``; received keys are some of those that the queries attend, as on a rank."""
    grad_out, query, key, value = inputs
    out, log_sum_exp = backend.forward(query, key, value, batch)
    merged = (out, log_sum_exp) if batch.causal else (out * 0.5, log_sum_exp + 1.0)
    return [out, log_sum_exp, *backend.backward(grad_out, query, key, value, *merged, batch)]


def _error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


def kernel(setting: Setting, workloads: Workloads) -> Result:
    grouped = replace(setting.shape, kv_heads=max(1, setting.shape.heads // 4))
    return Result(
        [
            {"kernel": name} | row
            for name in attention_kernels(setting)
            for shape in (setting.shape, grouped)
            for row in _kernel_rows(shape, setting)
        ]
    )


def _kernel_rows(shape: ModelShape, setting: Setting) -> Iterator[Row]:
    bench = setting.workbench(shape, max(*setting.kernel_documents, *setting.kernel_keys))
    sizes: list[Key] = [("documents", (length,)) for length in setting.kernel_documents]
    sizes += [("prefix", both) for both in product(setting.kernel_queries, setting.kernel_keys)]
    cases = {key: bench.case(*key) for key in sizes}
    for key, timing in measure({key: case for key, (case, _) in cases.items()}, setting).items():
        yield _kernel_row(key, shape, timing / cases[key][1], int(cases[key][1]))


def _kernel_row(key: Key, shape: ModelShape, timing: Timing, together: int) -> Row:
    (kind, (queries, *_)), keys = key, key[1][-1]
    forward, backward = timing.tolist()
    pairs = float(attended_pairs(queries)) if kind == "documents" else queries * keys
    flops = 4.0 * shape.heads * shape.head_dim * pairs
    return {
        "heads": f"{shape.heads}/{shape.kv_heads} x {shape.head_dim}",
        "kind": kind,
        "queries": queries,
        "keys": keys,
        "together": together,
        "forward_seconds": forward,
        "backward_seconds": backward,
        "forward_tflops": flops / forward / 1e12,
        "backward_tflops": ATTENTION_BACKWARD_FACTOR * flops / backward / 1e12,
    }
