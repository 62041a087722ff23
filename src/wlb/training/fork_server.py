"""Forks the ranks of a job from a process that has already imported what they need, which takes each of them seconds.

The launcher imports it, and forks the server before it uses any of it; so launcher and ranks share one import, and a
restart needs none. The server does nothing but fork. It has one thread, and nothing before the forks may initialise
CUDA, which would not work in the ranks then. Ranks become children of the launcher, like those that it starts as
programs: their parent in the server ends at once, and orphans go to the launcher (Linux's ``PR_SET_CHILD_SUBREAPER``).
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from wlb.errors import require
from wlb.training.runtime.console import flush
from wlb.training.runtime.termination import signals_to_end

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_STDERR = 2
_ADOPTION_SECONDS = 0.001


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


class ForkServer:
    """A server that ends with its block, or with this process."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._pid = 0
        self._on_child: signal._HANDLER = signal.SIG_DFL

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()
            os.waitpid(self._pid, 0)
            signal.signal(signal.SIGCHLD, self._on_child)

    def start(self) -> None:
        """Import what ranks need and fork the server, unless that was done or is not safe.

        It is safe on Linux, in a process where nothing can have used torch.
        """
        if self._connection or sys.platform != "linux" or torch_may_be_in_use():
            return
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            return
        require("torch", "train")
        import wlb.training.trainer
        import wlb.training.worker  # noqa: F401

        try:
            ours, theirs = map(_beyond_standard_streams, Pipe())
        except OSError:  # no more files
            return
        # Where it is ignored, nobody can wait for a rank.
        self._on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        flush()  # or every rank would write what is buffered
        # A signal that is meant for the job does not end the server, and none comes too early for a rank.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *signals_to_end()})
        try:
            self._pid = os.fork()
            if not self._pid:
                ours.close()
                _serve(theirs, mask | signals_to_end())
            self._connection = ours
        except OSError:  # no more processes
            ours.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedRank | None:
        """Start ``python -m wlb.training ARGUMENTS`` in a session of its own; None where there is no server."""
        if self._connection is None:
            return None
        try:
            self._connection.send((arguments, environment))
            pid: int = self._connection.recv()
        except (EOFError, OSError):  # the server was killed
            return None
        return ForkedRank(pid) if pid else None


def torch_may_be_in_use() -> bool:
    """Whether this process has more than one thread, or has imported torch."""
    return "torch" in sys.modules or threading.active_count() > 1


def _beyond_standard_streams(connection: Connection) -> Connection:
    """The same connection under a number that no standard stream has, not even a closed one."""
    if connection.fileno() > _STDERR:
        return connection
    with connection:
        return Connection(fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, _STDERR + 1))


def _serve(connection: Connection, mask: Iterable[int]) -> NoReturn:
    """Fork ranks until the launcher has ended."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():  # as a new program has them
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for file in map(int, os.listdir("/proc/self/fd")):
            if file > _STDERR and file != connection.fileno():
                with suppress(OSError):  # the one that was just read
                    os.close(file)
        gc.freeze()  # a collection would write to all pages, which ranks then could not share
        while True:
            arguments, environment = connection.recv()
            reader, writer = os.pipe()
            if between := os.fork():
                os.close(writer)
                os.waitpid(between, 0)  # the rank is the launcher's from now on
                connection.send(int(os.read(reader, 20) or 0))  # nothing where the rank was killed
                os.close(reader)
                continue
            between = os.getpid()
            if os.fork():
                os._exit(0)
            connection.close()
            os.close(reader)
            _be_rank(writer, between, arguments, environment)
    finally:
        os._exit(1)


def _be_rank(writer: int, between: int, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    from wlb.training.worker import main

    os.setsid()
    while os.getppid() == between:
        time.sleep(_ADOPTION_SECONDS)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"wlb-rank-{environment['RANK']}", encoding="ascii")  # for top and ps
    os.write(writer, str(os.getpid()).encode())
    os.close(writer)
    sys.argv[1:] = arguments
    os.environ.clear()
    os.environ.update(environment)
    main()
