"""Save a whole job with ``torch.distributed.checkpoint`` (DCP) in the background, and restore it.

Training pauses only while tensors are copied to host memory. They are saved under their fully qualified names, which
other layouts can read as well.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim import Optimizer

from wlb.job.config import CheckpointConfig
from wlb.models.transformer import TransformerConfig
from wlb.runtime.collectives import gathered
from wlb.terminal import tell
from wlb.training.checkpoint import files
from wlb.training.checkpoint.files import check_model, model_record, newest_usable
from wlb.training.process import HungError, TrainingError

_LONGEST_WRITE = timedelta(hours=1)  # the longest time that a rank may write while the others wait, in the background
_CHECK_SECONDS = 0.5  # how often ranks that wait check on each other
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # one entry per parameter, so that DCP can reshard it


class Checkpointer:
    """Saves the stages of this rank with their optimizers into ``config.dir``; every rank calls every method.

    ``optimizers[i]`` belongs to ``stages[i]``. Parameters of different stages of ``model`` have different names.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        model: TransformerConfig,
        stages: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._config, self._model, self._stages, self._optimizers = config, model, stages, optimizers
        self._good: Path | None = None  # the newest checkpoint that this job has read or written
        self._writing: tuple[Path, Future[Metadata]] | None = None
        self._failure: str | None = None  # why the last checkpoint could not be written
        self._cleaner = ThreadPoolExecutor(1, "wlb-checkpoints")
        if self.enabled:
            # For the writing thread alone: collectives of two threads in one group would be matched wrongly.
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
            # On CUDA it copies to pinned memory, which it reuses; it returns once the copy is made.
            cuda = torch.cuda.is_available()
            options = {"use_shared_memory": False, "use_async_staging": False}
            self._stager = DefaultStager(StagingOptions(cuda, use_non_blocking_copy=cuda, **options))

    @property
    def enabled(self) -> bool:
        return self._config.dir is not None

    def is_due(self, step: int) -> bool:
        return self.enabled and step % self._config.every == 0

    def save(self, step: int, loader: dict[str, Any]) -> None:
        """Start to write the checkpoint of ``step`` once the one before is written; keep the newest ``keep``.

        ``loader`` is the loader's state after it. Returns when the job may train on. It waits for the first checkpoint,
        so that a job that can write none stops at once. The next ``save`` or ``finish`` reports a failure: on stderr if
        another checkpoint is good, else as ``TrainingError``.
        """
        assert self._config.dir is not None, "saving needs checkpoint.dir"
        self._wait()
        checkpoint = files.checkpoint_path(self._config.dir, step)
        manifest = {"step": step, "loader": loader, "model": model_record(self._model)}
        writer, group, stager = _Writer(checkpoint, manifest), self._group, self._stager
        future = dcp.async_save(self._state(), storage_writer=writer, process_group=group, async_stager=stager)
        self._writing = checkpoint, cast(Future[Metadata], future)
        if self._good is None:
            self._wait()

    def finish(self) -> None:
        """Wait for the checkpoint being written. Raises ``TrainingError`` if the last one could not be written."""
        self._wait()
        if self._failure is not None:
            raise TrainingError(self._failure)

    def load(self, candidates: list[Path]) -> tuple[int, dict[str, Any]]:
        """Restore model and optimizers in place from the newest undamaged one of ``candidates``.

        Returns its step and the loader's state. Newer ones are set aside. Raises ``UserError`` for another model, and
        if no checkpoint can be used.
        """
        self._good = checkpoint = newest_usable(candidates, self._load)
        assert checkpoint is not None, "there are candidates"
        for newer in candidates[candidates.index(checkpoint) + 1 :] if dist.get_rank() == 0 else ():
            files.set_aside(newer)
        manifest = files.read_manifest(checkpoint)
        return manifest["step"], manifest["loader"]

    def _state(self) -> dict[str, Any]:
        """Weights and moments by name, without the optimizers' settings, which the configuration sets on resume."""
        state: dict[str, Any] = {}
        for stage, optimizer in zip(self._stages, self._optimizers, strict=True):
            for part in get_state_dict(stage, optimizer, options=_FLAT):
                state |= {name: value for name, value in part.items() if not name.startswith("param_groups.")}
        return state

    def _load(self, checkpoint: Path) -> str | None:
        """Check the files of ``checkpoint`` on all ranks and restore it; returns its damage, the same on all ranks."""
        share = dist.get_rank(), dist.get_world_size()
        damage = next(filter(None, gathered(files.find_damage(checkpoint, contents=True, share=share))), None)
        if damage is None:
            check_model(checkpoint, files.read_manifest(checkpoint)["model"], self._model)
            try:
                dcp.load(self._state(), checkpoint_id=checkpoint)  # into the tensors that train
            except CheckpointException as error:  # on every rank
                damage = _first_failure(error)
        if damage is not None and dist.get_rank() == 0:
            tell(f"wlb: warning: checkpoint {checkpoint} is damaged and not used: {damage}")
        return damage

    def _wait(self) -> None:
        """Wait for the checkpoint being written, and delete outdated and unfinished ones."""
        problem, (checkpoint, written), self._writing = None, self._writing or (Path(), None), None
        try:
            if written is not None:
                _wait_together(written)
                self._good, self._failure = checkpoint, None
        except CheckpointException as error:  # on every rank
            problem = _first_failure(error)
        if self._config.dir is not None:  # nobody writes before rank 0 is done, or stops and ends rank 0 too
            clean_up = partial(files.clean_up, self._config.dir, self._config.keep)
            _wait_together(self._cleaner.submit(clean_up if dist.get_rank() == 0 else bool))
        if problem is None:
            return
        step = files.step_of(checkpoint)
        text = f"the checkpoint of step {step} could not be written to {checkpoint.parent}: {problem}"
        self._failure = f"{text}; correct that or choose another checkpoint.dir, and start again"
        if self._good is None:
            raise TrainingError(self._failure)
        if dist.get_rank() == 0:
            tell(f"wlb: warning: {text}; the newest one is still {self._good.name}")


