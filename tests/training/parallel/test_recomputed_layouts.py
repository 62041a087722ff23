"""Recomputed and compiled blocks inside FSDP, pipeline and tensor parallelism: the same gradients as plain blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from tests.training.distributed import run_ranks
from wlb.job.config import Checkpointing
from wlb.models.transformer import TransformerConfig
from wlb.schedules.layout import Layout
from wlb.sharding import make_shard_plan
from wlb.training.data.batch import TokenBatch
from wlb.training.data.sharded_batch import shard_batch
from wlb.training.parallel.mesh import build_mesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules, compile_blocks
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.workload import ModelShape

BLOCKS = 2  # of a pipeline rank
VOCABULARY = 32
Steps = Sequence[Sequence[tuple[int, ...]]]
# Segment lengths of micro-batches; under tp each new number of tokens costs DTensor a plan of every operator.
STEPS = ([(9, 4), (13,), (7, 3, 3), (5,)], [(5,), (2, 11), (4, 1), (6, 7)])
STEPS_TO_COMPILE = ([(9, 4), (12,), (7, 7, 3), (5,)], [(11,), (2, 9), (21,), (6, 6)])
LAYOUTS = [
    Layout(dp=2),
    Layout(cp=2),
    Layout(tp=2),
    Layout(pp=2),
    Layout(pp=2, virtual_pp=2, schedule="interleaved_1f1b"),
]
# With FSDP inside, under cp in level steps; each takes seconds to compile.
COMPILED_LAYOUTS = [Layout(pp=2), Layout(tp=2), Layout(cp=2)]
OWN_RANKS = ((0, 1), (0,), (1,), (0, 1))  # of the micro-batches of a level step
GRAPHS = 5  # those of test_parallelize.py, and one more under tp


def _gradients(
    parallel: Layout,
    strategy: Checkpointing = "none",
    steps: Steps = STEPS,
    *,
    compiled: bool = False,
    level: bool = False,
) -> dict[str, Tensor]:
    """Loss and gradients of this rank after two steps of four micro-batches, by name."""
    mesh, device = build_mesh(parallel, "cpu"), torch.device("cpu")
    layers = BLOCKS * parallel.pp
    shape = ModelShape(hidden=16, layers=layers, heads=4, kv_heads=2, head_dim=4, ffn_hidden=20, vocab_size=VOCABULARY)
    stages = build_stage_modules(
        TransformerConfig(shape),
        parallel,
        mesh,
        Execution(device, torch.float64),
        seed=0,
        activation_checkpointing=strategy,
        compiled=compiled,
        keeps_weights=level,
    )
    runner = PipelineRunner(stages, parallel, mesh, 4, Execution(device, torch.float64))
    found = {}
    for step, lengths in enumerate(steps):
        batches = []
        for segments, own_ranks in zip(lengths, OWN_RANKS, strict=True):
            ranks = own_ranks if level else tuple(range(parallel.cp))
            if mesh.rank("cp") not in ranks:
                continue
            tokens = torch.arange(sum(segments)) * 7 % VOCABULARY
            positions = torch.cat([torch.arange(length) for length in segments])
            batch = TokenBatch(tokens, tokens.roll(-1), positions, segments)
            plan = make_shard_plan(segments, len(ranks), "per_document")
            rank = ranks.index(mesh.rank("cp"))
            batches.append(shard_batch(batch, plan, rank, parallel.tp, ranks if level else ()))
        found[f"loss of step {step}"] = runner.run_step(batches, 100)
    for stage in stages:
        for name, weight in stage.named_parameters():
            assert isinstance(weight.grad, DTensor)
            found[name] = weight.grad.to_local().clone()
    return found


def _largest_difference(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    return max(float((found[name] - exact[name]).abs().max()) if exact[name].numel() else 0.0 for name in exact)


def _recomputed(layouts: list[Layout]) -> list[float]:
    differences: list[float] = []
    for parallel in layouts:
        exact = _gradients(parallel)
        strategies: tuple[Checkpointing, ...] = ("selective", "full")
        differences += [_largest_difference(_gradients(parallel, strategy), exact) for strategy in strategies]
    return differences


def test_recomputation_changes_no_bit_in_any_layout():
    for differences in run_ranks(2, _recomputed, LAYOUTS):
        assert differences == [0.0] * 2 * len(LAYOUTS)


def _compiled(layouts: list[Layout]) -> list[tuple[float, int]]:
    """Compiled against plain, and graphs compiled over two steps of lengths that are all different."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        # Traces forward and backward as inductor does, and writes no code.
        patch.setattr("wlb.training.parallel.parallelize.compile_blocks", partial(compile_blocks, backend="aot_eager"))
        for parallel in layouts:
            torch.compiler.reset()
            counters.clear()
            gradients = partial(_gradients, parallel, steps=STEPS_TO_COMPILE, level=parallel.cp > 1)
            difference = _largest_difference(gradients(strategy="selective", compiled=True), gradients())
            results.append((difference, counters["stats"]["unique_graphs"]))
    dist.barrier()
    return results


@pytest.mark.exhaustive  # test_parallelize compiles and compares in one process; layouts repeat it
def test_compiled_blocks_agree_and_are_compiled_once():
    for results in run_ranks(2, _compiled, COMPILED_LAYOUTS):
        for parallel, (difference, graphs) in zip(COMPILED_LAYOUTS, results, strict=True):
            assert difference < 1e-12, parallel
            assert graphs <= GRAPHS, (parallel, graphs)
