"""How a rank fails, and how its launcher reports it: once, in one line if possible."""

from __future__ import annotations

import os
import signal
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from wlb.errors import UserError
from wlb.training.console import flush, say

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

TERMINATED_STATUS = 128 + signal.SIGTERM  # as shells have it


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and why, in one line."""


class HungError(TrainingError):
    """A collective timed out; the message names the ranks that the others waited for."""


class Terminated(Exception):
    """The job was asked to end; the message says after which step it ended, and whether that step was saved."""


# Errors reported in one line, and the exit status of each; 124 as in timeout(1). All others are bugs.
_STATUSES = {UserError: 2, HungError: 124, TrainingError: 1, Terminated: TERMINATED_STATUS}


class Ending(NamedTuple):
    """How a job failed: the message (empty if a rank has printed it), the exit status, and whether to restart."""

    text: str
    status: int
    restart: bool = False


def leave(error: BaseException) -> NoReturn:
    """Hand ``error`` to the launcher, or print it if there is none, and end this process.

    Rank 0 always prints that the job was terminated, because a launcher that was asked to end does not look.
    """
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 0)
    try:
        if os.path.isdir(os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))):
            from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

            ErrorHandler().record_exception(error)
        elif status != TERMINATED_STATUS:
            say(f"wlb: error: {error}" if status else "".join(traceback.format_exception(error)).rstrip())
        if status == TERMINATED_STATUS and os.environ.get("RANK", "0") == "0":
            say(f"wlb: {error}")
        flush()
    finally:
        os._exit(status or 1)


def ending_of(rank: int, failure: ProcessFailure) -> Ending:
    """The ending of a job whose first ``failure`` was on ``rank``."""
    status: int = failure.exitcode
    message: Any = failure.message  # a string from torch, or the record of the rank
    if status < 0:
        name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
        return Ending(f"wlb: error: rank {rank} (process {failure.pid}) was killed by {name}", 1, restart=True)
    if not isinstance(message, dict):
        return Ending(f"wlb: error: rank {rank} exited with status {status} and no error message", 1)
    kind, _, text = message["message"].partition(": ")
    if kind not in {known.__name__ for known in _STATUSES}:
        return Ending(f"{message['extraInfo']['py_callstack']}wlb: rank {rank} failed as above", status)
    return Ending("" if kind == "Terminated" else f"wlb: error: {text}", status, restart=kind == "HungError")
