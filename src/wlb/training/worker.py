"""One rank of a training job: ``torchrun -m wlb.training CONFIG [--set section.key=value]...``, or of ``wlb train``.

A rank keeps nothing worth saving outside its checkpoints, so it ends at once on any error and when its launcher is
gone. Only a signal leaves it time to save (``process``).
"""

import argparse
import gc
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.config_file import load_config
from wlb.training.process import Termination, TrainingError, flush, leave

_WATCH_SECONDS = 0.2
_LOST_PEER_SECONDS = 10.0  # a rank that has lost another one waits so long, so that the other one fails first


def main() -> None:
    """Run the rank that the command line and the environment describe."""
    parser = argparse.ArgumentParser(prog="python -m wlb.training")
    parser.add_argument("config", type=Path, help="configuration of the job (TOML)")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="override a setting")
    arguments = parser.parse_args()
    auto_dp = partial(dp_of, int(os.environ.get("WORLD_SIZE", "1")))
    as_rank(lambda termination: _train(load_config(arguments.config, arguments.set, auto_dp=auto_dp), termination))
    os._exit(0)  # without waiting for peers that may be gone


def as_rank(work: Callable[[Termination], Any]) -> Any:
    """Run ``work`` and return its result. Leaves on any error, on a signal, and when the launcher ends."""
    termination = Termination()
    termination.listen()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_launcher(termination)
    try:
        result = work(termination)
        flush()
        return result
    except Exception as error:
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        if isinstance(error, RuntimeError) and not isinstance(error, TrainingError) and not alone:  # as of a lost peer
            termination.asked.wait(_LOST_PEER_SECONDS)
        leave(error)


def train_as_rank(config: JobConfig) -> dict[str, Any] | None:
    """Train as one rank; returns the summary on rank 0."""
    return as_rank(partial(_train, config))  # type: ignore[no-any-return]  # what _train returns


def dp_of(processes: int, of_one_rank: int) -> int:
    """The value of ``parallel.dp = "auto"`` if ``processes`` processes were started."""
    if processes % of_one_rank:
        raise UserError(
            f"parallel.dp = 'auto': {processes} processes were started, no multiple of pp x cp x tp = {of_one_rank}; "
            "start a multiple"
        )
    return processes // of_one_rank


def _train(config: JobConfig, termination: Termination) -> dict[str, Any] | None:
    from wlb.training.trainer import train

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints on stderr when it starts and stops
    gc.freeze()  # or every full garbage collection while planning walks through all of torch
    return train(config, termination)


def _end_with_launcher(termination: Termination) -> None:
    """End this process when its launcher has ended, because orphans would go on writing into the run.

    If the launcher dies while ranks save after a signal, they still have their grace time.
    """
    launcher, parent = multiprocessing.parent_process(), os.getppid()
    if launcher is None and _store_is_gone():  # torchrun has died, and another process has adopted this one
        os._exit(1)

    def watch() -> None:
        if launcher is not None:
            launcher.join()
        while launcher is None and os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        if not termination.asked.is_set():
            os._exit(1)

    threading.Thread(target=watch, name="wlb-launcher-watch", daemon=True).start()


def _store_is_gone() -> bool:
    """Whether torchrun keeps its store on this machine and has closed the port."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_RANK", "0") == "0":
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=5.0).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
    return False
