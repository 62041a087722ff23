"""``python -m tests.training.faulty_rank FAULT RANK STEP LIMIT CONFIG``: a rank like any other, until its fault.

At the end of step STEP rank RANK begins to ``sleep`` for good, or to ``spin`` in a loop, or sends itself SIGSTOP
(``stop``). From then on the watchdogs find a hang within LIMIT seconds and wait for all ranks that can answer. Until
then they find none, however long a busy machine takes.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.limits import HUNG_SECONDS
from tests.training.processes import wait_until
from wlb.training import trainer, watchdog
from wlb.training.worker import main

FOREVER = 10_000.0


def sleep() -> None:
    time.sleep(FOREVER)


def spin() -> None:
    deadline = time.monotonic() + FOREVER
    while time.monotonic() < deadline:
        pass


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def befall(fault: str, rank: str, step: str, limit: str, config: str) -> None:
    watchdogs: list[watchdog.Watchdog] = []
    begun = Path(config).with_name("fault")
    if fault != "stop":
        watchdog._ANSWER_SECONDS = HUNG_SECONDS

    class Watchdog(watchdog.Watchdog):
        def __init__(self, store: Any, _: float, pulse: watchdog.Pulse) -> None:
            super().__init__(store, float(limit), pulse)
            self._limit_seconds = math.inf
            watchdogs.append(self)

    train_step = trainer.Trainer._train_step

    def faulty(self: trainer.Trainer, *arguments: object) -> None:
        train_step(self, *arguments)  # type: ignore[arg-type]
        if self.step != int(step):
            return
        if os.environ.get("RANK", "0") == rank:
            begun.touch()
            {"sleep": sleep, "spin": spin, "stop": stop}[fault]()
        wait_until(begun.exists)
        for of_this_rank in watchdogs:
            of_this_rank._limit_seconds = float(limit)

    watchdog.Watchdog = Watchdog  # type: ignore[misc, assignment]
    trainer.Trainer._train_step = faulty  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    befall(*sys.argv[1:6])
    del sys.argv[1:5]
    main()
