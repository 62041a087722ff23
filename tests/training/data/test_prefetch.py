"""Threads work ahead, tell of failures at once, and end when told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.training.processes import wait_until
from wlb.training.data.prefetch import Prefetcher, Shutdown


def test_yields_everything_in_order():
    shutdown = Shutdown()
    numbers = Prefetcher(range(100), 3, "numbers", shutdown)
    assert list(Prefetcher(map(str, numbers), 2, "texts", shutdown)) == [str(n) for n in range(100)]


def test_stays_within_its_depth():
    taken: list[int] = []
    third = threading.Event()

    def source() -> Iterator[int]:
        for n in range(100):
            taken.append(n)
            if n == 3:
                third.set()
            yield n

    shutdown = Shutdown()
    items = Prefetcher(source(), 3, "items", shutdown)
    third.wait()
    time.sleep(0.05)  # in which it would take a fifth
    assert taken == [0, 1, 2, 3]  # three in the buffer, one waiting for room
    shutdown.close()
    items.join()


def test_a_failure_overtakes_what_is_buffered():
    def source() -> Iterator[int]:
        yield from range(2)
        raise RuntimeError("disk gone")

    shutdown = Shutdown()
    items = Prefetcher(Prefetcher(source(), 5, "inner", shutdown), 5, "outer", shutdown)
    wait_until(lambda: shutdown.failure is not None)
    with pytest.raises(RuntimeError, match="disk gone"):
        next(items)
    items.join()


def test_closing_ends_all_threads():
    shutdown = Shutdown()
    inner = Prefetcher(iter(int, 1), 2, "inner", shutdown)  # endless
    outer = Prefetcher(inner, 2, "outer", shutdown)
    assert next(outer) == 0
    shutdown.close()
    wait_until(lambda: not {"inner", "outer"} & {thread.name for thread in threading.enumerate()})
    assert next(outer, None) is None
