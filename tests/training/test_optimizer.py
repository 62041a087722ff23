"""Which weights decay, and a gradient norm over shards and stages."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from pydantic import ValidationError
from torch import nn

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


def _gradient(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.detach().clone().mul_(0.7)


def _norms_of_a_rank(parallel: Layout, largest: float) -> tuple[float, float]:
    mesh = build_mesh(parallel, "cpu")
    stages = build_stage_modules(MODEL, parallel, mesh, Execution(torch.device("cpu"), torch.float64), seed=1)
    for stage in stages:
        for parameter in stage.parameters():
            _gradient(parameter)
    return clip_gradients(stages, largest), clip_gradients(stages, 0.0)


@pytest.mark.parametrize("largest", [0.0, 0.01])
def test_gradient_norm_is_that_of_the_whole_model(largest):
    parallel = Layout(cp=2, pp=2, tp=2)
    whole = Transformer(MODEL).double()
    initialise_weights(whole, layers=MODEL.shape.layers, seed=1)
    expected = 0.7 * math.sqrt(sum(float((p.detach() ** 2).sum()) for p in whole.parameters()))
    for before, after in run_ranks(8, _norms_of_a_rank, parallel, largest):
        assert before == pytest.approx(expected, rel=1e-12)
        assert after == pytest.approx(largest or expected, rel=1e-12)


def rates(config: TrainingConfig, steps: int) -> list[float]:
    return [learning_rate(step, config) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_every_schedule_warms_up_along_the_same_line(schedule):
    config = TrainingConfig(steps=110, warmup_steps=10, learning_rate=1.0, lr_schedule=schedule)
    assert rates(config, 10) == [pytest.approx(step / 10) for step in range(1, 11)]


def test_cosine_falls_to_a_tenth():
    falling = rates(TrainingConfig(steps=110, warmup_steps=10, learning_rate=1.0), 110)[9:]
    assert falling == sorted(falling, reverse=True)
    assert falling[50] == pytest.approx(0.55)
    assert falling[-1] == pytest.approx(0.1)


def test_wsd_stays_at_the_peak_and_falls_over_the_last_part():
    config = TrainingConfig(steps=100, warmup_steps=10, learning_rate=2.0, lr_schedule="wsd", decay_fraction=0.25)
    found = rates(config, 120)
    assert set(found[9:75]) == {2.0}
    steps_down = [before - after for before, after in pairwise(found[74:100])]
    assert steps_down == [pytest.approx(2.0 * 0.9 / 25)] * 25
    assert found[99:] == [pytest.approx(0.2)] * 21


def test_wsd_does_not_depend_on_steps_before_its_decay():
    """What the schedule is for: how long to train can be decided while training."""
    short = TrainingConfig(steps=100, warmup_steps=5, lr_schedule="wsd")
    long = TrainingConfig(steps=1000, warmup_steps=5, lr_schedule="wsd")
    assert rates(short, 80) == rates(long, 80)


def test_wsd_that_decays_all_the_way_starts_after_warm_up():
    config = TrainingConfig(steps=20, warmup_steps=10, learning_rate=1.0, lr_schedule="wsd", decay_fraction=1.0)
    found = rates(config, 20)
    assert max(found) == found[9] == 1.0
    assert found[10] == pytest.approx(0.91)


def test_constant_never_falls():
    config = TrainingConfig(steps=20, warmup_steps=0, learning_rate=0.5, lr_schedule="constant")
    assert set(rates(config, 40)) == {0.5}


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_without_a_known_end_the_rate_stays_at_its_peak(schedule):
    config = TrainingConfig(warmup_steps=0, learning_rate=0.5, lr_schedule=schedule)
    assert set(rates(config, 1000)) == {0.5}


def test_warm_up_longer_than_training():
    config = TrainingConfig(steps=5, warmup_steps=10, learning_rate=1.0)
    assert learning_rate(5, config) == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_steps_do_not_matter_once_the_end_is_set(schedule):
    short, long = (
        TrainingConfig(steps=steps, decay_steps=100, warmup_steps=0, learning_rate=1.0, lr_schedule=schedule)
        for steps in (50, 200)
    )
    assert rates(short, 150) == rates(long, 150)
    assert learning_rate(100, long) == learning_rate(150, long) == pytest.approx(0.1)


@pytest.mark.parametrize("fraction", [0, 1.1, -0.5])
def test_the_decay_is_a_part_of_training(fraction):
    with pytest.raises(ValidationError):
        TrainingConfig(decay_fraction=fraction)
