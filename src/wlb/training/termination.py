"""SIGTERM, as schedulers send it before they take a machine away: finish the step, save, leave within the grace time.

SIGHUP, of a terminal that is closed, means the same.

A thread waits for these signals, so that neither a collective nor a long kernel in the main thread can delay the
answer. From then on ``requested`` is true; the trainer shares it with all ranks at the start of the next step, and they
stop together. Whoever is still there when the grace time is over leaves at once: the newest checkpoint stands.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from wlb.training.failures import Terminated, leave


def signals_to_end() -> set[signal.Signals]:
    """The signals that ask a job to end; not those that it was started to ignore, as ``nohup`` does."""
    return {asked for asked in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(asked) != signal.SIG_IGN}


@contextmanager
def held_back(signals: Iterable[int]) -> Iterator[set[int]]:
    """Block ``signals``: those that come inside the block are answered at its end. Yields the mask before it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield set(mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Termination:
    """Whether this rank was asked to end. ``listen`` is called in the main thread, before other threads start."""

    def __init__(self) -> None:
        self.requested = False
        self._grace_seconds: float | None = None  # before the first step there is nothing to save

    def listen(self) -> None:
        """Start to answer the signals. They stay blocked in every thread, so nothing is interrupted by them."""
        asked = signals_to_end()
        signal.pthread_sigmask(signal.SIG_BLOCK, asked)
        threading.Thread(target=self._answer, args=(asked,), name="wlb-termination", daemon=True).start()

    def allow(self, seconds: float, what_is_kept: Callable[[], str]) -> None:
        """From now on a signal leaves ``seconds`` to end in good order; ``what_is_kept`` says what stands if not."""
        self._grace_seconds, self._what_is_kept = seconds, what_is_kept

    def _answer(self, asked: set[signal.Signals]) -> None:
        signal.sigwait(asked)
        self.requested = True
        if self._grace_seconds is None:
            leave(Terminated("terminated before the first step"))
        time.sleep(self._grace_seconds)
        leave(
            Terminated(
                f"terminated: training.grace_seconds = {self._grace_seconds:g} were too few to finish the step and "
                f"save it; {self._what_is_kept()}"
            )
        )
