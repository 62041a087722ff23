"""Tasks on a Ray cluster: each on a free core of any node, again on another one when its process or node dies.

https://docs.ray.io/en/latest/ray-core/fault_tolerance/tasks.html says what Ray does about failures.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

from wlb.errors import UserError, require

T = TypeVar("T")
R = TypeVar("R")
_RETRIES = 3  # of a task whose process or node dies
_WAITING = 2  # tasks in the hands of Ray per core; those that wait make a cluster that can grow do so
_CONNECT_SECONDS = 30.0


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """A connection to the Ray cluster at ``address``, as ``ray.init`` takes it.

    ``auto`` is the running cluster that this machine belongs to, ``local`` a new one on this machine. Where Ray is
    initialised already, it is used as it is. Raises ``UserError`` where there is no cluster.
    """
    ray = require("ray", "ray")
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal() and "://" not in address:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no Ray cluster at {address}: {_first_line(error)}; start one with ray start, or give --ray local"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def map_on_ray(function: Callable[[T], R], items: Iterable[T], at_once: int | None = None) -> Generator[R, None, None]:
    """``function(item)`` of every item, each on a core of the connected Ray cluster, as they get done.

    ``at_once`` bounds how many are under way. Raises ``UserError`` where ``function`` does, and where an item has lost
    its process again and again.
    """
    ray = require("ray", "ray")
    try:
        yield from _results(ray, function, iter(items), at_once)
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
            "the same command goes on from here"
        ) from error


def _results(ray: Any, function: Callable[[T], R], items: Iterator[T], at_once: int | None) -> Iterator[R]:
    # In a tuple, or Ray would send the function, and with it the tokenizer, to every task anew.
    shared = (ray.put(function),)
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_call)
    running: list[Any] = []
    try:
        while True:
            # A cluster that grows on demand may begin without a core.
            most = at_once or max(1, _WAITING * int(ray.cluster_resources().get("CPU", 0)))
            running += [task.remote(shared, item) for item in islice(items, max(0, most - len(running)))]
            if not running:
                return
            done, running = ray.wait(running)
            yield from ray.get(done)
    finally:
        for unfinished in running:
            ray.cancel(unfinished, force=True)


def _call(shared: tuple[Any], item: Any) -> Any:
    return _function(shared[0])(item)


@lru_cache(maxsize=1)
def _function(reference: Any) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = require("ray", "ray").get(reference)
    return function


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
