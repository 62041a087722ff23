"""How the process of a rank ends: it fails, or it is asked to end.

A failure is reported once, by the launcher, in one line if possible. After SIGTERM, SIGHUP and Ctrl-C a rank finishes
the step, saves it, and leaves within the grace time. A thread waits for the signals, so that neither a collective nor a
long kernel in the main thread delays them.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from typing import Any, NamedTuple, NoReturn

from wlb.errors import UserError
from wlb.terminal import tell, write

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


def flush() -> None:
    """Flush stdout and stderr, which a process that leaves with ``os._exit`` has to do itself."""
    write(sys.stdout, "")
    write(sys.stderr, "")


def leave(error: BaseException) -> NoReturn:
    """Hand ``error`` to the launcher, or print it if there is none, and end this process.

    Rank 0 always prints that the job was terminated, because a launcher that was asked to end does not look. Where it
    was asked while it started its ranks, ``wlb train`` says so itself and ends before them; whatever they meet is due
    to that.
    """
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 0)
    record = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    recorded = os.path.isdir(os.path.dirname(record))
    if record and not recorded and multiprocessing.parent_process():
        os._exit(TERMINATED_STATUS)
    try:
        if recorded:
            from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

            if status:  # torchrun prints all that is recorded
                error.__traceback__ = error.__cause__ = None
            ErrorHandler().record_exception(error)
        elif status != TERMINATED_STATUS:
            tell(f"wlb: error: {error}" if status else "".join(traceback.format_exception(error)).rstrip())
        if status == TERMINATED_STATUS and os.environ.get("RANK", "0") == "0":
            tell(f"wlb: {error}")
        flush()
    finally:
        os._exit(status or 1)


def ending_of(rank: int, failure: Any) -> Ending:
    """The ending of a job whose first ``failure``, a ``ProcessFailure`` of torch, was on ``rank``."""
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


def signals_to_end() -> set[signal.Signals]:
    """The signals that ask a job to end, without those that it was started to ignore, as under ``nohup``."""
    asking = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    return {asked for asked in asking if signal.getsignal(asked) != signal.SIG_IGN}


class Termination:
    """Whether this rank was asked to end, or hangs. Call ``listen`` in the main thread, before other threads start."""

    def __init__(self) -> None:
        self.step = 0  # that the main thread has begun
        self.lost = False  # whether a collective in it has failed
        self.asked = threading.Event()  # set by a signal; ranks compare it before each step, so that all stop together
        self.hung = threading.Event()  # once it is set, nothing can be saved, and a signal leaves no time
        self._grace_seconds: float | None = None  # before the first step there is nothing to save

    def listen(self) -> None:
        """Start to answer the signals. They stay blocked in every thread, so they interrupt nothing."""
        asked = signals_to_end()
        signal.pthread_sigmask(signal.SIG_BLOCK, asked)
        threading.Thread(target=self._answer, args=(asked,), name="wlb-termination", daemon=True).start()

    def allow(self, seconds: float, kept: str) -> None:
        """From now on a signal leaves ``seconds`` to finish and save; ``kept`` says what remains otherwise."""
        self._grace_seconds, self._kept = seconds, kept

    def _answer(self, asked: set[signal.Signals]) -> None:
        signal.sigwait(asked)
        self.asked.set()
        if self._grace_seconds is None:
            leave(Terminated("terminated before the first step"))
        limit = f"training.grace_seconds = {self._grace_seconds:g} was too short"
        cause = "a rank hung and there was no way" if self.hung.wait(self._grace_seconds) else limit
        leave(Terminated(f"terminated: {cause} to finish the step and save it; {self._kept}"))
