"""Which checkpoint a job continues from, and whether that holds the configuration's model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.job.config import CheckpointConfig
from wlb.models.transformer import TransformerConfig
from wlb.training.checkpoint.files import complete_checkpoints, find_damage


def candidates(config: CheckpointConfig) -> list[Path]:
    """What the job may continue from, whole or not, oldest first.

    Raises ``UserError`` if it may not resume: it would write among another job's checkpoints.
    """
    found = complete_checkpoints(config.dir) if config.dir is not None else []
    if found and not config.resume:
        raise UserError(
            f"checkpoint.dir {config.dir} already holds {found[-1].name} and checkpoint.resume is false; "
            "choose another directory or remove the checkpoints"
        )
    return found


def newest_usable(found: list[Path], damage_of: Callable[[Path], str | None]) -> Path | None:
    """The newest of ``found`` without damage, None if there are none; raises ``UserError`` if all are damaged."""
    damage = None
    for path in reversed(found):
        if (damage := damage_of(path)) is None:
            return path
    if found:
        raise UserError(
            f"none of the {len(found)} checkpoints in {found[0].parent} can be used, and of the oldest {damage}; "
            "restore one, or remove all of them to start anew"
        )
    return None


def newest_checkpoint(config: CheckpointConfig, *, contents: bool = False) -> Path | None:
    """The ``newest_usable`` of ``candidates`` by names and sizes of files, with ``contents`` by checksums too."""
    return newest_usable(candidates(config), partial(find_damage, contents=contents))


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
        if saved.get(name) != record.get(name)
    ]
    if differences:
        raise UserError(
            f"checkpoint {checkpoint} holds another model than the configuration: {', '.join(differences)}; correct "
            "[model] or choose another checkpoint.dir"
        )
