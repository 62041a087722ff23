"""Whether a checkpoint holds the model of a job: its configuration, compared whole, and exactly its tensors.

Most of what decides what a model computes shows in no tensor: how many heads share a matrix, the rotary positions, the
norm's epsilon. So the manifest of a checkpoint has the resolved configuration, and what differs is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from wlb.errors import UserError
from wlb.models.transformer import Transformer, TransformerConfig

RANDOM_STATES = "rng."  # of ranks, by their place in the layout: they may differ
_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, beside the number of its steps


def model_record(model: TransformerConfig) -> dict[str, Any]:
    """``model`` as JSON-serialisable data, flat, under the names of ``[model]``; without the variants it has not."""
    record = asdict(model)
    shape = {name: value for name, value in record.pop("shape").items() if value is not None}
    return shape | record


def check_model(checkpoint: Path, saved: Mapping[str, Any], model: TransformerConfig) -> None:
    """Raise ``UserError``, with all differences, unless ``saved`` of ``checkpoint``'s manifest is ``model``."""
    record = model_record(model)
    differences = [
        f"{name} {json.dumps(saved.get(name))} -> {json.dumps(record.get(name))}"
        for name in {**record, **saved}
        if (saved.get(name) or None) != (record.get(name) or None)  # what a manifest is too old to have is off
    ]
    if differences:
        raise UserError(
            f"checkpoint {checkpoint} holds another model than the configuration: {', '.join(differences)}; correct "
            "[model] or choose another checkpoint.dir"
        )


def check_tensors(checkpoint: Path, saved: Mapping[str, TensorStorageMetadata], model: TransformerConfig) -> None:
    """Raise ``UserError`` unless ``saved`` of ``checkpoint`` are the weights of ``model`` and their optimizer state."""
    expected = _shapes(model)
    found = {name: tuple(entry.size) for name, entry in saved.items() if not name.startswith(RANDOM_STATES)}
    for name in {**expected, **found}:
        if found.get(name) != expected.get(name):
            shapes = [
                f"of shape {shape}" if shape is not None else "missing"
                for shape in (found.get(name), expected.get(name))
            ]
            raise UserError(
                f"checkpoint {checkpoint} does not hold the tensors of its model: {name} is {shapes[0]} in the "
                f"checkpoint and {shapes[1]} in the model; remove it to continue from the one before it"
            )


def _shapes(model: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a job, over all its ranks, under the names that they have in a checkpoint."""
    with torch.device("meta"):
        weights = {name: tuple(parameter.shape) for name, parameter in Transformer(model).named_parameters()}
    state: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        state[f"state.{name}.step"] = ()
        state |= {f"state.{name}.{moment}": shape for moment in _MOMENTS}
    return weights | state
