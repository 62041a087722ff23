"""Save and restore a whole job with ``torch.distributed.checkpoint``, atomically.

A checkpoint is a directory ``step-00000100``: the tensors of model and optimizer under their fully qualified names,
which other dp and pp sizes can read as well, and ``manifest.json`` with the step and the loader's state. It is
written under a hidden name, the manifest last, and renamed when every rank is done; so whatever carries the final
name is complete, and a job killed at any moment leaves the previous checkpoint as the newest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from wlb.config import CheckpointConfig
from wlb.errors import UserError
from wlb.training.agreement import gathered, on_every_rank

_FORMAT = 2
_MANIFEST = "manifest.json"
_HIDDEN = ".writing-"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # one entry per parameter, so that it can be resharded


@dataclass(frozen=True)
class Progress:
    """Where a job stands: steps trained, and the loader's state after them."""

    step: int
    loader: dict[str, Any]


class Checkpointer:
    """Saves the stages of this rank with their optimizers into ``config.dir``; every rank calls every method.

    ``optimizers[i]`` belongs to ``stages[i]``. Parameters of different stages have different names.
    """

    def __init__(self, config: CheckpointConfig, stages: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._config = config
        self._stages = stages
        self._optimizers = optimizers

    @property
    def enabled(self) -> bool:
        return self._config.dir is not None

    def is_due(self, step: int) -> bool:
        return self.enabled and step % self._config.every == 0

    def save(self, progress: Progress) -> Path:
        """Write the checkpoint of ``progress.step`` and delete all but the newest ``keep``. Returns its directory."""
        directory = self._config.dir
        assert directory is not None, "saving needs checkpoint.dir"
        final = directory / f"step-{progress.step:08d}"
        hidden = directory / f"{_HIDDEN}{final.name}"
        if dist.get_rank() == 0:
            for unfinished in directory.glob(f"{_HIDDEN}*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            hidden.mkdir(parents=True)
        dist.barrier()
        dcp.save(self._tensors() | _rng_state(), checkpoint_id=hidden)
        if dist.get_rank() == 0:
            manifest = {"format": _FORMAT, "step": progress.step, "loader": progress.loader}
            _write_durably(hidden / _MANIFEST, json.dumps(manifest))
            os.replace(hidden, final)
            for outdated in complete_checkpoints(directory)[: -self._config.keep]:
                unwanted = directory / f"{_HIDDEN}{outdated.name}"
                os.replace(outdated, unwanted)  # first the name, so that a kill cannot leave half a checkpoint
                shutil.rmtree(unwanted, ignore_errors=True)
        dist.barrier()
        return final

    def load(self, path: Path) -> Progress:
        """Restore model, optimizers and random generators from ``path`` in place, and return where it stands."""
        progress = read_progress(path)
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        rng = {name: state for name, state in _rng_state().items() if name in saved}
        tensors = self._tensors()
        _check_same_model(path, tensors, saved)
        state = tensors | rng
        dcp.load(state, checkpoint_id=path)
        for stage, optimizer in zip(self._stages, self._optimizers, strict=True):
            set_model_state_dict(stage, _pick(state, get_model_state_dict(stage)))
            groups = get_optimizer_state_dict(stage, optimizer, options=_FLAT)
            set_optimizer_state_dict(stage, optimizer, groups | _pick(state, _moments(stage, optimizer)), options=_FLAT)
        _set_rng_state({name: state[name] for name in rng})
        return progress

    def _tensors(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for stage, optimizer in zip(self._stages, self._optimizers, strict=True):
            tensors |= get_model_state_dict(stage)
            tensors |= _moments(stage, optimizer)
        return tensors


def complete_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in ``directory``, oldest first."""
    return sorted(path.parent for path in directory.glob(f"step-*/{_MANIFEST}"))


def newest_checkpoint(config: CheckpointConfig) -> Path | None:
    """The checkpoint that a job with this configuration continues from, if there is one.

    Raises ``UserError`` where a job that may not resume would write among another job's checkpoints.
    """
    complete = complete_checkpoints(config.dir) if config.dir is not None else []
    if complete and not config.resume:
        raise UserError(
            f"checkpoint.dir {config.dir} already holds {complete[-1].name} and checkpoint.resume is false; "
            "choose another directory or remove the checkpoints"
        )
    return complete[-1] if complete else None


def agreed_checkpoint(config: CheckpointConfig) -> Path | None:
    """``newest_checkpoint``, called on every rank: the one that rank 0 sees, if all others see it as their newest too.

    Raises ``UserError`` on every rank where one sees another, as ranks that continue from different steps would wait
    for each other in vain.
    """
    newest = on_every_rank(lambda: newest_checkpoint(config))
    names = gathered(newest.name if newest else "none")
    for rank, name in enumerate(names):
        if name != names[0]:
            raise UserError(
                f"checkpoint.dir {config.dir} must be shared by all machines: the newest checkpoint in it is "
                f"{names[0]} for rank 0 and {name} for rank {rank}"
            )
    return newest


def read_progress(path: Path) -> Progress:
    """The step and loader state of the checkpoint at ``path``. Raises ``UserError`` if it cannot be understood."""
    file = path / _MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            raise UserError(
                f"checkpoint {path} has format {manifest['format']}, this version reads {_FORMAT}; continue with the "
                "version that wrote it or start anew with another checkpoint.dir"
            )
        progress = Progress(step=int(manifest["step"]), loader=dict(manifest["loader"]))
        dict(progress.loader["identity"])
    except UserError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"checkpoint manifest {file} is damaged ({type(error).__name__}); remove {path} to continue from the "
            "checkpoint before it"
        ) from error
    return progress


def _check_same_model(path: Path, tensors: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if name not in saved:
            raise UserError(f"checkpoint {path} has no {name}: it holds another model; correct [model]")
        if isinstance(tensor, Tensor) and tensor.shape != saved[name].size:
            raise UserError(
                f"checkpoint {path} has {name} of shape {tuple(saved[name].size)}, this model {tuple(tensor.shape)}; "
                "correct [model]"
            )


def _moments(stage: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name, without its settings: those are the configuration's, also on resume."""
    state = get_optimizer_state_dict(stage, optimizer, options=_FLAT)
    return {name: value for name, value in state.items() if not name.startswith("param_groups.")}


def _pick(tensors: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    return {name: tensors[name] for name in names}


def _rng_state() -> dict[str, Tensor]:
    states = {f"rng.cpu.{dist.get_rank()}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state()
    return states


def _set_rng_state(states: dict[str, Tensor]) -> None:
    for name, state in states.items():
        if name.startswith("rng.cuda"):
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
