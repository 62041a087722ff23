"""Every strategy computes the same numbers to the last bit, and attends as often as it says."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.training.distributed import run_ranks
from wlb.attention import context_parallel_attention
from wlb.attention.backends import cpu
from wlb.attention.exchange import send_keys
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.sharding import make_shard_plan
from wlb.training.parallel.activation_checkpointing import Strategy, apply_activation_checkpointing
from wlb.workload import ModelShape

SHAPE = ModelShape(hidden=16, layers=3, heads=4, kv_heads=2, head_dim=4, ffn_hidden=20, vocab_size=31)
LENGTHS = (5, 9, 1, 13)
EXCHANGES = {"none": 1, "selective": 1, "full": 2}  # of keys and values, a layer; what is received is kept


def model(strategy: Strategy) -> Transformer:
    module = Transformer(TransformerConfig(SHAPE)).double()
    initialise_weights(module, layers=SHAPE.layers, seed=0)
    apply_activation_checkpointing(module, strategy)
    return module


def run_model(module: Transformer, cp: int, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores and gradients of one rank's tokens."""
    plan = make_shard_plan(LENGTHS, cp, "per_sequence")
    positions = torch.from_numpy(plan.positions(rank))
    attend = partial(context_parallel_attention, shard_plan=plan, group=dist.group.WORLD if cp > 1 else None)
    scores = module(positions % SHAPE.vocab_size, positions, attend)
    scores.square().sum().backward()
    return scores.detach(), {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("strategy", ["selective", "full"])
def test_numbers_do_not_change_by_a_bit(strategy: Strategy) -> None:
    scores, gradients = run_model(model("none"), 1, 0)
    recomputed_scores, recomputed_gradients = run_model(model(strategy), 1, 0)
    assert torch.equal(scores, recomputed_scores)
    assert gradients.keys() == recomputed_gradients.keys()
    assert all(torch.equal(gradients[name], recomputed_gradients[name]) for name in gradients)


@pytest.mark.parametrize(("strategy", "passes"), [("none", 1), ("selective", 1), ("full", 2)])
def test_only_full_attends_twice(strategy: Strategy, passes: int) -> None:
    with mock.patch.object(cpu, "forward", wraps=cpu.forward) as forward:
        run_model(model(strategy), 1, 0)
    assert forward.call_count == passes * SHAPE.layers


def _exchanges_and_numbers(strategy: Strategy) -> tuple[int, Tensor, dict[str, Tensor]]:
    with mock.patch("wlb.attention.context_parallel.send_keys", wraps=send_keys) as send:
        scores, gradients = run_model(model(strategy), 2, dist.get_rank())
    return send.call_count, scores, gradients


def _all_strategies() -> dict[str, tuple[int, Tensor, dict[str, Tensor]]]:
    strategies: tuple[Strategy, ...] = ("none", "selective", "full")
    return {strategy: _exchanges_and_numbers(strategy) for strategy in strategies}


def test_context_parallel_ranks_agree_and_selective_exchanges_no_more_than_none() -> None:
    for results in run_ranks(2, _all_strategies):
        _, scores, gradients = results["none"]
        for strategy, (exchanges, other_scores, other_gradients) in results.items():
            assert exchanges == EXCHANGES[strategy] * SHAPE.layers
            assert torch.equal(scores, other_scores)
            assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_parameters_keep_their_names() -> None:
    none, selective, full = (list(model(strategy).state_dict()) for strategy in ("none", "selective", "full"))
    assert none == selective == full
