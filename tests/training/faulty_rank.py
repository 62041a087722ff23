"""A rank like any other, ``python -m tests.training.faulty_rank FAULT RANK STEP CONFIG``, until a fault befalls it.

At the end of step STEP rank RANK begins to ``sleep`` for good, or to ``spin`` in a loop, or sends itself SIGSTOP
(``stop``).
"""

from __future__ import annotations

import os
import signal
import sys
import time

from wlb.training import trainer
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


def befall(fault: str, rank: str, step: str) -> None:
    if os.environ.get("RANK", "0") != rank:
        return
    train_step = trainer.Trainer._train_step

    def faulty(self: trainer.Trainer, *arguments: object) -> None:
        train_step(self, *arguments)  # type: ignore[arg-type]
        if self.step == int(step):
            {"sleep": sleep, "spin": spin, "stop": stop}[fault]()

    trainer.Trainer._train_step = faulty  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    befall(*sys.argv[1:4])
    del sys.argv[1:4]
    main()
