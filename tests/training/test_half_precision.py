"""bfloat16 on CPU: computed in half precision, stored, summed and reduced in float32, and it learns."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.distributed import run_ranks
from tests.training.jobs import job
from wlb.job.config import TrainingConfig
from wlb.models.transformer import TransformerConfig
from wlb.schedules.layout import Layout
from wlb.sharding import make_shard_plan
from wlb.training.data.batch import TokenBatch
from wlb.training.data.sharded_batch import ShardedBatch, shard_batch
from wlb.training.optimizer import build_optimizer, clip_gradients
from wlb.training.parallel.mesh import build_mesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.training.runtime.environment import joined_job
from wlb.workload import ModelShape

CONFIG = TransformerConfig(
    ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_hidden=48, vocab_size=16)
)
LENGTHS = (20, 31)
STEPS = 12


def _batch(tp: int) -> ShardedBatch:
    """Counting, which is easily learnt."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    tokens = positions % CONFIG.shape.vocab_size
    batch = TokenBatch(tokens, (tokens + 1) % CONFIG.shape.vocab_size, positions, LENGTHS)
    return shard_batch(batch, make_shard_plan(LENGTHS, 1, "per_sequence"), 0, tp)


def _train(parallel: Layout, dtype: torch.dtype) -> dict[str, Any]:
    mesh, device = build_mesh(parallel, "cpu"), torch.device("cpu")
    stages = build_stage_modules(CONFIG, parallel, mesh, Execution(device, dtype), seed=0)
    optimizers = [build_optimizer(stage, TrainingConfig(learning_rate=1e-2)) for stage in stages]
    runner = PipelineRunner(stages, parallel, mesh, 2, Execution(device, dtype))
    computed: set[torch.dtype] = set()

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        computed.add(out.dtype)

    for stage in stages:
        for module in stage.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(note)
    losses = []
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(runner.run_step([_batch(parallel.tp)] * 2, 2 * parallel.dp * sum(LENGTHS)))
        clip_gradients(stages, 1.0)
        for optimizer in optimizers:
            optimizer.step()
    weights = [weight for stage in stages for weight in stage.parameters()]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return {
        "losses": [float(loss) for loss in losses],
        "computed": computed,
        "stored": {weight.dtype for weight in weights},
        "gradients": {weight.grad.dtype for weight in weights if weight.grad is not None},
        "moments": {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")},
        "loss": {loss.dtype for loss in losses},
    }


@pytest.mark.parametrize("parallel", [Layout(dp=2), Layout(pp=2)], ids=["dp", "pp"])
def test_bfloat16_learns_with_float32_weights_gradients_and_moments(parallel):
    results = run_ranks(2, _train, parallel, torch.bfloat16)
    for result in results:
        assert result["computed"] == {torch.bfloat16}
        assert all(result[name] == {torch.float32} for name in ("stored", "gradients", "moments", "loss"))
    losses = [sum(of_step) for of_step in zip(*(result["losses"] for result in results), strict=True)]
    assert losses[0] == pytest.approx(2.77, abs=0.1)  # ln 16
    assert losses[-1] < 0.5 * losses[0]


def _growth_over_lengths(folder: Path) -> int:
    """MiB that 400 products of as many shapes leave behind in a job's process."""
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.pop(variable, None)
    with joined_job(job(folder)):
        weight = torch.ones(128, 128, dtype=torch.bfloat16)
        before = _resident_mib()
        for length in range(200, 600):
            torch.ones(length, 128, dtype=torch.bfloat16) @ weight
        return _resident_mib() - before


def _resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_every_new_length(tmp_path):
    with ProcessPoolExecutor(1, get_context("forkserver")) as alone:
        assert alone.submit(_growth_over_lengths, tmp_path).result() < 100
