"""Which checkpoint a job continues from, and that it is of the same model: whatever differs is named."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from tests.cases import in_turn
from tests.training.checkpoint.fakes import damage, fake_checkpoint, write_checkpoint
from tests.training.distributed import run_ranks
from wlb.errors import UserError
from wlb.job.config import CheckpointConfig, TrainingConfig
from wlb.job.rope_scaling import RopeScalingConfig
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.training.checkpoint.resuming import (
    agreed_checkpoint,
    check_model,
    check_tensors,
    model_record,
    newest_checkpoint,
)
from wlb.training.optimizer import build_optimizer
from wlb.workload import ModelShape

SHAPE = ModelShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn_hidden=12, vocab_size=5)
SHALLOW = replace(SHAPE, layers=1)
SCALING = RopeScalingConfig()
MODEL = TransformerConfig(SHAPE, rope_scaling=SCALING)
PATH = Path("step-00000003")
CHANGES: dict[str, Any] = {"rope_scaling": SCALING.changed(factor=2.0), "rope_theta": 1e4, "norm_eps": 1e-6}


def saved(model: TransformerConfig) -> dict[str, Any]:
    return dict(json.loads(json.dumps(model_record(model))))


def test_the_same_model_is_taken():
    check_model(PATH, saved(MODEL), MODEL)


@in_turn("name", [field.name for field in fields(TransformerConfig) if field.name != "shape"])
def test_every_setting_counts(name):
    other = replace(MODEL, **{name: CHANGES.get(name, True)})
    named = rf"step-00000003 holds another model than the configuration: {name} .+ -> .+; correct \[model\]"
    with pytest.raises(UserError, match=named):
        check_model(PATH, saved(MODEL), other)


def test_what_an_older_manifest_lacks_is_off():
    older = {name: value for name, value in saved(MODEL).items() if name != "o_bias"}
    check_model(PATH, older, MODEL)
    with pytest.raises(UserError, match="o_bias null -> true"):
        check_model(PATH, older, replace(MODEL, o_bias=True))


@in_turn("name", [name for name, size in vars(SHAPE).items() if size is not None])
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
        (SHALLOW, SHAPE, r"layers\.1\.\S+ is missing in the checkpoint and of shape \(8,\) in the model"),
        (SHAPE, SHALLOW, r"layers\.1\.\S+ is of shape \(8,\) in the checkpoint and missing in the model"),
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


def test_the_newest_complete_checkpoint_counts(tmp_path):
    for step in (20, 100):
        fake_checkpoint(tmp_path, step)
    fake_checkpoint(tmp_path, 120, complete=False)
    (tmp_path / ".writing-step-00000140").mkdir()
    newest = newest_checkpoint(CheckpointConfig(dir=tmp_path))
    assert newest is not None
    assert newest.name == "step-00000100"
    assert newest_checkpoint(CheckpointConfig(dir=tmp_path / "none")) is None


def test_a_job_that_may_not_resume_keeps_off_other_checkpoints(tmp_path):
    fake_checkpoint(tmp_path, 20)
    with pytest.raises(UserError, match=r"already holds step-00000020 and checkpoint\.resume is false"):
        newest_checkpoint(CheckpointConfig(dir=tmp_path, resume=False))


def _agreement_of(folders: list[Path]) -> str:
    try:
        newest = agreed_checkpoint(CheckpointConfig(dir=folders[dist.get_rank() % len(folders)]))
    except UserError as error:
        return str(error)
    return newest.name if newest else "none"


def test_ranks_that_see_different_checkpoints_stop_together(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    fake_checkpoint(folders[0], 10)
    for message, folder in zip(run_ranks(2, _agreement_of, folders), folders, strict=True):
        assert f"checkpoint.dir {folder} must be shared by all machines" in message
        assert "\n" not in message


def test_ranks_pass_over_what_only_one_of_them_has_read(tmp_path):
    write_checkpoint(tmp_path, 2)
    damage(write_checkpoint(tmp_path, 4), "flipped")
    assert run_ranks(3, _agreement_of, [tmp_path]) == ["step-00000002"] * 3
