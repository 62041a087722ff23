"""The learning rate's shape, which weights decay, and a gradient norm over shards and stages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.training.distributed import run_ranks
from wlb.config import ParallelConfig, TrainingConfig
from wlb.training.initialise import initialise_weights
from wlb.training.model import Transformer, TransformerConfig
from wlb.training.optimizer import build_optimizer, clip_gradients, learning_rate
from wlb.training.parallelize import build_mesh, build_stage_modules
from wlb.workload import ModelShape

MODEL = TransformerConfig(ModelShape(16, 3, 4, 2, 4, 22, 32))


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    config = TrainingConfig(steps=110, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(1, 111)]
    assert rates[:10] == [pytest.approx(step / 10) for step in range(1, 11)]
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[59] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)


def test_learning_rate_is_constant_without_a_known_end():
    config = TrainingConfig(warmup_steps=0, learning_rate=0.5)
    assert {learning_rate(step, config) for step in (1, 10, 1000)} == {0.5}


def test_learning_rate_when_warm_up_is_longer_than_training():
    config = TrainingConfig(steps=5, warmup_steps=10, learning_rate=1.0)
    assert learning_rate(5, config) == pytest.approx(0.5)


def test_only_matrices_decay():
    stage = Transformer(MODEL)
    optimizer = build_optimizer(stage, TrainingConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(stage.parameters()))
    for name, parameter in stage.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.3)


def _gradient(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.detach().clone().mul_(0.7)


def _norms_of_a_rank(parallel: ParallelConfig, largest: float) -> tuple[float, float]:
    mesh = build_mesh(parallel, "cpu")
    stages = build_stage_modules(MODEL, parallel, mesh, dtype=torch.float64, device=torch.device("cpu"), seed=1)
    for stage in stages:
        for parameter in stage.parameters():
            _gradient(parameter)
    return clip_gradients(stages, largest), clip_gradients(stages, 0.0)


@pytest.mark.parametrize("largest", [0.0, 0.01])
def test_gradient_norm_is_that_of_the_whole_model(largest):
    parallel = ParallelConfig(cp=2, pp=2, tp=2)
    whole = Transformer(MODEL).double()
    initialise_weights(whole, layers=MODEL.shape.layers, seed=1)
    expected = 0.7 * math.sqrt(sum(float((p.detach() ** 2).sum()) for p in whole.parameters()))
    for before, after in run_ranks(8, _norms_of_a_rank, parallel, largest):
        assert before == pytest.approx(expected, rel=1e-12)
        assert after == pytest.approx(largest or expected, rel=1e-12)


def test_learning_rate_does_not_depend_on_steps_once_its_end_is_set():
    short = TrainingConfig(steps=50, decay_steps=100, warmup_steps=0, learning_rate=1.0)
    long = TrainingConfig(steps=200, decay_steps=100, warmup_steps=0, learning_rate=1.0)
    assert [learning_rate(step, short) for step in range(1, 51)] == [learning_rate(step, long) for step in range(1, 51)]
    assert learning_rate(100, long) == learning_rate(150, long) == pytest.approx(0.1)