def _wait_together(work: Future[Any]) -> None:
    """Wait until the ``work`` of every rank is done, and raise what this rank's raised.

    The disk may be slow for up to an hour. Ranks check on each other meanwhile, and time out if one is stopped.
    """
    busy, deadline = torch.ones(1), time.monotonic() + _LONGEST_WRITE.total_seconds()
    while busy:
        busy.fill_(len(wait([work], _CHECK_SECONDS).not_done))
        if not busy and not isinstance(work.exception(), CheckpointException):  # this one all ranks raise
            work.result()
        if busy and time.monotonic() > deadline:
            raise HungError(f"rank {dist.get_rank()} could not finish a checkpoint within {_LONGEST_WRITE}")
        dist.all_reduce(busy)
    work.result()


class _Writer(dcp.FileSystemWriter):
    """Writes into the hidden directory of ``checkpoint``; rank 0 publishes it with ``manifest``."""

    def __init__(self, checkpoint: Path, manifest: dict[str, Any]) -> None:
        # Nothing is copied from a GPU ahead of writing: that would use its streams from a second thread.
        super().__init__(files.hidden_path(checkpoint), per_thread_copy_ahead=0)
        self._checkpoint, self._manifest = checkpoint, manifest

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[Any]]:
        """The results of this rank, followed by the checksums of its files."""
        try:
            written = super().write_data(plan, planner)
        except Exception as error:
            cause = error.__context__  # torch may have raised another error in its place, which does not name it
            raise (cause if isinstance(cause, OSError) else error) from None
        sums = files.sums_of(Path(self.path), {result.storage_data.relative_path for result in written.value()})
        return written.then(lambda done: [*done.value(), sums])

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, [of_rank[:-1] for of_rank in results])
        sums = files.sums_of(Path(self.path), [".metadata"])
        for *_, of_rank in results:
            sums |= of_rank
        files.publish(self._checkpoint, self._manifest | {"files": sums})


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    what = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}".splitlines()[0]
    return f"{what} (rank {rank})"
