"""Memory of experts and latent attention: all weights count, and what travels is what is kept."""

from dataclasses import replace
from typing import Any

import pytest

from wlb.job.job import Job
from wlb.job.memory.layers import LayerMemory
from wlb.job.memory.step import predict_memory
from wlb.simulate import simulated_job
from wlb.workload import ModelShape, hardware_preset
from wlb.workload.shapes import BlockKind, Experts, LatentAttention
from wlb.workload.weights import parameters

DENSE = ModelShape(hidden=64, layers=6, heads=8, kv_heads=8, head_dim=16, ffn_hidden=96, vocab_size=64)
ROUTED = replace(DENSE, experts=Experts(8, 2, 32, shared_hidden=16, dense_layers=2))
LATENT = replace(DENSE, latent=LatentAttention(q_rank=24, kv_rank=20, rope_dim=4, value_dim=12))
WINDOWED = replace(DENSE, full_attention_every=3, sliding_window=16)
ROWS = 128


def job(shape: ModelShape, **layout: Any) -> Job:
    hardware = hardware_preset("cpu").computing_in("bfloat16")
    return simulated_job(shape, 4096, "plain-4d", hardware=hardware, sharding="per_document", **layout)


def held(shape: ModelShape, kind: BlockKind, **layout: Any) -> int:
    return LayerMemory(job(shape, **layout), ROWS).block(kind).held


@pytest.mark.parametrize("shape", [DENSE, ROUTED, LATENT, WINDOWED])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_weight_is_held_whether_a_token_meets_it_or_not(shape, tp):
    norms = (2 * shape.layers + 1) * shape.hidden
    parts = predict_memory(job(shape, tp=tp), [1]).parts
    assert parts["weights"] == 4 * (parameters(shape) // tp + norms)


def test_the_first_stage_holds_the_blocks_without_experts():
    layers = LayerMemory(job(ROUTED, pp=2), ROWS)
    dense, routed = (layers.block(BlockKind("full", is_routed)).weights for is_routed in (False, True))
    assert [unit.weights for unit in layers.blocks(range(3))] == [dense, dense, routed]
    assert [unit.weights for unit in layers.blocks(range(3, 6))] == [routed] * 3


def test_a_block_holds_tokens_as_experts_get_and_return_them():
    dense, routed = (held(ROUTED, BlockKind("full", is_routed)) for is_routed in (False, True))
    columns = 4 * 2 * (2 * 32 + 16 - 96)  # SwiGLU's four tensors, in two bytes
    assert routed - dense == ROWS * (columns + 2 * 2 * 2 * 64 + 8 * 4)


def test_of_other_ranks_latents_are_kept_and_not_what_they_expand_to():
    kind = BlockKind("full", False)
    assert held(LATENT, kind, cp=2) - held(LATENT, kind) == ROWS * (20 + 4) * 2
    assert held(DENSE, kind, cp=2) - held(DENSE, kind) == ROWS * 2 * 8 * 16 * 2


def test_a_window_saves_no_memory():
    assert held(WINDOWED, BlockKind("sliding", False), cp=2) == held(DENSE, BlockKind("full", False), cp=2)
