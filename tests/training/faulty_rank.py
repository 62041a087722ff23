"""``python -m tests.training.faulty_rank FAULT RANK STEP ARGUMENTS``: a rank like any other, until its fault.

At the end of step STEP rank RANK begins to ``sleep`` for good, or to ``spin`` in a loop, or sends itself SIGSTOP
(``stop``), once; or it does that while it writes the checkpoint of the step (``stop-writing``). Only from then on
collectives time out, however long a busy machine takes. ``spin-nccl`` is ``spin`` in a job whose collectives look like
NCCL's: they never raise, but the store gets NCCL's key, and the flight recorder has them. The launcher kills no rank
before tests call it hung. ARGUMENTS are those of a rank, or ``train`` and those of ``wlb train``.
"""

import os
import pickle
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.elastic.multiprocessing.api import PContext

from tests.limits import HUNG_SECONDS
from tests.training.processes import wait_until
from wlb.training import stalls, trainer, worker
from wlb.training.checkpoint import checkpointer

FOREVER = 10_000.0
LIMIT_SECONDS = 2.0


def sleep() -> None:
    time.sleep(FOREVER)


def spin() -> None:
    deadline = time.monotonic() + FOREVER
    while time.monotonic() < deadline:
        pass


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def gloo_as_nccl(*parts: bool) -> bytes:
    """The flight recorder of gloo in this process, as if each collective had been allowed a millisecond."""
    dump = pickle.loads(_distributed_c10d._dump_fr_trace(*parts))  # type: ignore[attr-defined]
    return pickle.dumps(dump | {"entries": [entry | {"timeout_ms": 1} for entry in dump["entries"]]})


def time_out_as_nccl() -> None:
    """Set the key as soon as this rank has waited a second in a collective."""
    store: dist.Store = dist.distributed_c10d._get_default_store()._underlying_non_prefix_store.clone()  # type: ignore[attr-defined]
    wait_until(lambda: bool(stalls._unfinished()))
    time.sleep(1.0)
    store.set(stalls._NCCL_TIMED_OUT, "")


def befall(fault: str, rank: str, step: str, begun: Path) -> None:
    PContext.close.__defaults__ = (None, int(HUNG_SECONDS))
    if not fault.startswith("stop"):
        stalls._ANSWER_SECONDS = HUNG_SECONDS
    if fault == "spin-nccl":
        _distributed_c10d._dump_nccl_trace = gloo_as_nccl  # type: ignore[attr-defined]

    def strike() -> None:
        if os.environ.get("RANK", "0") == rank:
            begun.touch()
            {"sleep": sleep, "spin": spin, "spin-nccl": spin}.get(fault, stop)()
        wait_until(begun.exists)
        if fault == "spin-nccl":
            threading.Thread(target=time_out_as_nccl, daemon=True).start()
        else:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_SECONDS))

    save, train_step, trained = checkpointer.dcp.async_save, trainer.Trainer._train_step, 0

    def struck(*arguments: Any, **named: Any) -> Any:
        writing = save(*arguments, **named)
        strike()
        return writing

    def faulty(self: trainer.Trainer, *arguments: object) -> None:
        nonlocal trained
        train_step(self, *arguments)  # type: ignore[arg-type]
        trained += 1
        if not trained == self.step == int(step):  # or this process continues from a checkpoint
            return
        if fault == "stop-writing":
            checkpointer._Writer.write_data = lambda *_: sleep()  # type: ignore[method-assign, assignment]
            checkpointer.dcp.async_save = struck
        else:
            strike()

    trainer.Trainer._train_step = faulty  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    befall(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[-1]).with_name("fault"))
    del sys.argv[1:4]
    if sys.argv[1] == "train":
        from wlb.__main__ import main as wlb

        wlb()
    else:
        worker.main()
