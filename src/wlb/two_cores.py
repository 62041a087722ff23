"""Work shared with a forked copy of this process, for planning that has two cores and no patience."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TypeVar

from wlb.os_limits import usable_cores

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

A = TypeVar("A")
B = TypeVar("B")


def on_two_cores(function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """``map(function, items)``, with the later half of the items in a forked copy of this process.

    All are done here where there is one core, and off Linux. What ``function`` changes in the copy is lost there, and
    it should print nothing. Results are pickled, as are the exceptions that end it.
    """
    items = list(items)
    own = (len(items) + 1) // 2
    if own == len(items) or sys.platform != "linux" or usable_cores() < 2:
        yield from map(function, items)
        return
    receiver, sender = Pipe(duplex=False)
    here = os.getpid()
    child = os.fork()
    if child == 0:
        _send_results(sender, function, items[own:], here)
    sender.close()
    try:
        yield from map(function, items[:own])
        try:
            results = receiver.recv()
        except Exception:  # it was killed, perhaps for memory, or what it sent cannot be read
            results = list(map(function, items[own:]))
    finally:
        receiver.close()
        with suppress(ProcessLookupError, ChildProcessError):  # where SIGCHLD is ignored, nobody can wait for it
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if isinstance(results, Exception):
        raise results
    yield from results


def end_with(parent: int) -> None:
    """Have this process killed when ``parent``, which forked it, ends in any way. On Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # which ended before that
        os.kill(os.getpid(), signal.SIGKILL)


def _send_results(sender: Connection, function: Callable[[A], B], items: list[A], parent: int) -> None:
    """Ends this process, whatever happens."""
    try:
        end_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
        results: list[B] | Exception
        try:
            results = list(map(function, items))
        except Exception as error:
            results = error
        with suppress(BrokenPipeError):
            sender.send(results)
    finally:
        os._exit(0)
