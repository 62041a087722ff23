"""What is checked before a job starts, so that a mistake costs a second and not a queue slot."""

from __future__ import annotations

import tempfile
from pathlib import Path

from wlb.config import JobConfig
from wlb.documents.token_store import TokenStore
from wlb.errors import UserError, require
from wlb.training.checkpoint_files import read_manifest
from wlb.training.document_order import summarise_epoch
from wlb.training.held_out import check_evaluation
from wlb.training.identity import check_identity, data_identity
from wlb.training.job import device_type, transformer_config, vocab_size
from wlb.training.parallelize import check_layout
from wlb.training.pretrained import check_weights
from wlb.training.resuming import newest_checkpoint


def check_job(config: JobConfig, local_processes: int) -> TokenStore:
    """Raise ``UserError`` for whatever would stop the job later; ``local_processes`` run on this machine.

    Returns the token store, opened, as opening it again would take a second pass over its index.
    """
    device_type(config.training, local_processes)
    store = TokenStore.open(config.data.store)
    model = transformer_config(config.model, vocab_size(config, store))
    check_layout(model.shape, config.parallel)
    summarise_epoch(store.lengths, config.data)
    check_evaluation(config, store, model.shape.vocab_size)
    if config.metrics.tensorboard:
        require("tensorboard", "train")
    _check_writable("metrics.dir", config.metrics.dir)
    if config.checkpoint.dir is not None:
        _check_writable("checkpoint.dir", config.checkpoint.dir)
    newest = newest_checkpoint(config.checkpoint)
    if newest is None and config.model.pretrained is not None:
        check_weights(config.model.pretrained, model)
    if newest is not None:
        saved, allowed = read_manifest(newest).progress.loader, config.checkpoint.allow_changed_data
        check_identity(saved, data_identity(store, config), allow_changes=allowed)
    return store


def _check_writable(name: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"{name} {directory} cannot be written: {error.strerror}") from error
