"""Trains on this machine: checks the job, starts its ranks with torchrun's engine, and restarts them if that helps.

Ranks, and the check before them, are forked from a server that has imported what they need. The server itself uses none
of it, so it has one thread and no CUDA. If a rank was killed or the job hung, all ranks restart from a checkpoint.
"""

import json
import logging
import math
import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.job.config import CheckpointConfig, JobConfig
from wlb.terminal import tell, write
from wlb.training.checkpoint.files import newest_checkpoint, step_of
from wlb.training.process import TERMINATED_STATUS, Ending, ending_of, signals_to_end
from wlb.training.worker import as_rank, train_as_rank

START_METHOD = "forkserver"
_MOST_RESTARTS = 3  # in a row without a newer checkpoint
_BEYOND_GRACE_SECONDS = 5.0  # ranks leave by themselves after training.grace_seconds; later they are killed


def launch(config: JobConfig, *, summary: bool = False) -> int:
    """Train ``config`` with ``parallel.*`` processes on this machine; returns the exit status.

    With ``summary``, prints one JSON object on stdout at the end. Raises ``KeyboardInterrupt`` on Ctrl-C once all
    processes have ended.
    """
    if START_METHOD == "forkserver":
        # Signals stay blocked in the server and all that it forks, so that no signal reaches a rank too early.
        resource_tracker.ensure_running()  # first, because starting it unblocks signals
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals_to_end())
        forkserver.set_forkserver_preload(["wlb.training.trainer", "wlb.training.worker"])
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    from torch.distributed.elastic.multiprocessing import SignalException

    logging.disable()  # we report in one line what torch's engine logs
    try:
        return _train(config, summary)
    except SignalException as ended:
        if ended.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        return TERMINATED_STATUS


def _train(config: JobConfig, summary: bool) -> int:
    """Check the job and start its ranks, again and again until another start would not help."""
    started_from = restarts = 0  # step of the checkpoint; restarts without a newer one
    while True:
        # Checked before each start: a file may have shrunk, and reading a mapped file beyond its end kills the process.
        unfit: Ending | None = _run(1, _check, config)
        if unfit:
            tell(unfit.text.replace("rank 0 (process", "the check before the start (process"))
            return unfit.status
        ended = _run(config.parallel.layout.world_size, train_as_rank, config)
        if not isinstance(ended, Ending):
            write(sys.stdout, f"{json.dumps(ended, allow_nan=False)}\n" if summary else "")
            return 0
        step = _step_to_continue_from(config.checkpoint) if ended.restart else None
        restarts = 1 if step is not None and step > started_from else restarts + 1
        if step is None or restarts > _MOST_RESTARTS:
            tell(ended.text)
            return ended.status
        tell(f"{ended.text}; restarting from step {step}, {restarts} of {_MOST_RESTARTS} restarts without a newer one")
        started_from = step


def _step_to_continue_from(config: CheckpointConfig) -> int | None:
    """0 if there is no checkpoint yet, None if the job must not continue by itself."""
    if config.dir is None or not config.resume:
        return None
    try:
        newest = newest_checkpoint(config, contents=True)
    except UserError as error:
        tell(f"wlb: error: {error}")
        return None
    return step_of(newest) if newest else 0


def _check(config: JobConfig) -> None:
    from wlb.training.preflight import check_job

    as_rank(lambda _: check_job(config, config.parallel.layout.world_size))


def _run(processes: int, work: Callable[[JobConfig], Any], config: JobConfig) -> Any:
    """Run ``work`` in ``processes`` processes; returns the first one's result, or the ``Ending`` of the first failure.

    Raises ``SignalException`` if this process was asked to end, once the others have ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    others = {*multiprocessing.active_children()}
    with tempfile.TemporaryDirectory(prefix="wlb-") as folder:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method=START_METHOD,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=",".join(asked.name for asked in signals_to_end()),
            shutdown_timeout=math.ceil(config.training.grace_seconds + _BEYOND_GRACE_SECONDS),
        )
        try:
            return elastic_launch(settings, work)(config)[0]
        except ChildFailedError as error:
            return ending_of(*error.get_first_failure())
        except SignalException:
            for rank in {*multiprocessing.active_children()} - others:  # started, and not yet known to torch's engine
                rank.kill()
            if not any(Path(folder).rglob("error.json")):  # asked while it started them, it leaves without them
                tell("wlb: terminated before the first step")
            raise
