"""One piece of work in a thread beside training, and how it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class InBackground(Generic[T]):
    """Runs ``work`` in a daemon thread called ``name``: a process that has to end does not wait for it."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._result: T
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Wait for the work to end; returns what it returned or raises what it raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as failure:  # whatever it is, whoever waits has to know
            self._failure = failure
