"""Save and restore a whole job with ``torch.distributed.checkpoint``: in the background, atomically, verified.

Training stands still only while tensors are copied to host memory. A thread per rank then writes the copy, together
with the others over a process group of its own: a hidden directory, one file per rank, and when every rank is done
the manifest and the name (``storage``). So whatever carries the name of a checkpoint is complete, and a
job killed at any moment leaves the previous one as the newest. At most one is being written. Tensors are saved under
their fully qualified names, which other parallel sizes can read as well.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from wlb.job.config import CheckpointConfig
from wlb.models.transformer import TransformerConfig
from wlb.runtime.collectives import gathered
from wlb.training.checkpoint.files import (
    Progress,
    checkpoint_path,
    delete_outdated,
    hidden_path,
    is_whole,
    named_checkpoints,
    read_manifest,
    step_of,
)
from wlb.training.checkpoint.resuming import RANDOM_STATES, check_model, check_tensors, model_record
from wlb.training.checkpoint.storage import ChecksummedWriter, ConfinedReader, first_failure
from wlb.training.console import say
from wlb.training.failures import TrainingError

_LONGEST_WRITE = timedelta(hours=1)  # of one rank while the others wait, in the background
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # one entry per parameter, so that it can be resharded


class Checkpointer:
    """Saves the stages of this rank with their optimizers into ``config.dir``; every rank calls every method.

    ``stages`` are parts of ``model``, ``optimizers[i]`` belongs to ``stages[i]``. Parameters of different stages have
    different names. ``place`` names the random generators of this rank: a rank of another layout gets them back if it
    has the same place.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        model: TransformerConfig,
        stages: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        place: str,
    ) -> None:
        self._place = place
        self._model = model
        self._config = config
        self._stages = stages
        self._optimizers = optimizers
        self._good: list[Path] = []  # those up to the one the job continues from, and its own; others are damaged
        self._writing: Future[str | None] | None = None
        self._failure: str | None = None  # why the last checkpoint could not be written, while there is an older one
        if self.enabled:
            # The thread's own: collectives of two threads in one group would meet the wrong partners.
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
            # Into pinned memory on CUDA, kept from one time to the next; it returns when the copy is made.
            cuda = torch.cuda.is_available()
            options = {"use_shared_memory": False, "use_async_staging": False}
            self._stager = DefaultStager(StagingOptions(cuda, use_non_blocking_copy=cuda, **options))

    @property
    def enabled(self) -> bool:
        return self._config.dir is not None

    def is_due(self, step: int) -> bool:
        return self.enabled and step % self._config.every == 0

    def save(self, progress: Progress) -> None:
        """Begin to write the checkpoint of ``progress.step``, after the one before it; older than ``keep`` are deleted.

        Returns when the job may train on. The first checkpoint of a job is waited for, so that a job that can write
        none stops at once. A failure is told on stderr, on rank 0, and training goes on, as long as a good checkpoint
        exists; otherwise raises ``TrainingError``, at the latest in the next ``save`` or ``finish``.
        """
        directory = self._config.dir
        assert directory is not None, "saving needs checkpoint.dir"
        self._wait()
        tensors = self._tensors() | _rng_state(self._place)
        wait = not (self._config.asynchronous and self._good)
        copy = tensors if wait else self._stager.stage(tensors)
        assert isinstance(copy, dict), "the stager does not return before the copy is made"
        self._writing = Future()
        writing = (self._writing, checkpoint_path(directory, progress.step), copy, progress)
        # A daemon: a process that has to end does not wait for it.
        threading.Thread(target=self._write_in_background, args=writing, name="wlb-checkpoint", daemon=True).start()
        if wait:
            self._wait()

    def finish(self) -> None:
        """Wait for the checkpoint being written. Raises ``TrainingError`` if the last one could not be."""
        self._wait()
        if self._failure is not None:
            raise TrainingError(self._failure)

    def load(self, path: Path) -> Progress:
        """Restore model, optimizers and random generators from ``path`` in place, and return where it stands.

        Raises ``UserError`` for the checkpoint of another model.
        """
        manifest = read_manifest(path)
        check_model(path, manifest.model, self._model)
        reader = ConfinedReader(path)
        saved = reader.tensors()
        check_tensors(path, saved, self._model)
        rng = {name: state for name, state in _rng_state(self._place).items() if name in saved}
        state = self._tensors() | rng
        try:
            dcp.load(state, storage_reader=reader)
        except CheckpointException as error:
            raise TrainingError(f"checkpoint {path} cannot be loaded: {first_failure(error)}") from error
        for stage, optimizer in zip(self._stages, self._optimizers, strict=True):
            set_model_state_dict(stage, _pick(state, get_model_state_dict(stage)))
            groups = get_optimizer_state_dict(stage, optimizer, options=_FLAT)
            set_optimizer_state_dict(stage, optimizer, groups | _pick(state, _moments(stage, optimizer)), options=_FLAT)
        _set_rng_state({name: state[name] for name in rng})
        self._good = [older for older in named_checkpoints(path.parent) if step_of(older) <= step_of(path)]
        return manifest.progress

    def delete_outdated(self) -> None:
        """Delete all but the newest ``keep`` checkpoints: for a job that continues with a lower ``keep``."""
        if dist.get_rank() == 0:
            delete_outdated(self._good, self._config.keep)

    def _tensors(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for stage, optimizer in zip(self._stages, self._optimizers, strict=True):
            tensors |= get_model_state_dict(stage)
            tensors |= _moments(stage, optimizer)
        return tensors

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._failure = writing.result()

    def _write_in_background(
        self, written: Future[str | None], checkpoint: Path, tensors: dict[str, Any], progress: Progress
    ) -> None:
        try:
            written.set_result(self._write(checkpoint, tensors, progress))
        except BaseException as error:  # whatever it is, whoever waits has to know
            written.set_exception(error)

    def _write(self, checkpoint: Path, tensors: dict[str, Any], progress: Progress) -> str | None:
        """Write ``checkpoint`` together with all ranks; they all return the same: what went wrong, if anything did."""
        try:
            writer = ChecksummedWriter(checkpoint, progress, model_record(self._model))
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:  # which is no Exception
            return self._give_up(checkpoint, first_failure(error))
        self._good.append(checkpoint)
        self.delete_outdated()
        return None

    def _give_up(self, checkpoint: Path, problem: str) -> str:
        if dist.get_rank() == 0:
            shutil.rmtree(hidden_path(checkpoint), ignore_errors=True)
        (newest, *_) = gathered(next((p.name for p in reversed(self._good) if is_whole(p)), None), self._group)
        text = f"the checkpoint of step {step_of(checkpoint)} could not be written to {checkpoint.parent}: {problem}"
        failure = f"{text}; mend that or choose another checkpoint.dir, and start again"
        if newest is None:
            raise TrainingError(failure)
        if dist.get_rank() == 0:
            say(f"wlb: warning: {text}; the newest one is still {newest}")
        return failure


def _moments(stage: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name, without its settings: those are the configuration's, also on resume."""
    state = get_optimizer_state_dict(stage, optimizer, options=_FLAT)
    return {name: value for name, value in state.items() if not name.startswith("param_groups.")}


def _pick(tensors: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    return {name: tensors[name] for name in names}


def _rng_state(place: str) -> dict[str, Tensor]:
    states = {f"{RANDOM_STATES}cpu.{place}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{RANDOM_STATES}cuda.{place}"] = torch.cuda.get_rng_state()
    return states


def _set_rng_state(states: dict[str, Tensor]) -> None:
    for name, state in states.items():
        if name.startswith(f"{RANDOM_STATES}cuda."):
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)
