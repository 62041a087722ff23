"""Benchmark of the memory model: predicted against measured peaks of real training processes, on the CPU.

    .venv/bin/python -m benchmarks.memory [--layers N] [--tokens N] [--only NAME]... [--out FILE]

Every configuration trains a model for three steps in as many processes as its layout has, one thread each, on
micro-batches of different lengths. Measured is what the operating system counts against a process, and would end it
for: the high-water mark of its resident memory, less what it had resident after training a small model in the same
layout (libraries, threads, buffers of the process group). The C library is told to hand every tensor's pages back when
it is freed, or its own caching would be measured. The largest of the processes is compared with the prediction of
``wlb.job.memory.walk`` for the same lengths. Needs Linux.
"""

import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.parts.measurement import command, facts, make_parser, show, write
from benchmarks.parts.ranks import on_ranks
from wlb.errors import UserError
from wlb.job.config import ParallelConfig, TrainingConfig
from wlb.job.memory.walk import predict_memory
from wlb.models.transformer import TransformerConfig
from wlb.runtime.batch import Batch, RankSlice
from wlb.simulate import simulated_job
from wlb.training.environment import bound_compiled_products
from wlb.training.optimizer import build_optimizer, clip_gradients
from wlb.training.parallel.mesh import build_mesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.workload import ModelShape, hardware_preset
from wlb.workload.base import Checkpointing

# Read by the C library when a process starts: an own mapping for every tensor from 64 KiB on, one pool for the rest.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000", "MALLOC_ARENA_MAX": "1"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
WARM_UP_TOKENS = 64
STEPS = 3
SHARES = (1.0, 0.6, 1.2, 0.9)  # of --tokens: micro-batches of different lengths
MIB = 2**20
COLUMNS = {
    "configuration": "{name}",
    "predicted MiB": "{predicted:,.0f}",
    "measured MiB": "{measured:,.0f}",
    "error": "{error:+.1%}",
}


@dataclass(frozen=True)
class Case:
    """One layout and strategy."""

    name: str
    parallel: ParallelConfig
    checkpointing: Checkpointing = "none"
    dtype: str = "float32"


def _cases() -> list[Case]:
    layouts = {
        "1 process": ParallelConfig(),
        "dp 2": ParallelConfig(dp=2),
        "pp 2": ParallelConfig(pp=2),
        "pp 2 x 2 stages": ParallelConfig(pp=2, virtual_pp=2, schedule="interleaved_1f1b"),
        "cp 2": ParallelConfig(cp=2),
        "tp 2": ParallelConfig(tp=2),
    }
    strategies: tuple[Checkpointing, ...] = ("none", "keep_attention", "full")
    cases = [Case(f"{name}, {s}", layout, s) for name, layout in layouts.items() for s in strategies]
    more = [
        Case("tp 2 pp 2, none", ParallelConfig(tp=2, pp=2)),
        Case("dp 2 cp 2, full", ParallelConfig(dp=2, cp=2), "full"),
        Case("1 process, none, bfloat16", layouts["1 process"], "none", "bfloat16"),
    ]
    return [*cases, *more]


def shape_of(layers: int) -> ModelShape:
    return ModelShape(hidden=256, layers=layers, heads=4, kv_heads=2, head_dim=64, ffn_hidden=704, vocab_size=2048)


def predict(case: Case, shape: ModelShape, tokens: Sequence[int]) -> int:
    """Bytes of the process that holds most."""
    job = simulated_job(
        shape,
        max(tokens),
        "plain-4d",
        hardware=hardware_preset("cpu").computing_in(case.dtype),
        micro_batches=len(tokens),
        sharding="per_document",
        activation_checkpointing=case.checkpointing,
        **vars(case.parallel.layout),
    )
    return predict_memory(job, tokens).total


def measure(case: Case, shape: ModelShape, tokens: Sequence[int]) -> int:
    """Bytes of the process that held most."""
    return max(on_ranks(case.parallel.layout.world_size, _measure_rank, case, shape, tokens))


def _measure_rank(case: Case, shape: ModelShape, tokens: Sequence[int]) -> int:
    bound_compiled_products()
    small = ModelShape(hidden=64, layers=shape.layers, heads=4, kv_heads=2, head_dim=16, ffn_hidden=64, vocab_size=64)
    _train(case, small, [WARM_UP_TOKENS] * len(tokens))
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    _train(case, shape, tokens)
    return _resident("VmHWM") - before


def _train(case: Case, shape: ModelShape, tokens: Sequence[int]) -> None:
    parallel, execution = case.parallel.layout, Execution(torch.device("cpu"), getattr(torch, case.dtype))
    mesh = build_mesh(parallel, "cpu")
    config, kept = TransformerConfig(shape), case.checkpointing
    stages = build_stage_modules(config, parallel, mesh, execution, seed=0, activation_checkpointing=kept)
    optimizers = [build_optimizer(stage, TrainingConfig()) for stage in stages]
    runner = PipelineRunner(stages, parallel, mesh, len(tokens), execution)
    batches = []
    for count in tokens:
        ids, positions = torch.randint(shape.vocab_size, (count,)), torch.arange(count)
        batch = Batch(ids, ids, positions, (count,))
        batches.append(RankSlice(0, mesh.rank("cp"), parallel, "per_document", group=mesh.group("cp")).of(batch))
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        runner.run_step(batches, sum(tokens))
        clip_gradients(stages, 1.0)
        for optimizer in optimizers:
            optimizer.step()


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, out="results/memory.json")
    parser.add_argument("--layers", type=int, default=8, help="transformer blocks of the model")
    parser.add_argument("--tokens", type=int, default=1536, help="tokens of a typical micro-batch")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this configuration (repeatable)")
    options = parser.parse_args(arguments)
    os.environ.update(ALLOCATOR | ONE_THREAD)
    shape = shape_of(options.layers)
    tokens = [int(options.tokens * share) for share in SHARES]
    known = {case.name: case for case in _cases()}
    if unknown := [name for name in options.only or () if name not in known]:
        raise UserError(f"unknown configuration {unknown[0]!r}; choose from {'; '.join(known)}")
    rows: list[dict[str, Any]] = []
    for case in [known[name] for name in options.only or known]:
        predicted, measured = predict(case, shape, tokens), measure(case, shape, tokens)
        error = predicted / measured - 1
        rows.append({"name": case.name, "predicted": predicted, "measured": measured, "error": error})
        print(f"{case.name}: {error:+.1%}", file=sys.stderr, flush=True)
    in_mib = [row | {name: row[name] / MIB for name in ("predicted", "measured")} for row in rows]
    show("Peak memory of a process", in_mib, COLUMNS)
    write(facts("torch") | {"rows": rows, "tokens": tokens, "shape": vars(shape)}, options.out)


if __name__ == "__main__":
    sys.exit(main())
