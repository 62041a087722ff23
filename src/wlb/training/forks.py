"""Forks the ranks of a job from a launcher that has already imported what they need, which takes each of them seconds.

The launcher imports it and uses none of it, so it has one thread and has not initialised CUDA, which would not work in
the ranks then. What has to use it before ranks start, such as the checks of a job, is called in a fork of its own.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from wlb.errors import require
from wlb.training.console import flush
from wlb.training.failures import TrainingError, how_it_ended
from wlb.training.termination import held_back, signals_to_end

_STDERR = 2
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

T = TypeVar("T")


class ForkedRank:
    """A rank that was forked, with what a launcher uses of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | Any = None

    def poll(self) -> int | Any:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Forks:
    """Forks of this process, from ``prepare`` on where that is safe."""

    def __init__(self) -> None:
        self._safe = False

    def prepare(self) -> None:
        """Import what ranks need, unless that was done or forking is not safe.

        It is safe on Linux, in a process where nothing can have used torch.
        """
        if sys.platform != "linux" or torch_may_be_in_use():
            return
        require("torch", "train")
        import wlb.training.trainer
        import wlb.training.worker  # noqa: F401

        while (file := os.open(os.devnull, os.O_RDWR)) <= _STDERR:  # a standard stream was closed
            pass
        os.close(file)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody can wait for a rank
        gc.freeze()  # a collection would write to all pages, which ranks then could not share
        self._safe = True

    def call(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, or raises, in a fork; in this process where that is not safe.

        Raises ``TrainingError`` where the fork is killed.
        """
        if not self._safe:
            return work()
        flush()
        reader, writer = os.pipe()
        parent = os.getpid()
        child = os.fork()
        if not child:
            _work_for(writer, work, parent)
        os.close(writer)
        with open(reader, "rb") as pipe:
            outcome = pipe.read()
        _, status = os.waitpid(child, 0)
        if not outcome:
            ended = how_it_ended(os.waitstatus_to_exitcode(status))
            raise TrainingError(
                f"the process that checks the job {ended}; free memory if there was too little, and run the same "
                "command again"
            )
        result, error = pickle.loads(outcome)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # what ``work`` returned

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedRank | None:
        """Start ``python -m wlb.training ARGUMENTS`` in a session of its own; None where that is not safe.

        When this returns the rank leads its session, so that it can be killed with all that it starts.
        """
        if not self._safe:
            return None
        flush()  # or the rank would write what is buffered
        reader, writer = os.pipe()
        # A signal that is meant for the job does not come too early for a rank.
        with held_back({signal.SIGINT, *signals_to_end()}):
            pid = os.fork()
            if not pid:
                _be_rank(arguments, environment)
        os.close(writer)
        with open(reader, "rb") as pipe:
            pipe.read()  # ends when the rank closes its end, or is gone
        return ForkedRank(pid)


def torch_may_be_in_use() -> bool:
    """Whether this process has more than one thread, or has imported torch."""
    return "torch" in sys.modules or threading.active_count() > 1


def _end_with(parent: int) -> None:
    """Have this process killed when ``parent``, which forked it, ends in any way. On Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # which ended before that
        os.kill(os.getpid(), signal.SIGKILL)


def _work_for(writer: int, work: Callable[[], object], parent: int) -> NoReturn:
    try:
        _end_with(parent)
        _handle_no_signals()
        try:
            outcome: tuple[object, BaseException | None] = (work(), None)
        except BaseException as error:
            error.add_note(traceback.format_exc())  # which is not handed over
            outcome = (None, error)
        with open(writer, "wb") as pipe:
            pipe.write(_pickled(outcome))
        flush()
    finally:
        os._exit(1)


def _pickled(outcome: tuple[object, BaseException | None]) -> bytes:
    """``outcome``; of an error that cannot be handed over, the text."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
    except Exception:
        if outcome[1] is None:
            raise
        return pickle.dumps((None, RuntimeError("".join(traceback.format_exception(outcome[1])))))
    return data


def _be_rank(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Go on as a new program would, with the signals, files and variables that it would have."""
    try:
        from wlb.training.worker import main

        os.setsid()
        _handle_no_signals()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for file in map(int, os.listdir("/proc/self/fd")):
            if file > _STDERR:
                with suppress(OSError):  # the one that was just read
                    os.close(file)
        with suppress(OSError):
            Path("/proc/self/comm").write_text(f"wlb-rank-{environment['RANK']}", encoding="ascii")  # for top and ps
        sys.argv[1:] = arguments
        os.environ.clear()
        os.environ.update(environment)
        main()
    finally:
        os._exit(1)


def _handle_no_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
