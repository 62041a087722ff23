"""What is checked before a job starts, so that a mistake costs a second and not a queue slot."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from wlb.config import JobConfig, ParallelConfig
from wlb.documents.mixture import document_stream
from wlb.documents.store.mixture import TrainedStore, document_lengths, open_stores
from wlb.errors import UserError, require
from wlb.models.pretrained import check_weights
from wlb.planning.job import JobSpec
from wlb.simulate.pools import with_decided_pools
from wlb.training.checkpoint.files import read_manifest
from wlb.training.checkpoint.resuming import newest_checkpoint
from wlb.training.checkpoint.same_model import check_model
from wlb.training.data.loader import check_identity, data_identity
from wlb.training.evaluation.held_out import check_evaluation
from wlb.training.memory_budget import within_memory
from wlb.training.parallel.parallelize import check_layout
from wlb.training.runtime.environment import device_type, hardware_name, trained_model


@dataclass(frozen=True)
class CheckedJob:
    """A configuration in which nothing is left to decide, and its token store, whose index takes a pass to open."""

    config: JobConfig
    store: TrainedStore


def check_job(config: JobConfig, local_processes: int) -> CheckedJob:
    """Raise ``UserError`` for whatever would stop the job later; ``local_processes`` run on this machine."""
    device = torch.device(device_type(config.training, local_processes))
    store = open_stores(config.data.stores)
    lengths = document_lengths(store)
    model = trained_model(config, store)
    check_layout(model.shape, config.parallel)
    if config.packing.method == "fixed_solver":
        require("scipy.optimize", "solver")
    document_stream(lengths, config.data)  # refuses documents that leave nothing to train on
    check_evaluation(config, store, model.shape.vocab_size)
    if config.metrics.tensorboard:
        require("tensorboard", "train")
    _check_writable("metrics.dir", config.metrics.dir)
    if config.checkpoint.dir is not None:
        _check_writable("checkpoint.dir", config.checkpoint.dir)
    newest = newest_checkpoint(config.checkpoint)
    saved = None
    if newest is not None:
        manifest = read_manifest(newest)
        check_model(newest, manifest.model, model)
        saved = manifest.progress.loader
    job = with_decided_pools(JobSpec.from_config(config, hardware_name(device), model=model), lengths)
    config = config.model_copy(update={"parallel": _arranged_as(config.parallel, job)})
    config = within_memory(config, job, local_processes, saved["identity"] if saved else None)
    if newest is None and config.model.pretrained is not None:
        check_weights(config.model.pretrained, model)
    if saved is not None:
        check_identity(saved, data_identity(store, config), allow_changes=config.checkpoint.allow_changed_data)
    return CheckedJob(config, store)


def _arranged_as(parallel: ParallelConfig, job: JobSpec) -> ParallelConfig:
    """``parallel`` with the pools of ``job`` for context-parallel groups, where it has pools."""
    return parallel.model_copy(update={"dp": job.dp, "cp": job.cp, "pool": job.pool})


def _check_writable(name: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"{name} {directory} cannot be written: {error.strerror}") from error
