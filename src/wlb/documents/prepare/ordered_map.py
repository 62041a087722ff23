"""A map over worker processes whose results come in the order of the items, with a bounded number under way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from wlb.errors import UserError

T = TypeVar("T")
R = TypeVar("R")
# Under way per worker: one in work, one waiting so that it does not pause.
_IN_FLIGHT = 2


def map_in_order(function: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R, None, None]:
    """``map(function, items)`` on ``workers`` processes; on this one when ``workers`` is 1.

    ``function`` is pickled once for each process. Items are taken as results are consumed, so memory does not grow
    with their number. Exceptions of ``function`` are raised here.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # Spawned, not forked: this process may have threads (tokenizers has), which fork does not survive.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (function,))
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(_call, item))
            if len(pending) >= _IN_FLIGHT * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError("a worker process was killed, perhaps for want of memory; try fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


_function: Callable[[Any], Any]


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    # Ctrl-C reaches the whole process group; the main process ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _call(item: Any) -> Any:
    return _function(item)


def _leave_with_parent() -> None:
    # A worker waiting for work would not notice that the main process was killed.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
