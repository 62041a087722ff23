"""One job at a time in a directory: two that write the same files would destroy each other's."""

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
    """Hold ``metrics.dir`` and ``checkpoint.dir`` for this job; ends with this process at the latest, however it ends.

    Called by rank 0, which is the one that writes. Raises ``UserError`` when another job holds one of them.
    """
    directories = {"metrics.dir": config.metrics.dir, "checkpoint.dir": config.checkpoint.dir}
    names = {directory.resolve(): name for name, directory in directories.items() if directory is not None}
    with ExitStack() as locks:
        for directory, name in names.items():
            try:
                directory.mkdir(parents=True, exist_ok=True)
                descriptor = open_locked(directory / LOCK_NAME)
            except OSError as error:
                raise UserError(f"{name} {directory} cannot be written: {error.strerror}") from error
            if descriptor is None:
                raise UserError(
                    f"another job is writing to {name} {directory}; wait for it or choose another directory"
                )
            locks.callback(os.close, descriptor)
        yield


def check_shared(config: JobConfig) -> None:
    """Raise ``UserError`` on a rank that does not see the ``checkpoint.dir`` that rank 0 holds, but one of its own."""
    directory = config.checkpoint.dir
    if directory is not None and not (directory / LOCK_NAME).exists():
        raise UserError(f"checkpoint.dir {directory.absolute()} must be shared by all machines, and is not")
