"""Blocks are compiled once for all lengths, and compute what they compute uncompiled."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from wlb.attention import context_parallel_attention
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.sharding import make_shard_plan
from wlb.training.parallel.activation_checkpointing import apply_activation_checkpointing
from wlb.training.parallel.compile import compile_blocks
from wlb.workload import ModelShape

SHAPE = ModelShape(hidden=16, layers=3, heads=4, kv_heads=2, head_dim=4, ffn_hidden=20, vocab_size=31)
GRAPHS = 4  # attention's norm; projections and rotation; output projection; residual and feed-forward layer
LENGTHS = (41, 7, 23, 64, 41, 10, 3, 2, 57, 35)


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def model() -> Transformer:
    module = Transformer(TransformerConfig(SHAPE)).double()
    initialise_weights(module, layers=SHAPE.layers, seed=0)
    return module


def train_on(module: Transformer, length: int) -> Tensor:
    attend = partial(context_parallel_attention, shard_plan=make_shard_plan([length], 1, "per_sequence"), group=None)
    tokens = torch.arange(length)
    loss: Tensor = module(tokens % SHAPE.vocab_size, tokens, attend).square().sum()
    loss.backward()
    return loss.detach()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("strategy", ["none", "selective"])
def test_one_compilation_serves_every_length_and_every_block(strategy):
    plain, compiled = model(), model()
    compile_blocks(compiled, backend="aot_eager")  # traces forward and backward as inductor does, writes no code
    apply_activation_checkpointing(compiled, strategy)
    for length in LENGTHS:
        torch.testing.assert_close(train_on(compiled, length), train_on(plain, length), rtol=1e-12, atol=0)
        assert graphs() == GRAPHS
    for (name, weight), exact in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, exact.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_lengths_that_pytorch_treats_apart_are_compiled_once():
    compiled = model()
    compile_blocks(compiled, backend="aot_eager")
    apart = (1, SHAPE.hidden)
    for length in (*apart, *LENGTHS):
        train_on(compiled, length)
    compiled_graphs = graphs()
    assert compiled_graphs <= (len(apart) + 1) * GRAPHS
    for length in (*LENGTHS, *apart, 99):
        train_on(compiled, length)
    assert graphs() == compiled_graphs
