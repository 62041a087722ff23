"""Which checkpoint a job continues from, and that it is of the same model: whatever differs is named."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import in_turn
from tests.training.checkpoint.fakes import damage, write_checkpoint
from wlb.errors import UserError
from wlb.job.config import CheckpointConfig, RopeScalingConfig
from wlb.models.transformer import TransformerConfig
from wlb.training.checkpoint.files import (
    check_model,
    model_record,
    newest_checkpoint,
)
from wlb.workload import ModelShape
from wlb.workload.shapes import Experts

EXPERTS = Experts(4, 2, 6)
SHAPE = ModelShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn_hidden=12, vocab_size=5, experts=EXPERTS)
SCALING = RopeScalingConfig()
MODEL = TransformerConfig(SHAPE, rope_scaling=SCALING)
PATH = Path("step-00000003")
CHANGES: dict[str, Any] = {"rope_scaling": SCALING.changed(factor=2.0), "rope_theta": 1e4, "norm_eps": 1e-6}
CHANGES["router"] = "sigmoid"


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


@in_turn("name", [name for name, size in vars(SHAPE).items() if isinstance(size, int)])
def test_every_dimension_counts(name):
    value = getattr(SHAPE, name)
    changed: Any = not value if isinstance(value, bool) else value * 2
    other = replace(MODEL, shape=replace(SHAPE, **{name: changed}))
    change = f"{name} {json.dumps(value)} -> {json.dumps(changed)}"
    with pytest.raises(UserError, match=f"holds another model than the configuration: {change};"):
        check_model(PATH, saved(MODEL), other)


def test_the_newest_complete_checkpoint_counts(tmp_path):
    for step in (20, 100):
        write_checkpoint(tmp_path, step)
    damage(write_checkpoint(tmp_path, 120), "manifest.json")
    (tmp_path / ".writing-step-00000140").mkdir()
    newest = newest_checkpoint(CheckpointConfig(dir=tmp_path))
    assert newest is not None
    assert newest.name == "step-00000100"
    assert newest_checkpoint(CheckpointConfig(dir=tmp_path / "none")) is None


def test_a_job_that_may_not_resume_keeps_off_other_checkpoints(tmp_path):
    write_checkpoint(tmp_path, 20)
    with pytest.raises(UserError, match=r"already holds step-00000020 and checkpoint\.resume is false"):
        newest_checkpoint(CheckpointConfig(dir=tmp_path, resume=False))
