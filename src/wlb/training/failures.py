"""Reports the error of a failing rank once, in one line where that is enough.

A rank that fails writes its error where its launcher looks for it (``TORCHELASTIC_ERROR_FILE``) and exits at once;
the launcher stops the other ranks and tells the user about the first failure only. Without a launcher the
rank prints.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from wlb.errors import UserError
from wlb.training.console import flush, say

FAILURE_STATUS = 1
USER_ERROR_STATUS = 2
HUNG_STATUS = 124  # as timeout(1) has it
TERMINATED_STATUS = 128 + signal.SIGTERM  # as shells have it


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


class RankFailure(NamedTuple):
    """A rank that failed: ``status`` as ``subprocess`` has it, what it recorded if it did, and when (Unix time)."""

    pid: int
    status: int
    text: str | None
    time: float


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
    recorded = _record(text)
    if not recorded or (terminated and os.environ.get("RANK", "0") == "0"):
        say(text)
    return _status_of(error)


def leave(error: BaseException) -> NoReturn:
    """Report ``error`` and end this process at once, from whichever thread, without waiting for peers."""
    status = _status_of(error)
    try:
        report_failure(error)
        flush()
    finally:
        os._exit(status)


def recorded_failure(pid: int, status: int, path: Path) -> RankFailure:
    """The failure of process ``pid``, which ended with ``status`` and recorded why in ``path``, if it had the time."""
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        return RankFailure(pid, status, recorded["message"]["message"], path.stat().st_mtime)
    except (OSError, ValueError):
        return RankFailure(pid, status, None, time.time())


def explain_failures(failures: Mapping[int, RankFailure]) -> Ending:
    """What to make of ranks that failed by themselves.

    A rank that was killed comes first, then one with a user's mistake, then one that found the job hung, then the
    earliest: ranks that lose a peer fail as well, as a consequence.
    """
    rank = min(failures, key=lambda rank: (_precedence(failures[rank].status), failures[rank].time))
    pid, status, text, _ = failures[rank]
    if status < 0:
        cause = f"rank {rank} (process {pid}) {how_it_ended(status)}"
        return Ending(
            cause,
            f"wlb: error: {cause}; all ranks were stopped",
            FAILURE_STATUS,
            restart=status != -signal.SIGINT,  # which only a user sends
        )
    if text is None:
        cause = f"rank {rank} {how_it_ended(status)}"
        return Ending(cause, f"wlb: error: {cause}", FAILURE_STATUS)
    cause = text.splitlines()[-1].removeprefix("wlb: ").removeprefix("error: ")
    if status == TERMINATED_STATUS:
        told = 0 in failures and failures[0].status == TERMINATED_STATUS
        return Ending(cause, "" if told else text, TERMINATED_STATUS)
    if status == FAILURE_STATUS:
        text = f"{text}\nwlb: rank {rank} failed as above; all ranks were stopped"
    return Ending(cause, text, status, restart=status == HUNG_STATUS)


def _record(text: str) -> bool:
    """Write ``text`` where the launcher looks for it; whether there is one and it could be written."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return False
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)
    except OSError:
        return False
    return True


def _status_of(error: BaseException) -> int:
    if isinstance(error, UserError):
        return USER_ERROR_STATUS
    if isinstance(error, Terminated):
        return TERMINATED_STATUS
    return HUNG_STATUS if isinstance(error, HungError) else FAILURE_STATUS


def _precedence(status: int) -> int:
    order = [USER_ERROR_STATUS, HUNG_STATUS, TERMINATED_STATUS]
    return -1 if status < 0 else order.index(status) if status in order else len(order)


def how_it_ended(status: int) -> str:
    """What became of a process that left no message, by its ``status`` as ``subprocess`` has it."""
    if status >= 0:
        return f"exited with status {status} and no error message"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"was killed by signal {-status}"
