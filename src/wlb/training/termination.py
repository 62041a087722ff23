"""SIGTERM, SIGHUP and Ctrl-C: finish the step, save it, and leave within the grace time.

A thread waits for the signals, so that neither a collective nor a long kernel in the main thread delays them.
"""

import signal
import threading

from wlb.training.failures import Terminated, leave


def signals_to_end() -> set[signal.Signals]:
    """The signals that ask a job to end, without those that it was started to ignore, as under ``nohup``."""
    asking = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    return {asked for asked in asking if signal.getsignal(asked) != signal.SIG_IGN}


class Termination:
    """Whether this rank was asked to end. Call ``listen`` in the main thread, before other threads start."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.hung = threading.Event()  # once it is set, nothing can be saved, and a signal leaves no time
        self._grace_seconds: float | None = None  # before the first step there is nothing to save

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived. The trainer shares this with all ranks before a step, so all stop together."""
        return self.asked.is_set()

    def listen(self) -> None:
        """Start to answer the signals. They stay blocked in every thread, so they interrupt nothing."""
        asked = signals_to_end()
        signal.pthread_sigmask(signal.SIG_BLOCK, asked)
        threading.Thread(target=self._answer, args=(asked,), name="wlb-termination", daemon=True).start()

    def allow(self, seconds: float, kept: str) -> None:
        """From now on a signal leaves ``seconds`` to finish and save; ``kept`` says what remains otherwise."""
        self._grace_seconds, self._kept = seconds, kept

    def _answer(self, asked: set[signal.Signals]) -> None:
        signal.sigwait(asked)
        self.asked.set()
        if self._grace_seconds is None:
            leave(Terminated("terminated before the first step"))
        limit = f"training.grace_seconds = {self._grace_seconds:g} was too short"
        cause = "a rank hung and there was no way" if self.hung.wait(self._grace_seconds) else limit
        leave(Terminated(f"terminated: {cause} to finish the step and save it; {self._kept}"))
