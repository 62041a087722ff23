"""Calls in other processes: on this machine, with results in order, or on any node of a Ray cluster.

https://docs.ray.io/en/latest/ray-core/fault_tolerance/tasks.html says what Ray does about failures.
"""

import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from wlb.errors import UserError, require

T = TypeVar("T")
R = TypeVar("R")
_IN_FLIGHT = 2  # per worker: one item in work, and one waiting so that it never pauses
_RETRIES = 3  # of a task whose process or node dies
_CONNECT_SECONDS = 30.0


def map_in_order(function: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R, None, None]:
    """``map(function, items)`` on ``workers`` processes, or in this process if ``workers`` is 1.

    ``function`` is pickled once for each process. Items are taken as results are consumed, so memory does not grow with
    their number. Exceptions of ``function`` are raised here.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # Spawned, not forked: this process may have threads (tokenizers starts some), and forking with threads may hang.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _start_worker, (function,))
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(_call_started, item))
            if len(pending) >= _IN_FLIGHT * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError("a worker process was killed, probably for lack of memory; try fewer --workers") from None
    finally:
        executor.shutdown(cancel_futures=True)


_function: Callable[[Any], Any]


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    # Ctrl-C reaches the whole process group; the main process ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def leave_with_parent() -> None:  # a worker that waits for work would not notice that the main process was killed
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def _call_started(item: Any) -> Any:
    return _function(item)


@contextmanager
def cluster(address: str) -> Iterator[int]:
    """A connection to the Ray cluster at ``address``, as ``ray.init`` takes it; yields its number of cores.

    ``auto`` is the running cluster that this machine belongs to, ``local`` a new one on this machine. If Ray is
    initialised already, it is used as it is. Raises ``UserError`` if there is no cluster.
    """
    ray = require("ray", "ray")
    was_connected = ray.is_initialized()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, _, port = address.rpartition(":")
    try:
        if not was_connected:
            if host and port.isdecimal() and "://" not in address:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no Ray cluster at {address}: {_first_line(error)}; start one with ray start, or give --ray local"
        ) from error
    try:
        yield max(1, int(ray.cluster_resources().get("CPU", 0)))  # a cluster that grows on demand may begin with none
    finally:
        if not was_connected:
            ray.shutdown()


def map_on_ray(function: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    """``function(item)`` for every item, each on a core of the connected Ray cluster, in the order of completion.

    Raises ``UserError`` if ``function`` does, and if the process of an item dies again and again.
    """
    ray = require("ray", "ray")
    task, shared = ray.remote(num_cpus=1, max_retries=_RETRIES)(_call), ray.put(function)
    running = [task.remote(shared, item) for item in items]
    try:
        while running:
            done, running = ray.wait(running)
            yield from ray.get(done)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        if not isinstance(error.cause, ray.exceptions.RayError):
            raise
        raise UserError(  # before the function ran
            f"a node of the Ray cluster cannot run a task: {_first_line(error.cause)}; install the same wlb-llm, with "
            "its extra ray, on all nodes"
        ) from error
    except ray.exceptions.RayError as error:
        raise UserError(
            f"Ray lost a task, and again in {_RETRIES} retries, perhaps for lack of memory: {_first_line(error)}; "
            "the same command continues from here"
        ) from error
    finally:
        for unfinished in running:
            ray.cancel(unfinished, force=True)


def _call(function: Callable[[T], R], item: T) -> R:
    return function(item)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
