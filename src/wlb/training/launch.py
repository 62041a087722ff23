"""Start one process per rank on this machine and see them through to the end.

The processes run ``python -m wlb.training CONFIG``, exactly as they would under ``torchrun``, supervised by PyTorch's
elastic launcher: when one dies the others are stopped within a second. Whatever can be checked without them is
checked before they start.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from wlb.config import load_config
from wlb.errors import require
from wlb.training.console import say
from wlb.training.failures import explain_failures

_SHUTDOWN_SECONDS = 5  # between asking ranks to end and killing them; they keep nothing that needs longer


def launch(config_path: Path, overrides: Sequence[str] = (), *, summary: bool = False) -> int:
    """Train ``config_path`` with ``parallel.*`` processes on this machine; returns the exit status.

    With ``summary``, rank 0 prints one JSON object on stdout at the end. Raises ``UserError`` for mistakes that show
    before the processes start, and ``KeyboardInterrupt`` on Ctrl-C once they have ended.
    """
    config = load_config(config_path, overrides)
    require("torch", "train")
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from wlb.training.job import threads_per_process
    from wlb.training.preflight import check_job

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
    with tempfile.TemporaryDirectory(prefix="wlb-") as error_files:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            logs_specs=DefaultLogsSpecs(log_dir=error_files),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=f"wlb-{os.getpid()}",
            max_restarts=0,
            local_addr="localhost",
            shutdown_timeout=_SHUTDOWN_SECONDS,
        )
        try:
            elastic_launch(settings, sys.executable)(*arguments)
        except ChildFailedError as error:
            text, status = explain_failures(error.failures)
            say(text)
            return status
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            say("wlb: terminated")
            return 128 + int(error.sigval)
    return 0
