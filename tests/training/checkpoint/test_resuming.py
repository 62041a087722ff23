"""A checkpoint belongs to one model: whatever differs is named, in settings and in tensors."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from wlb.errors import UserError
from wlb.job.config import TrainingConfig
from wlb.job.rope_scaling import RopeScalingConfig
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.training.checkpoint.resuming import check_model, check_tensors, model_record
from wlb.training.optimizer import build_optimizer
from wlb.workload import ModelShape

SHAPE = ModelShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn_hidden=12, vocab_size=5)
SCALING = RopeScalingConfig()
MODEL = TransformerConfig(SHAPE, rope_scaling=SCALING)
PATH = Path("step-00000003")
CHANGES: dict[str, Any] = {"rope_scaling": SCALING.changed(factor=2.0), "rope_theta": 1e4, "norm_eps": 1e-6}


def saved(model: TransformerConfig) -> dict[str, Any]:
    return dict(json.loads(json.dumps(model_record(model))))


def test_the_same_model_is_taken():
    check_model(PATH, saved(MODEL), MODEL)


@pytest.mark.parametrize("name", [field.name for field in fields(TransformerConfig) if field.name != "shape"])
def test_every_setting_counts(name):
    other = replace(MODEL, **{name: CHANGES.get(name, True)})
    with pytest.raises(
        UserError,
        match=rf"step-00000003 holds another model than the configuration: {name} .+ -> .+; correct \[model\]",
    ):
        check_model(PATH, saved(MODEL), other)


def test_what_an_older_manifest_lacks_is_off():
    older = {name: value for name, value in saved(MODEL).items() if name != "o_bias"}
    check_model(PATH, older, MODEL)
    with pytest.raises(UserError, match="o_bias null -> true"):
        check_model(PATH, older, replace(MODEL, o_bias=True))


@pytest.mark.parametrize("name", [name for name, size in vars(SHAPE).items() if size is not None])
def test_every_dimension_counts(name):
    value = getattr(SHAPE, name)
    other = replace(MODEL, shape=replace(SHAPE, **{name: value * 2}))
    with pytest.raises(UserError, match=f"holds another model than the configuration: {name} {value} -> {value * 2};"):
        check_model(PATH, saved(MODEL), other)


def tensors_of(model: TransformerConfig) -> dict[str, TensorStorageMetadata]:
    """What a job of one rank saves, as the metadata of a checkpoint list it."""
    module = Transformer(model)
    state: dict[str, torch.Tensor] = dict(module.named_parameters())
    moments = build_optimizer(module, TrainingConfig()).state
    for name, parameter in module.named_parameters():
        state |= {f"state.{name}.{kind}": tensor for kind, tensor in moments[parameter].items()}
    state["rng.cpu.alone"] = torch.get_rng_state()
    return {name: TensorStorageMetadata(TensorProperties(), tensor.shape, []) for name, tensor in state.items()}


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, qkv_bias=True, qk_norm=True, tied_embeddings=True)])
def test_tensors_are_those_that_a_job_saves(model):
    check_tensors(PATH, tensors_of(model), model)


@pytest.mark.parametrize(
    ("held", "model", "named"),
    [
        (
            replace(SHAPE, layers=1),
            SHAPE,
            r"layers\.1\.\S+ is missing in the checkpoint and of shape \(8,\) in the model",
        ),
        (
            SHAPE,
            replace(SHAPE, layers=1),
            r"layers\.1\.\S+ is of shape \(8,\) in the checkpoint and missing in the model",
        ),
        (SHAPE, replace(SHAPE, vocab_size=7), r"embedding\.weight is of shape \(5, 8\) in the .* of shape \(7, 8\)"),
    ],
)
def test_tensors_that_either_side_lacks_are_named(held, model, named):
    with pytest.raises(UserError, match=named):
        check_tensors(PATH, tensors_of(TransformerConfig(held)), TransformerConfig(model))


def test_a_moment_that_is_missing_is_named():
    tensors = tensors_of(MODEL)
    del tensors["state.head.norm.weight.exp_avg"]
    with pytest.raises(UserError, match=r"state\.head\.norm\.weight\.exp_avg is missing in the checkpoint"):
        check_tensors(PATH, tensors, MODEL)
