"""Which checkpoint a job resumes from: the newest undamaged one, the same on every rank, of the job's own model.

Before anything starts, manifests and file sizes are looked at. When the ranks have met, they share out the files and
compare checksums. A checkpoint that is damaged is passed over, with a line that says what is wrong with it, for the one
before it. Where checkpoints exist but none can be used the job stops: to start from scratch is the user's decision.

Most of what decides what a model computes shows in no tensor: how many heads share a matrix, the rotary positions, the
norm's epsilon. So the manifest of a checkpoint has the resolved configuration, and what differs is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from wlb.errors import UserError
from wlb.job.config import CheckpointConfig
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.runtime.collectives import gathered, on_every_rank
from wlb.terminal import number_of
from wlb.training.checkpoint.files import find_damage, named_checkpoints, step_of
from wlb.training.console import say

RANDOM_STATES = "rng."  # of ranks, by their place in the layout: they may differ
_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, beside the number of its steps


def newest_checkpoint(config: CheckpointConfig, *, contents: bool = False) -> Path | None:
    """The newest checkpoint that is whole, as one process sees it; None for a new job.

    Manifests and file sizes are looked at, with ``contents`` checksums too. Raises ``UserError`` where a job that may
    not resume would write among another job's checkpoints, and where there are checkpoints and none can be used.
    """
    return _newest_whole(_candidates(config), lambda path: find_damage(path, contents=contents))


def what_is_kept(config: CheckpointConfig, step: int) -> str:
    """What the same command continues from when a job ends after ``step``, and how many steps it repeats."""
    if config.dir is None:
        return f"nothing is saved without checkpoint.dir; lost: {number_of(step, 'step')}"
    try:
        newest = newest_checkpoint(config)
    except (UserError, OSError) as error:
        return str(error)
    if newest is None:
        return f"there is no checkpoint yet (checkpoint.every = {config.every}); lost: {number_of(step, 'step')}"
    lost = number_of(max(0, step - step_of(newest)), "step")
    return f"the same command continues from checkpoint {newest}; lost since then: {lost}"


def agreed_checkpoint(config: CheckpointConfig) -> Path | None:
    """The newest undamaged checkpoint, called on every rank; every file of it has been read and compared.

    Raises ``UserError`` on every rank: for what ``newest_checkpoint`` raises it, and where a rank sees another newest
    checkpoint than rank 0, as ranks that continue from different steps would wait for each other in vain.
    """
    candidates = on_every_rank(lambda: _candidates(config))
    names = gathered([path.name for path in candidates])
    newest = [seen[-1] if seen else "none" for seen in names]
    for rank, name in enumerate(newest):
        if name != newest[0]:
            raise UserError(
                f"checkpoint.dir {config.dir} must be shared by all machines: the newest checkpoint in it is "
                f"{newest[0]} for rank 0 and {name} for rank {rank}"
            )
    return _newest_whole([(config.dir or Path()) / name for name in names[0]], _damage_seen_by_any_rank)


def _candidates(config: CheckpointConfig) -> list[Path]:
    named = named_checkpoints(config.dir) if config.dir is not None else []
    if named and not config.resume:
        raise UserError(
            f"checkpoint.dir {config.dir} already holds {named[-1].name} and checkpoint.resume is false; "
            "choose another directory or remove the checkpoints"
        )
    return named


def _newest_whole(candidates: Sequence[Path], damage_of: Callable[[Path], str | None]) -> Path | None:
    damage = None
    for path in reversed(candidates):
        damage = damage_of(path)
        if damage is None:
            return path
    if candidates:
        raise UserError(
            f"none of the {len(candidates)} checkpoints in {candidates[-1].parent} can be used, and of the oldest "
            f"{damage}; restore one, or remove all of them to start anew"
        )
    return None


def _damage_seen_by_any_rank(path: Path) -> str | None:
    share = dist.get_rank(), dist.get_world_size()
    seen = gathered(on_every_rank(lambda: find_damage(path, contents=True, share=share)))
    damage = next(filter(None, seen), None)
    if damage is not None and dist.get_rank() == 0:
        say(f"wlb: warning: checkpoint {path} is damaged and not used: {damage}")
    return damage


def model_record(model: TransformerConfig) -> dict[str, Any]:
    """``model`` as JSON-serialisable data, flat, under the names of ``[model]``; without the variants it has not."""
    record = asdict(model)
    shape = {name: value for name, value in record.pop("shape").items() if value is not None}
    scaling = None if model.rope_scaling is None else model.rope_scaling.in_effect
    return shape | record | {"rope_scaling": scaling}


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
