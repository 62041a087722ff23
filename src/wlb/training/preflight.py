"""Decide and check everything before a job starts, so that a mistake costs a second and not a queue slot."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wlb.documents.order import DocumentStream, check_trainable
from wlb.documents.segments import split_overlong
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError, require
from wlb.files import open_locked
from wlb.job.config import DataConfig, EvaluationConfig, JobConfig
from wlb.job.job import USABLE_SHARE, Job, MemoryLimit, limit_of_gpu
from wlb.job.memory.fit import too_large
from wlb.models.huggingface.weights import PretrainedWeights
from wlb.models.transformer import TransformerConfig
from wlb.os_limits import usable_memory
from wlb.runtime.collectives import gathered
from wlb.runtime.reading import labels_of_segments
from wlb.runtime.steps import check_settings, digest_of, saved_settings
from wlb.simulate.decide import decide
from wlb.training.checkpoint.files import check_model, newest_checkpoint, read_manifest
from wlb.training.environment import device_type, hardware_name, trained_model
from wlb.training.process import TrainingError
from wlb.training.steps import CHECKS, data_settings

_LOCK = ".lock"  # the file in a directory of a job that runs


@dataclass(frozen=True)
class CheckedJob:
    """A ``job`` with nothing left to decide, whose ranks train ``model`` on the documents of ``store``.

    ``config`` is as the user gave it. ``job`` has the settings decided from its [parallel] and [packing], which nothing
    reads from here on. The job continues from the loader's state ``saved``, or starts anew if that is None.
    """

    config: JobConfig
    job: Job
    model: TransformerConfig
    store: TokenStore
    saved: dict[str, Any] | None

    def check_data(self) -> None:
        """Raise ``UserError`` if the job was saved with other documents or another order."""
        if self.saved is not None:
            check_settings(self.saved, data_settings(self.store, self.job), **CHECKS)


def memory_limit(device_type: str, local_processes: int) -> MemoryLimit:
    """The memory that one of ``local_processes`` on this machine may use, if ``training.memory_gib`` is not set.

    The number is the same at every start.
    """
    if device_type == "cuda":
        return limit_of_gpu(min(torch.cuda.get_device_properties(i).total_memory for i in range(local_processes)))
    share = usable_memory() / local_processes
    return MemoryLimit(USABLE_SHARE * share, f"{USABLE_SHARE:.0%} of this machine's memory by {local_processes}")


def check_agreed(job: Job) -> None:
    """Raise ``TrainingError`` if ranks decided on different jobs; called on every rank."""
    decided = f"{job.layout} {job.packing.in_use()} {job.profile}"
    if len(set(gathered(digest_of(decided)))) > 1:
        raise TrainingError(
            "ranks decided on different jobs; the token store, training.profile and the version of wlb-llm must be the "
            "same on all machines, or give packing.max_length_factor, or parallel.pool and packing.rank_micro_batches"
        )


def check_job(config: JobConfig, local_processes: int) -> CheckedJob:
    """Raise ``UserError`` for whatever would stop the job later; ``local_processes`` run on this machine.

    All ranks call it together, and decide alike by the smallest ``memory_limit`` of their machines.
    """
    device = torch.device(device_type(config.training, local_processes))
    limit = min(gathered(memory_limit(device.type, local_processes)), key=lambda one: one.number_of_bytes)
    store = TokenStore.open(*config.data.stores)
    job = checked(config, store, hardware_name(device), limit, lambda check: check())
    job.check_data()
    return job


def checked(
    config: JobConfig, store: TokenStore, hardware: str, limit: MemoryLimit, tried: Callable[[Callable[[], Any]], Any]
) -> CheckedJob:
    """Make the job of ``config`` for ``store`` and ``hardware``.

    ``tried`` runs each check: it returns the result, or None if it keeps the check's ``UserError`` for later.
    """
    model = trained_model(config, store)
    job = Job.from_config(config, hardware, vocab_size=model.shape.vocab_size, limit=limit)
    tried(lambda: DocumentStream(store.stored_lengths, config.data))  # refuses a store that leaves nothing to train on
    tried(store.check_labels)
    tried(lambda: check_evaluation(config.evaluation, config.data, store, model.shape.vocab_size))
    if config.metrics.tensorboard:
        tried(lambda: require("tensorboard", "train"))
    for name, directory in (("metrics.dir", config.metrics.dir), ("checkpoint.dir", config.checkpoint.dir)):
        if directory is not None:
            tried(partial(_check_could_write, name, directory))
    saved = tried(lambda: _saved_loader_state(config, model))
    if saved is not None:
        job = _as_saved(job, saved["settings"]["packing"])
    lengths = store.stored_lengths
    job = tried(lambda: decide(job, lengths)) or decide(job.with_length_factor(job.least_length_factor), lengths)
    tried(lambda: _check_memory(job, resumes=saved is not None))
    return CheckedJob(config, job, model, store, saved)


def check_evaluation(evaluation: EvaluationConfig, data: DataConfig, trained: TokenStore, vocab_size: int) -> None:
    """Raise ``UserError`` for documents that a model of ``vocab_size``, trained on ``trained``, cannot score."""
    if evaluation.store is None:
        return
    store = TokenStore.open(evaluation.store)
    if store.vocab_size is not None and store.vocab_size > vocab_size:
        raise UserError(
            f"evaluation.store {store.prefix} has a vocabulary of {store.vocab_size}, but the model has {vocab_size}; "
            "prepare both stores with the same tokenizer"
        )
    if store.tokenizer and trained.tokenizer and store.tokenizer_identity != trained.tokenizer_identity:
        raise UserError(
            f"evaluation.store {store.prefix} was prepared with another tokenizer than {trained.prefix} of [data]; "
            "prepare both with the same"
        )
    if not labels_of_segments(held_out_segments(store, evaluation, data), store).any():
        raise UserError(f"evaluation.store {store.prefix} has no labels, so it has no loss; prepare it again")


def held_out_segments(store: TokenStore, evaluation: EvaluationConfig, data: DataConfig) -> NDArray[np.int64]:
    """The segments that an evaluation scores; documents longer than the context window are cut as in training."""
    lengths = store.lengths_of(np.arange(min(len(store), evaluation.documents or len(store))))
    check_trainable(lengths, data.changed(store=evaluation.store, mixture=()))
    whole = np.stack([np.arange(len(lengths)), np.zeros_like(lengths), lengths], axis=1)[lengths > 0]
    return split_overlong(whole, data.context_window, data.overlong)[0]


def _saved_loader_state(config: JobConfig, model: TransformerConfig) -> dict[str, Any] | None:
    """The loader's state in the checkpoint to continue from, None for a new job.

    Raises ``UserError`` for a checkpoint of another model, and for pretrained weights that do not fit.
    """
    newest = newest_checkpoint(config.checkpoint)
    if newest is None:
        if config.model.pretrained is not None:
            PretrainedWeights(config.model.pretrained).check(model)
        return None
    manifest = read_manifest(newest)
    check_model(newest, manifest["model"], model)
    state: dict[str, Any] = manifest["loader"]
    saved_settings(state, ("packing",))
    return state


def _as_saved(job: Job, packing: dict[str, Any]) -> Job:
    """``job`` with the L_max that it was started with, if waiting documents in the packer were measured by it."""
    measured = "max_length_factor" in job.packing.identity(job.context_window)
    factor = packing.get("packing.max_length_factor") if measured else None
    if job.packing.max_length_factor != "auto" or factor is None:
        return job
    return job.with_length_factor(float(factor))


def _check_memory(job: Job, *, resumes: bool) -> None:
    if problem := too_large(job, resumes=resumes):
        raise UserError(problem)


def _check_could_write(name: str, directory: Path) -> None:
    """Raise ``UserError`` unless ``directory`` can be written, or made if it does not exist."""
    existing = directory.absolute()
    while not os.path.exists(existing):  # Path.exists raises where a directory may not be entered
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "" if existing == directory.absolute() else f": {existing} is not a directory that can be written"
        raise UserError(f"{name} {directory} cannot be written{what}; choose another {name}")


@contextmanager
def directories_of(config: JobConfig) -> Iterator[None]:
    """Lock ``metrics.dir`` and ``checkpoint.dir`` for this job, because two jobs would destroy each other's files.

    Rank 0 calls this, because it writes; locks end with its process. Raises ``UserError`` if another job holds one.
    """
    directories = {"metrics.dir": config.metrics.dir, "checkpoint.dir": config.checkpoint.dir}
    names = {directory.resolve(): name for name, directory in directories.items() if directory is not None}
    with ExitStack() as locks:
        for directory, name in names.items():
            try:
                directory.mkdir(parents=True, exist_ok=True)
                descriptor = open_locked(directory / _LOCK)
            except OSError as error:
                why = f"{name} {directory} cannot be written: {error.strerror}"
                raise UserError(f"{why}; choose another {name}") from error
            if descriptor is None:
                holder = f"another job is writing to {name} {directory}"
                raise UserError(f"{holder}; wait for it or choose another directory")
            locks.callback(os.close, descriptor)
        yield


def check_shared(config: JobConfig) -> None:
    """Raise ``UserError`` on a rank whose ``checkpoint.dir`` is not the one that rank 0 has locked."""
    directory = config.checkpoint.dir
    if directory is not None and not (directory / _LOCK).exists():
        raise UserError(
            f"checkpoint.dir {directory.absolute()} is not shared by all machines; choose a directory that all see"
        )
