"""Benchmark of ``training.compile``: blocks on micro-batches of ever new lengths, plain and compiled, on the CPU.

    .venv/bin/python -m benchmarks.compilation [--steps N] [--tokens N] [--out FILE]

One process, one thread, forward and backward of a small model. Every step has another length. "graphs" are what
``torch.compile`` compiled over the whole run: if it compiled for a length again, they would grow with the steps.
"first step" includes that compilation; "per 1,000 tokens" is the median over the steps after it, in which the two take
turns.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import numpy as np
import torch
from torch._dynamo.utils import counters

from benchmarks.parts.measurement import facts, make_parser, show, write
from wlb.attention import context_parallel_attention
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.sharding import make_shard_plan
from wlb.training.parallel.parallelize import compile_blocks
from wlb.workload import ModelShape

SHAPE = ModelShape(hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, ffn_hidden=704, vocab_size=512)
SEED = 0


def model(*, compiled: bool) -> Transformer:
    module = Transformer(TransformerConfig(SHAPE))
    initialise_weights(module, layers=SHAPE.layers, seed=SEED)
    if compiled:
        compile_blocks(module)
    return module


def step_seconds(module: Transformer, length: int) -> float:
    tokens = torch.arange(length)
    attend = partial(context_parallel_attention, shard_plan=make_shard_plan([length], 1, "per_sequence"), group=None)
    began = time.perf_counter()
    module(tokens % SHAPE.vocab_size, tokens, attend).sum().backward()
    return time.perf_counter() - began


def main() -> None:
    parser = make_parser(__doc__, out="results/compilation.json")
    parser.add_argument("--steps", type=int, default=30, help="steps, each of another length")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a typical micro-batch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    span = np.linspace(0.5, 1.5, arguments.steps) * arguments.tokens
    lengths = np.random.default_rng(SEED).permutation(span.astype(int)).tolist()
    models = {"plain": model(compiled=False), "compiled": model(compiled=True)}
    seconds = {name: [0.0] * len(lengths) for name in models}
    for index, length in enumerate(lengths):
        for name, module in models.items():
            seconds[name][index] = step_seconds(module, length)
    rows = [
        {
            "blocks": name,
            "graphs": counters["stats"]["unique_graphs"] if name == "compiled" else 0,
            "first_step_seconds": times[0],
            "seconds_per_1000_tokens": statistics.median(
                1000 * time / length for time, length in zip(times[1:], lengths[1:], strict=True)
            ),
        }
        for name, times in seconds.items()
    ]
    show(f"{len(set(lengths))} different lengths", rows)
    write(facts("torch") | {"rows": rows, "lengths": lengths}, arguments.out)


if __name__ == "__main__":
    main()
