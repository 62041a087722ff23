"""How the error of a failing rank reaches the user: once, and in one line where one line says it all.

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
from typing import TYPE_CHECKING

from wlb.errors import UserError
from wlb.training.console import say

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

USER_ERROR_STATUS = 2
FAILURE_STATUS = 1
_SAME_MOMENT_SECONDS = 5  # peers of a killed rank fail at once; a rank that will not stop is killed 30 s later


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and why, in one line."""


def report_failure(error: BaseException) -> int:
    """Hand ``error`` to the launcher, or print it where there is none. Returns the exit status."""
    if isinstance(error, UserError | TrainingError):
        text = f"wlb: error: {error}"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        say(text)
    else:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)
    return USER_ERROR_STATUS if isinstance(error, UserError) else FAILURE_STATUS


def explain_failures(failures: Mapping[int, ProcessFailure]) -> tuple[str, int]:
    """What to tell the user when ranks failed, and the exit status.

    A rank that was killed comes first, then one with a user's mistake, then the earliest: ranks that lose a peer
    fail as well, as a consequence. Ranks that the launcher itself stopped do not count.
    """
    first = min(failure.timestamp for failure in failures.values())
    rank = min(failures, key=lambda rank: _precedence(failures[rank], first))
    failure = failures[rank]
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return (
            f"wlb: error: rank {rank} (process {failure.pid}) was killed by {name}; all ranks were stopped. "
            "Run the same command to continue from the newest checkpoint"
        ), FAILURE_STATUS
    recorded = failure.error_file_data["message"]
    if isinstance(recorded, str):
        return f"wlb: error: rank {rank} ended with exit status {failure.exitcode}, without a word", FAILURE_STATUS
    text = recorded["message"]
    if failure.exitcode != USER_ERROR_STATUS:
        text = f"{text}\nwlb: rank {rank} failed as above; all ranks were stopped"
    return text, failure.exitcode


def _precedence(failure: ProcessFailure, first: int) -> tuple[bool, bool, bool, int]:
    killed = failure.exitcode < 0
    by_launcher = killed and (failure.exitcode == -signal.SIGTERM or failure.timestamp - first > _SAME_MOMENT_SECONDS)
    return by_launcher, not killed, failure.exitcode != USER_ERROR_STATUS, failure.timestamp
