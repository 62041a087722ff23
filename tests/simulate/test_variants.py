"""Jobs of models with windows, latents and experts, from their shape to a step's seconds."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.simulate.jobs import SHAPE, WINDOW, documents
from wlb.simulate import SimulationResult, simulate, simulated_job
from wlb.simulate.costs import JobCosts
from wlb.workload import ModelShape, model_shape
from wlb.workload.links import group_link, shard_bytes
from wlb.workload.shapes import Experts, LatentAttention
from wlb.workload.weights import parameters

LAYOUT: dict[str, Any] = {"dp": 2, "cp": 2, "pp": 2, "tp": 2}
VARIANTS = {
    "windowed": replace(SHAPE, sliding_window=256),
    "hybrid": replace(SHAPE, sliding_window=256, full_attention_every=4),
    "routed": replace(SHAPE, experts=Experts(16, 2, 512, shared_hidden=512, dense_layers=1)),
    "latent": replace(SHAPE, latent=LatentAttention(q_rank=512, kv_rank=256, rope_dim=64, value_dim=64)),
}
STEPS = 4


def run(shape: ModelShape, system: str) -> SimulationResult:
    job = simulated_job(shape, WINDOW, system, micro_batches=2, **LAYOUT)
    return simulate(job, documents(), STEPS)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_system_trains_every_variant(name):
    results = {system: run(VARIANTS[name], system) for system in ("plain-4d", "balanced")}
    for result in results.values():
        assert sum(result.where.values()) == pytest.approx(result.mean_step_seconds)
        assert np.all(result.gpu_seconds > 0)
    # Blocks so small are bound by adding up gradients and by what drains, which balance does not shorten.
    assert results["balanced"].speed_at_equal_work(results["plain-4d"]) > 0.95


def test_what_grows_less_with_length_leaves_less_to_balance():
    imbalance = {
        name: run(shape, "plain-4d").imbalance["micro_batches"] for name, shape in {"dense": SHAPE, **VARIANTS}.items()
    }
    assert imbalance["windowed"] < imbalance["hybrid"] < imbalance["dense"]


def test_all_experts_are_gathered_and_updated():
    shape = VARIANTS["routed"]
    job = simulated_job(shape, WINDOW, "plain-4d", micro_batches=2, **LAYOUT)
    costs = JobCosts(job)
    blocks = parameters(shape) - 2 * shape.vocab_size * shape.hidden
    link = group_link(job.hardware, "all_gather", 4, stride=2)
    assert costs.block_gather == pytest.approx(float(link.seconds(shard_bytes(blocks / 8 / 2 * 2, 4))))
    weights = (costs.optimizer - group_link(job.hardware, "point_to_point", job.layout.world_size, 1).latency).sum()
    assert weights * job.hardware.memory_bandwidth == pytest.approx(parameters(shape) / 2 / 4 * 10 * 4)


def test_presets_run_as_the_jobs_of_their_size():
    # Shapes whose key/value heads are fewer than tp, with layers that stages share unevenly.
    for name in ("gemma3-27b", "gpt-oss-20b", "deepseek-v3"):
        job = simulated_job(name, 131_072, "plain-4d", tp=8, cp=2, pp=4, dp=1)
        assert job.shape.layers == model_shape(name).layers
        assert JobCosts(job).rank_reduction.min() > 0
