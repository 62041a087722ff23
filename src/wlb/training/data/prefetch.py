"""A bounded prefetch thread that works ahead of the training loop and shuts down cleanly.

``Prefetcher`` runs an iterator in a daemon thread. Several of them chained (planning feeds reading) share one
``Shutdown``: an exception in any of them surfaces in the next ``next()`` of whoever consumes the chain, ahead of
items still buffered, and closing it wakes and ends all of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_JOIN_SECONDS = 5.0  # a thread inside a long solve is left behind: it is a daemon and holds nothing


class Shutdown:
    """What chained prefetchers share: one lock, the first failure, and whether all should stop."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()


class Prefetcher(Iterator[T], Generic[T]):
    """Iterates over ``source`` in a thread called ``name``, at most ``depth`` items ahead of the consumer."""

    def __init__(self, source: Iterable[T], depth: int, name: str, shutdown: Shutdown) -> None:
        self._source = source
        self._depth = depth
        self._shutdown = shutdown
        self._buffer: deque[T] = deque()
        self._exhausted = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        shutdown = self._shutdown
        with shutdown.changed:
            shutdown.changed.wait_for(lambda: self._buffer or self._exhausted or shutdown.failure or shutdown.closed)
            if shutdown.failure:
                raise shutdown.failure
            if shutdown.closed or not self._buffer:
                raise StopIteration
            item = self._buffer.popleft()
            shutdown.changed.notify_all()
            return item

    def join(self) -> None:
        """Wait for the thread to end, after the chain was closed."""
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        shutdown = self._shutdown
        try:
            for item in self._source:
                with shutdown.changed:
                    shutdown.changed.wait_for(lambda: len(self._buffer) < self._depth or shutdown.closed)
                    if shutdown.closed:
                        return
                    self._buffer.append(item)
                    shutdown.changed.notify_all()
        except BaseException as failure:  # whatever it is, the consumer has to know
            shutdown.fail(failure)
        finally:
            with shutdown.changed:
                self._exhausted = True
                shutdown.changed.notify_all()
