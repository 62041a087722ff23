"""Is the attention back end right? Its results beside the float64 reference on the same inputs.

Errors are root mean squares relative to the exact values; "rounding" is that of storing the exact output in the compute
type, below which nobody can get. ``largest`` is the largest error of any value over the largest exact value.
"""

from __future__ import annotations

import torch
from gpu_suite_setting import Result, Row, Setting, Workloads
from torch import Tensor

from wlb.attention.backends import AttentionBackend, reference
from wlb.attention.runs import Runs

HEADS = ((8, 8, 128), (8, 2, 128), (8, 1, 64))  # query heads, key/value heads, head_dim
TENSORS = ("output", "log-sum-exp", "query gradient", "key gradient", "value gradient")
LARGEST_ERROR = 3e-2


def exactness(setting: Setting, workloads: Workloads) -> Result:
    rows = [_row(name, runs, heads, setting) for name, runs in _runs(setting.exact_tokens).items() for heads in HEADS]
    worst = max(row["largest"] for row in rows)
    problem = f"attention is wrong by {worst:.2g} of its largest value" if worst > LARGEST_ERROR else None
    return Result(rows, problem=problem)


def _runs(tokens: int) -> dict[str, Runs]:
    """Segments of different mixes, and pieces that attend keys received from other ranks."""
    return {
        "one document": Runs.of_segments((tokens,)),
        "short documents": Runs.of_segments(tuple(range(1, tokens // 16))),
        "around a tile": Runs.of_segments((127, 128, 129, 255, 256, 257, 1)),
        "long and short": Runs.of_segments((3 * tokens // 4, 1, tokens // 8, 37)),
        "received keys": Runs((tokens // 4, 1, 129), (tokens, 17, tokens // 2), causal=False),
    }


def _row(name: str, runs: Runs, heads: tuple[int, int, int], setting: Setting) -> Row:
    inputs = _inputs(runs, heads, setting)
    actual = _results(setting.backend, inputs, runs)
    exact = _results(reference, [tensor.double() for tensor in inputs], runs)
    pairs = list(zip(actual, exact, strict=True))
    return {
        "segments": name,
        "heads": "{}/{} x {}".format(*heads),
        "largest": max(float((a - e).abs().max() / e.abs().max()) for a, e in pairs),
        "rounding": _error(exact[0].to(setting.dtype), exact[0]),
        **{tensor: _error(a, e) for tensor, (a, e) in zip(TENSORS, pairs, strict=True)},
    }


def _inputs(runs: Runs, heads: tuple[int, int, int], setting: Setting) -> list[Tensor]:
    """Gradient of the output, query, key and value."""
    query_heads, kv_heads, head_dim = heads
    queries, keys = sum(runs.query_lengths), sum(runs.key_lengths)
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    shapes = ((queries, query_heads), (queries, query_heads), (keys, kv_heads), (keys, kv_heads))
    return [
        torch.randn(*shape, head_dim, generator=generator, device=setting.device).to(setting.dtype) for shape in shapes
    ]


def _results(backend: AttentionBackend, inputs: list[Tensor], runs: Runs) -> list[Tensor]:
    """The back end's ``TENSORS``; received keys are some of those that the queries attend, as on a rank."""
    grad_out, query, key, value = inputs
    out, log_sum_exp = backend.forward(query, key, value, runs)
    merged = (out, log_sum_exp) if runs.causal else (out * 0.5, log_sum_exp + 1.0)
    return [out, log_sum_exp, *backend.backward(grad_out, query, key, value, *merged, runs)]


def _error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())
