"""Which weights decay, and a gradient norm over shards and stages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.training.distributed import run_ranks
from wlb.config import ParallelConfig, TrainingConfig
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.training.optimizer import build_optimizer, clip_gradients
from wlb.training.parallel.parallelize import build_mesh, build_stage_modules
from wlb.workload import ModelShape

MODEL = TransformerConfig(ModelShape(16, 3, 4, 2, 4, 22, 32))


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
