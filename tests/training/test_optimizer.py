"""Which weights decay, and a gradient norm over shards and stages."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.training.distributed import run_ranks
from wlb.job.config import TrainingConfig
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.schedules.layout import Layout
from wlb.training.optimizer import build_optimizer, clip_gradients, learning_rate
from wlb.training.parallel.mesh import build_mesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules
from wlb.workload import ModelShape

MODEL = TransformerConfig(ModelShape(16, 3, 4, 2, 4, 22, 32))


def test_only_matrices_decay():
    stage = Transformer(MODEL)
    optimizer = build_optimizer(stage, TrainingConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(stage.parameters()))
    for name, parameter in stage.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_kernel_steps_all_weights_on_a_gpu(device):
    with torch.device("meta"):
        stage = Transformer(MODEL)
    with FakeTensorMode(allow_non_fake_inputs=True):
        optimizer = build_optimizer(stage.to_empty(device=device), TrainingConfig())
    assert optimizer.defaults["fused"] == (device == "cuda")


def _gradient(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.detach().clone().mul_(0.7)


def _norms_of_a_rank(parallel: Layout, largest: float) -> tuple[float, float]:
    mesh = build_mesh(parallel, "cpu")
    stages = build_stage_modules(MODEL, parallel, mesh, Execution(torch.device("cpu"), torch.float64), seed=1)
    for stage in stages:
        for parameter in stage.parameters():
            _gradient(parameter)
    return clip_gradients(stages, largest), clip_gradients(stages, 0.0)


@pytest.mark.parametrize(
    ("largest", "parallel"), [(0.0, Layout(cp=2, pp=2, tp=2)), (0.01, Layout(pp=3, tp=2, head="dealt"))]
)
def test_gradient_norm_is_that_of_the_whole_model(largest, parallel):
    whole = Transformer(MODEL).double()
    initialise_weights(whole, layers=MODEL.shape.layers, seed=1)
    expected = 0.7 * math.sqrt(sum(float((p.detach() ** 2).sum()) for p in whole.parameters()))
    for before, after in run_ranks(parallel.world_size, _norms_of_a_rank, parallel, largest):
        assert before == pytest.approx(expected, rel=1e-12)
        assert after == pytest.approx(largest or expected, rel=1e-12)


def rates(count: int, **settings: Any) -> list[float]:
    """Of the first ``count`` steps."""
    config = TrainingConfig(**{"learning_rate": 1.0, "lr_schedule": "wsd"} | settings)
    return [learning_rate(step, config) for step in range(1, count + 1)]


def test_every_schedule_warms_up_along_the_same_line():
    for schedule in ("cosine", "wsd", "constant"):
        rising = rates(10, steps=110, warmup_steps=10, lr_schedule=schedule)
        assert rising == [pytest.approx(step / 10) for step in range(1, 11)]
    assert rates(5, steps=5, warmup_steps=10)[-1] == pytest.approx(0.5)  # longer than training


def test_cosine_falls_to_a_tenth():
    falling = rates(110, steps=110, warmup_steps=10, lr_schedule="cosine")[9:]
    assert falling == sorted(falling, reverse=True)
    assert falling[50] == pytest.approx(0.55)
    assert falling[-1] == pytest.approx(0.1)


def test_wsd_stays_at_the_peak_and_falls_over_the_last_fifth():
    found = rates(120, steps=100, warmup_steps=10)
    assert set(found[9:80]) == {1.0}
    steps_down = [before - after for before, after in pairwise(found[79:100])]
    assert steps_down == [pytest.approx(0.9 / 20)] * 20
    assert found[99:] == [pytest.approx(0.1)] * 21
    assert rates(80, steps=100, warmup_steps=5) == rates(80, steps=1000, warmup_steps=5)  # which it is for


def test_a_rate_that_never_falls():
    assert set(rates(40, steps=20, warmup_steps=0, lr_schedule="constant")) == {1.0}
    for schedule in ("cosine", "wsd"):
        assert set(rates(1000, warmup_steps=0, lr_schedule=schedule)) == {1.0}  # no end is known
