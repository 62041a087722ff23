"""One job at a time in a directory: two jobs that write the same files would destroy them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from wlb.errors import UserError
from wlb.files import open_locked
from wlb.job.config import JobConfig

LOCK_NAME = ".lock"


@contextmanager
def directories_of(config: JobConfig) -> Iterator[None]:
    """Lock ``metrics.dir`` and ``checkpoint.dir`` for this job, until this process ends at the latest.

    Rank 0 calls this, because it is the rank that writes. Raises ``UserError`` if another job holds one of them.
    """
    directories = {"metrics.dir": config.metrics.dir, "checkpoint.dir": config.checkpoint.dir}
    names = {directory.resolve(): name for name, directory in directories.items() if directory is not None}
    with ExitStack() as locks:
        for directory, name in names.items():
            try:
                directory.mkdir(parents=True, exist_ok=True)
                descriptor = open_locked(directory / LOCK_NAME)
            except OSError as error:
                raise UserError(
                    f"{name} {directory} cannot be written: {error.strerror}; choose another {name}"
                ) from error
            if descriptor is None:
                raise UserError(
                    f"another job is writing to {name} {directory}; wait for it or choose another directory"
                )
            locks.callback(os.close, descriptor)
        yield


def check_shared(config: JobConfig) -> None:
    """Raise ``UserError`` on a rank whose ``checkpoint.dir`` is not the one that rank 0 has locked."""
    directory = config.checkpoint.dir
    if directory is not None and not (directory / LOCK_NAME).exists():
        raise UserError(
            f"checkpoint.dir {directory.absolute()} is not shared by all machines; choose a directory that all see"
        )
