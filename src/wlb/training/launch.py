"""Start one process per rank on this machine and see them through to the end.

The processes run ``python -m wlb.training CONFIG``, exactly as they would under ``torchrun``, supervised by PyTorch's
elastic launcher: when one dies the others are stopped within a second. Whatever can be checked without them is
checked before they start. Where a rank was killed or the job hung, all of them start again from the newest checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from wlb.config import JobConfig
from wlb.config_file import load_config
from wlb.errors import require
from wlb.training.console import say
from wlb.training.failures import Ending, explain_failures

if TYPE_CHECKING:
    from wlb.training.restarts import Restarts

_BEYOND_GRACE_SECONDS = 5  # ranks leave by themselves when training.grace_seconds are over; then they are killed


def launch(config_path: Path, overrides: Sequence[str] = (), *, summary: bool = False) -> int:
    """Train ``config_path`` with ``parallel.*`` processes on this machine; returns the exit status.

    With ``summary``, rank 0 prints one JSON object on stdout at the end. Raises ``UserError`` for mistakes that show
    before the processes start, and ``KeyboardInterrupt`` on Ctrl-C once they have ended.
    """
    config = load_config(config_path, overrides)
    require("torch", "train")
    from wlb.training.job import threads_per_process
    from wlb.training.preflight import check_job
    from wlb.training.restarts import Restarts

    world_size = config.parallel.world_size
    check_job(config, local_processes=world_size)
    # Before the ranks import torch; where the variable is set and training.threads is not, it keeps its value.
    os.environ["OMP_NUM_THREADS"] = str(threads_per_process(config.training, world_size))
    logging.disable(
        logging.ERROR
    )  # the elastic launcher logs failures and signals in its own words; here they get ours
    arguments = ["-m", "wlb.training", str(config_path)]
    for override in overrides:
        arguments += ["--set", override]
    if summary:
        arguments.append("--json")
    restarts = Restarts(config)
    while ending := _run_ranks(config, arguments):
        origin = restarts.take() if ending.restart else None
        if origin is None:
            _tell(ending, restarts)
            return ending.status
        say(f"wlb: {ending.cause}; restarting from {origin}, restarts left: {restarts.left}")
    return 0


def _run_ranks(config: JobConfig, arguments: Sequence[str]) -> Ending | None:
    """Start all ranks and wait until they have ended; returns how, unless they have trained to the end."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="wlb-") as folder:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.parallel.world_size,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=f"wlb-{os.getpid()}",
            max_restarts=0,
            local_addr="localhost",
        )
        if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:  # torch 2.11 always waits 30 s
            settings.shutdown_timeout = int(config.training.grace_seconds) + _BEYOND_GRACE_SECONDS
        try:
            elastic_launch(settings, sys.executable)(*arguments)
        except ChildFailedError as error:
            return explain_failures(error.failures)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            told = any(Path(folder).rglob("0/error.json"))  # rank 0 says where it ended, unless it was still starting
            return Ending("terminated", "" if told else "wlb: terminated", 128 + int(error.sigval))
    return None


def _tell(ending: Ending, restarts: Restarts) -> None:
    if not ending.text:
        return
    if ending.restart and restarts.refusal:
        say(f"{ending.text}; {restarts.refusal}")
    elif ending.restart:
        say(f"{ending.text}. Run the same command to continue from the newest checkpoint, if there is one")
    else:
        say(ending.text)
