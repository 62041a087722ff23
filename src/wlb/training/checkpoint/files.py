"""The files of a checkpoint: those of ``torch.distributed.checkpoint``, and ``manifest.json``.

The manifest has everything that is not a tensor, and the size and SHA-256 of every file, because torch does not compare
the checksums in its own files. A checkpoint is written in a hidden directory, which is renamed when it is complete.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.files import move, sync, write_synced
from wlb.job.config import CheckpointConfig
from wlb.models.transformer import TransformerConfig
from wlb.token_count import parse_count

MANIFEST = "manifest.json"
HIDDEN = ".writing-"
_PREFIX = "step-"


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"{_PREFIX}{step:08d}"


def hidden_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(HIDDEN + checkpoint.name)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def complete_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in ``directory`` that have been completed, oldest first; they may be damaged since."""
    named = [path for path in directory.glob(f"{_PREFIX}*") if parse_count(path.name.removeprefix(_PREFIX)) is not None]
    return sorted(named, key=step_of)


def sums_of(directory: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """Size and SHA-256 of files in ``directory``."""
    sums: dict[str, list[Any]] = {}
    for name in names:
        with (directory / name).open("rb") as file:
            sums[name] = [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]
    return sums


def publish(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Add ``manifest`` to the hidden directory of ``checkpoint``, and rename that to ``checkpoint``."""
    hidden = hidden_path(checkpoint)
    write_synced(hidden / MANIFEST, json.dumps({"sha256": _digest(manifest), **manifest}))
    sync(hidden)
    move(hidden, checkpoint)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest: ``step``, ``loader``, ``model``, and ``files`` with size and SHA-256 by name.

    Raises ``OSError`` if it cannot be read, and ``ValueError`` if it has changed since it was written.
    """
    content = (checkpoint / MANIFEST).read_bytes()
    with suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
        manifest: dict[str, Any] = json.loads(content)
        if manifest.pop("sha256") == _digest(manifest):
            return manifest
    raise ValueError(f"its {MANIFEST} is not what was written")


def find_damage(checkpoint: Path, *, contents: bool, share: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with ``checkpoint``, or None; compares checksums if ``contents``, else only names and sizes.

    With ``share = (i, n)``, reader i of n checks every n-th file.
    """
    first, readers = share
    try:
        for name, sums in sorted(read_manifest(checkpoint)["files"].items())[first::readers]:
            if (size := (checkpoint / name).stat().st_size) != sums[0]:
                return f"its {name} has {size} bytes instead of {sums[0]}"
            if contents and sums_of(checkpoint, [name])[name] != sums:
                return f"its {name} does not have its checksum"
    except OSError as error:
        return f"its {Path(error.filename or 'content').name} cannot be read: {error.strerror}"  # a read names no file
    except ValueError as error:
        return str(error)
    return None


def set_aside(checkpoint: Path) -> None:
    """Rename a damaged ``checkpoint``, so that no job uses it and the user can still look at it."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)  # an earlier one
    with suppress(OSError):
        os.replace(checkpoint, aside)


def clean_up(directory: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` undamaged checkpoints, and leftovers of killed jobs, as far as possible."""
    whole = [path for path in complete_checkpoints(directory) if find_damage(path, contents=False) is None]
    with suppress(OSError):
        for outdated in whole[:-keep]:
            os.replace(outdated, hidden_path(outdated))  # rename first, so that a kill cannot leave half a checkpoint
    for hidden in directory.glob(f"{HIDDEN}*"):
        shutil.rmtree(hidden, ignore_errors=True)


def candidates(config: CheckpointConfig) -> list[Path]:
    """The checkpoints that the job may continue from, damaged or not, oldest first.

    Raises ``UserError`` if there are any and the job must not resume, because it would write among them.
    """
    found = complete_checkpoints(config.dir) if config.dir is not None else []
    if found and not config.resume:
        raise UserError(
            f"checkpoint.dir {config.dir} already holds {found[-1].name} and checkpoint.resume is false; "
            "choose another directory or remove the checkpoints"
        )
    return found


def newest_usable(found: list[Path], damage_of: Callable[[Path], str | None]) -> Path | None:
    """The newest undamaged one of ``found``, None if it is empty. Raises ``UserError`` if all are damaged."""
    damage = None
    for path in reversed(found):
        if (damage := damage_of(path)) is None:
            return path
    if found:
        raise UserError(
            f"all {len(found)} checkpoints in {found[0].parent} are damaged, the oldest because {damage}; "
            "restore one, or remove all of them to start anew"
        )
    return None


def newest_checkpoint(config: CheckpointConfig, *, contents: bool = False) -> Path | None:
    """The ``newest_usable`` of ``candidates``, judged by sizes of files, and with ``contents`` also by checksums."""
    return newest_usable(candidates(config), partial(find_damage, contents=contents))


def model_record(model: TransformerConfig) -> dict[str, Any]:
    """``model`` as flat JSON-serialisable data under the names of ``[model]``, without variants that it lacks."""
    record = asdict(model)
    shape = {name: value for name, value in record.pop("shape").items() if value is not None}
    scaling = None if model.rope_scaling is None else model.rope_scaling.in_effect
    if model.shape.experts is None:
        del record["router"]
    return shape | record | {"rope_scaling": scaling}


def check_model(checkpoint: Path, saved: Mapping[str, Any], model: TransformerConfig) -> None:
    """Raise ``UserError`` with all differences if ``saved``, the model of ``checkpoint``, is not ``model``."""
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


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
