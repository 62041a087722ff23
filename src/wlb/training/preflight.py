"""What is checked before a job starts, so that a mistake costs a second and not a queue slot."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from wlb.config import JobConfig, TrainingConfig
from wlb.documents.token_store import TokenStore
from wlb.errors import UserError
from wlb.training.checkpoint import newest_checkpoint


def check_job(config: JobConfig, local_processes: int) -> None:
    """Raise ``UserError`` for whatever would stop the job later; ``local_processes`` run on this machine."""
    for name, size in (("cp", config.parallel.cp), ("tp", config.parallel.tp)):
        if size > 1:
            raise UserError(f"parallel.{name} = {size} is not available in this version; set parallel.{name} = 1")
    device_type(config.training, local_processes)
    vocab_size(TokenStore.open(config.data.store))
    _check_writable("metrics.dir", config.metrics.dir)
    if config.checkpoint.dir is not None:
        _check_writable("checkpoint.dir", config.checkpoint.dir)
    newest_checkpoint(config.checkpoint)


def device_type(config: TrainingConfig, local_processes: int) -> str:
    """``"cuda"`` or ``"cpu"``, as ``training.device`` asks and this machine allows: one GPU per process."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < local_processes:
        raise UserError(
            f"{local_processes} processes on this machine need a GPU each, it has {gpus}; reduce parallel.* or set "
            "training.device = 'cpu'"
        )
    return "cuda"


def vocab_size(store: TokenStore) -> int:
    """The vocabulary the model needs for ``store``; raises ``UserError`` if the store does not say."""
    if store.vocab_size is None:
        raise UserError(
            f"token store {store.prefix} does not say how large its vocabulary is; write it into {store.prefix}.json "
            "or prepare the store with wlb prepare"
        )
    return store.vocab_size


def threads_per_process(config: TrainingConfig, local_processes: int) -> int:
    """CPU threads of each process: ``training.threads``, or an equal share of the cores this job may use."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // local_processes)


def _check_writable(name: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"{name} {directory} cannot be written: {error.strerror}") from error
