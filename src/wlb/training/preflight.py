"""What is checked before a job starts, so that a mistake costs a second and not a queue slot."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wlb.config import JobConfig
from wlb.documents.mixture import document_stream
from wlb.documents.store.mixture import TrainedStore, document_lengths, open_stores
from wlb.errors import UserError, require
from wlb.models.huggingface.weights import PretrainedWeights
from wlb.planning.job import JobSpec
from wlb.planning.model import TransformerConfig
from wlb.simulate.pools import with_decided_pools
from wlb.training.checkpoint.files import read_manifest
from wlb.training.checkpoint.resuming import newest_checkpoint
from wlb.training.checkpoint.same_model import check_model
from wlb.training.data.loader import check_identity, data_identity
from wlb.training.evaluation.held_out import check_evaluation
from wlb.training.memory_budget import memory_limit, within_memory
from wlb.training.parallel.parallelize import check_layout
from wlb.training.runtime.environment import device_type, hardware_name, trained_model

Check = Callable[[], object]


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
    for check in (*settings_checks(config, store, model), *directory_checks(config, _check_writable)):
        check()
    saved = saved_loader_state(config, model)
    known = device.type == "cpu" or config.training.memory_gib is not None  # of a GPU its hardware says it
    limit = memory_limit(config, device.type, local_processes) if known else None
    job = with_decided_pools(JobSpec.from_config(config, hardware_name(device), model=model), lengths, limit)
    config = arranged_as(config, job)
    config = within_memory(config, job, local_processes, saved["identity"] if saved else None)
    if saved is not None:
        check_identity(saved, data_identity(store, config), allow_changes=config.checkpoint.allow_changed_data)
    return CheckedJob(config, store)


def settings_checks(config: JobConfig, store: TrainedStore, model: TransformerConfig) -> list[Check]:
    """What can be said of settings and data before anything is decided; each raises ``UserError``."""
    checks: list[Check] = [
        lambda: check_layout(model.shape, config.parallel),
        lambda: document_stream(document_lengths(store), config.data),  # refuses what leaves nothing to train on
        store.check_labels,
        lambda: check_evaluation(config, store, model.shape.vocab_size),
    ]
    if config.packing.method == "fixed_solver":
        checks.append(lambda: require("scipy.optimize", "solver"))
    if config.metrics.tensorboard:
        checks.append(lambda: require("tensorboard", "train"))
    return checks


def directory_checks(config: JobConfig, check_writable: Callable[[str, Path], object]) -> list[Check]:
    """``check_writable`` of everything that the job writes to, by the name of its setting."""
    written = {"metrics.dir": config.metrics.dir, "checkpoint.dir": config.checkpoint.dir}
    return [partial(check_writable, name, directory) for name, directory in written.items() if directory is not None]


def saved_loader_state(config: JobConfig, model: TransformerConfig) -> dict[str, Any] | None:
    """The loader's state in the checkpoint that the job continues from, None for a new job.

    Raises ``UserError`` for a checkpoint of another model, and for pretrained weights that do not fit.
    """
    newest = newest_checkpoint(config.checkpoint)
    if newest is None:
        if config.model.pretrained is not None:
            PretrainedWeights.open(config.model.pretrained).check(model)
        return None
    manifest = read_manifest(newest)
    check_model(newest, manifest.model, model)
    return manifest.progress.loader


def arranged_as(config: JobConfig, job: JobSpec) -> JobConfig:
    """``config`` with the pools of ``job`` for context-parallel groups, where it has pools."""
    parallel = config.parallel.model_copy(update={"dp": job.dp, "cp": job.cp, "pool": job.pool})
    return config.model_copy(update={"parallel": parallel})


def _check_writable(name: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"{name} {directory} cannot be written: {error.strerror}") from error
