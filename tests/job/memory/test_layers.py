"""The memory model's layers against what PyTorch allocates: exactly what is held, and the peaks beside it."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.attention.live_bytes import LiveBytes
from tests.cases import in_turn
from wlb.job.memory.layers import LayerMemory, TokenMemory, Unit
from wlb.models.experts import Routing
from wlb.models.transformer import Transformer, TransformerConfig, rotary_angles
from wlb.runtime.batch import ShardedAttention
from wlb.runtime.loss import packed_loss
from wlb.sharding import make_shard_plan
from wlb.simulate import simulated_job
from wlb.training.parallel.parallelize import apply_activation_checkpointing
from wlb.workload import ModelShape, hardware_preset
from wlb.workload.base import Checkpointing
from wlb.workload.shapes import Experts, LinearLayer

# Widths that are all different, so that none can be taken for another.
SHAPE = ModelShape(hidden=64, layers=1, heads=6, kv_heads=2, head_dim=16, ffn_hidden=160, vocab_size=1000)
TOKENS = (2000, 1000)
ROWS = sum(TOKENS)


@dataclass(frozen=True)
class Measured:
    """Bytes above those before: at most in forward, held after it, and at most in backward above what is held."""

    forward: int
    held: int
    backward: int


def layers(dtype: torch.dtype, strategy: Checkpointing = "none", shape: ModelShape = SHAPE) -> LayerMemory:
    hardware = hardware_preset("cpu").computing_in(str(dtype).removeprefix("torch."))
    job = simulated_job(shape, ROWS, "plain-4d", hardware=hardware, activation_checkpointing=strategy)
    return LayerMemory(job, ROWS)


def model(dtype: torch.dtype, strategy: Checkpointing = "none", shape: ModelShape = SHAPE) -> Transformer:
    module = Transformer(TransformerConfig(shape)).to(dtype)
    apply_activation_checkpointing(module, strategy)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


def measure(run, grad: Tensor | None = None) -> Measured:
    with LiveBytes() as live:
        out = run()
        forward, held = live.peak, live.now
        live.peak = live.now
        out.backward(grad)
        backward = live.peak - held + (0 if grad is None else grad.nbytes)  # which in a model comes from the next layer
    return Measured(forward, held, backward)


def measure_block(dtype: torch.dtype, strategy: Checkpointing, shape: ModelShape = SHAPE) -> Measured:
    module = model(dtype, strategy, shape)
    x = torch.randn(ROWS, SHAPE.hidden, dtype=dtype).requires_grad_()
    rotation = rotary_angles(torch.arange(ROWS), TransformerConfig(SHAPE), dtype)
    attend = ShardedAttention(ROWS, make_shard_plan(TOKENS, 1, "per_sequence"), None)
    return measure(
        lambda: module.layers["0"](x, rotation, attend, Routing(ROWS, balance=0.1, z=0.1)), torch.ones_like(x)
    )


@in_turn(
    ("dtype", "strategy"),
    [
        *product([torch.float32, torch.float64], ["none", "keep_attention", "full"]),
        *product([torch.bfloat16], ["keep_attention", "full"]),
    ],
)
def test_a_block_holds_to_the_byte_what_is_predicted(dtype, strategy):
    found, block = measure_block(dtype, strategy), layers(dtype, strategy).block()
    assert found.held == block.held
    assert found.forward == pytest.approx(block.forward, rel=0.1)
    assert found.backward == pytest.approx(block.backward, rel=0.1)


@in_turn(
    ("experts", "strategy"),
    product([Experts(8, 2, 80), Experts(64, 4, 40)], ["none", "keep_attention", "full"]),
)
def test_a_block_of_experts_holds_what_is_predicted(experts, strategy):
    """Besides a few numbers for each expert."""
    shape = replace(SHAPE, experts=experts)
    found = measure_block(torch.float32, strategy, shape)
    block = layers(torch.float32, strategy, shape).blocks(range(1))[0]
    assert found.held == pytest.approx(block.held, abs=16 * experts.count)
    assert found.forward == pytest.approx(block.forward, rel=0.15)
    assert found.backward == pytest.approx(block.backward, rel=0.2)
    assert found.held + found.backward <= 1.01 * (block.held + block.backward)


def test_in_half_precision_norms_hold_float32():
    found, block = measure_block(torch.bfloat16, "none"), layers(torch.bfloat16).block()
    output = ROWS * SHAPE.hidden * 2  # the next block's norm takes a copy in its place
    assert found.held == block.held + output
    assert found.forward == pytest.approx(block.forward, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_and_loss(dtype):
    module, head = model(dtype), layers(dtype).head()
    x = torch.randn(ROWS, SHAPE.hidden, dtype=dtype).requires_grad_()
    labels = torch.randint(SHAPE.vocab_size, (ROWS,))
    assert module.head is not None
    found = measure(lambda: packed_loss(module.head(x), labels, ROWS, averaged_over=1, overwrite=True))
    kept_input = 0 if dtype == torch.bfloat16 else x.nbytes
    assert found.held == pytest.approx(head.held - kept_input, abs=64)  # the loss itself
    assert found.forward == pytest.approx(head.forward - kept_input, rel=0.1)
    assert found.backward == pytest.approx(head.backward, rel=0.1)


def test_a_linear_layer_holds_its_inputs_and_nothing_of_other_ranks():
    linear = LinearLayer("gated_delta", heads=6, key_heads=3, key_dim=20, value_dim=12)
    shape = replace(SHAPE, layers=3, pattern="M-*-M", linear=linear)
    job = simulated_job(shape, 2 * ROWS, "plain-4d", hardware="cpu", cp=2)
    mixing, attending, bare = LayerMemory(job, ROWS).blocks(range(3))
    assert attending == LayerMemory(simulated_job(SHAPE, 2 * ROWS, "plain-4d", hardware="cpu", cp=2), ROWS).block()
    assert (mixing.received, bare.received) == (0, 0) < (attending.received, 1)
    attention = 2 * (6 + 2) * 16 + 6  # query, key, value and output, and a log-sum-exp for each head
    widths = 4 * 60 + 6 * 72 - attention
    assert mixing.held - (attending.held - attending.received) == 4 * ROWS * widths
    norm = ROWS * (2 * 64 + 1) + ROWS * 64  # with its output
    assert mixing.held - bare.held == 4 * (norm + 4 * ROWS * 160)
    assert bare.weights == 64 * (2 * 60 + 3 * 72 + 2 * 6) + 64


def test_slices_of_a_hybrid_keep_keys_and_values_where_it_attends():
    linear = LinearLayer("mamba2", heads=6, key_heads=3, key_dim=20, value_dim=12)
    hybrid = replace(SHAPE, layers=3, pattern="M-*-*-", linear=linear)
    jobs = [simulated_job(shape, 2 * ROWS, "plain-4d", hardware="cpu", cp=2) for shape in (hybrid, SHAPE)]
    shares = [TokenMemory(job).of_slice for job in jobs]
    assert shares[0] == pytest.approx(shares[1] * 2 / 3)


def test_every_weight_is_counted():
    for layer, module in (("block", "layers.0"), ("head", "head"), ("embedding", "embedding")):
        unit: Unit = getattr(layers(torch.float32), layer)()
        assert unit.weights == sum(weight.numel() for weight in model(torch.float32).get_submodule(module).parameters())
