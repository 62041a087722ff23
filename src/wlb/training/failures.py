"""How the error of a failing rank reaches the user: once, and in one line where one line says it all.

A rank that fails writes its error where its launcher looks for it (``TORCHELASTIC_ERROR_FILE``) and exits at once;
the launcher stops the other ranks and tells the user about the first failure only. Without a launcher the
rank prints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from wlb.errors import UserError
from wlb.training.console import say

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FAILURE_STATUS = 1
USER_ERROR_STATUS = 2
HUNG_STATUS = 124  # as timeout(1) has it
TERMINATED_STATUS = 128 + signal.SIGTERM  # as shells have it
_SAME_MOMENT_SECONDS = 5  # peers of a killed rank fail at once; a rank that will not stop is killed 30 s later
_STOPPED_BY_USER = {-signal.SIGINT, -signal.SIGTERM}


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and why, in one line."""


class HungError(TrainingError):
    """A collective did not end within its time limit; the message says which ranks are missing."""


class Terminated(Exception):
    """The job was asked to end (SIGTERM); the message says after which step it did and whether that was saved."""


class Ending(NamedTuple):
    """How a job ended that did not end well.

    ``cause`` is one line without a prefix, ``text`` what the user is told when the job is not restarted (empty if a
    rank has told already), ``status`` the exit status; ``restart`` says whether another attempt makes sense.
    """

    cause: str
    text: str
    status: int
    restart: bool = False


def report_failure(error: BaseException) -> int:
    """Hand ``error`` to the launcher, or print it where there is none. Returns the exit status.

    That a job was terminated is no failure for a launcher to explain, so rank 0 prints it in any case.
    """
    terminated = isinstance(error, Terminated)
    if terminated:
        text = f"wlb: {error}"
    elif isinstance(error, UserError | TrainingError):
        text = f"wlb: error: {error}"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)
    if path is None or (terminated and os.environ.get("RANK", "0") == "0"):
        say(text)
    return _status_of(error)


def leave(error: BaseException) -> NoReturn:
    """Report ``error`` and end this process at once, from whichever thread, without waiting for peers."""
    status = report_failure(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def explain_failures(failures: Mapping[int, ProcessFailure]) -> Ending:
    """What to make of ranks that failed.

    A rank that was killed comes first, then one with a user's mistake, then one that found the job hung, then the
    earliest: ranks that lose a peer fail as well, as a consequence. Ranks that the launcher itself stopped do not
    count.
    """
    first = min(failure.timestamp for failure in failures.values())
    rank = min(failures, key=lambda rank: _precedence(failures[rank], first))
    failure = failures[rank]
    if failure.exitcode < 0:
        cause = f"rank {rank} (process {failure.pid}) was killed by {_name_of(-failure.exitcode)}"
        text = f"wlb: error: {cause}; all ranks were stopped"
        return Ending(cause, text, FAILURE_STATUS, restart=failure.exitcode not in _STOPPED_BY_USER)
    recorded = failure.error_file_data["message"]
    if isinstance(recorded, str):
        cause = f"rank {rank} ended with exit status {failure.exitcode}, without a word"
        return Ending(cause, f"wlb: error: {cause}", FAILURE_STATUS)
    text = recorded["message"]
    cause = text.splitlines()[-1].removeprefix("wlb: ").removeprefix("error: ")
    if failure.exitcode == TERMINATED_STATUS:
        told = 0 in failures and failures[0].exitcode == TERMINATED_STATUS
        return Ending(cause, "" if told else text, TERMINATED_STATUS)
    if failure.exitcode == FAILURE_STATUS:
        text = f"{text}\nwlb: rank {rank} failed as above; all ranks were stopped"
    return Ending(cause, text, failure.exitcode, restart=failure.exitcode == HUNG_STATUS)


def _status_of(error: BaseException) -> int:
    if isinstance(error, UserError):
        return USER_ERROR_STATUS
    if isinstance(error, Terminated):
        return TERMINATED_STATUS
    return HUNG_STATUS if isinstance(error, HungError) else FAILURE_STATUS


def _precedence(failure: ProcessFailure, first: int) -> tuple[bool, bool, bool, bool, bool, int]:
    killed = failure.exitcode < 0
    by_launcher = killed and (failure.exitcode == -signal.SIGTERM or failure.timestamp - first > _SAME_MOMENT_SECONDS)
    status = failure.exitcode
    return (
        by_launcher,
        not killed,
        status != USER_ERROR_STATUS,
        status != HUNG_STATUS,
        status != TERMINATED_STATUS,
        failure.timestamp,
    )


def _name_of(signal_number: int) -> str:
    try:
        return signal.Signals(signal_number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {signal_number}"
