"""One rank of a training job: ``torchrun -m wlb.training CONFIG [--set section.key=value]... [--json]``.

``wlb train`` starts the same program. A rank keeps nothing worth saving outside its checkpoints, so it ends at
once: on any error, and when its launcher is gone. Only SIGTERM leaves it time to save (``termination``).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

from wlb.errors import UserError
from wlb.training.console import flush
from wlb.training.failures import TrainingError, leave
from wlb.training.termination import Termination

_WATCH_SECONDS = 0.2
_CONNECT_SECONDS = 5.0  # to the store of a launcher on this machine


def main() -> None:
    """Train as one rank, then leave without waiting for peers that may be gone."""
    termination = Termination()
    termination.listen()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler says on stderr that it starts and stops
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_launcher(termination)
    try:
        arguments = _parse()
        from wlb.job.config_file import load_config

        started = int(os.environ.get("WORLD_SIZE", "1"))
        config = load_config(arguments.config, arguments.set, auto_dp=partial(dp_of, started))
        from wlb.training.trainer import train

        gc.freeze()  # or every full collection while planning walks all that torch has imported
        summary = train(config, termination)
        if arguments.json and summary is not None:
            try:
                print(json.dumps(summary, allow_nan=False))
                sys.stdout.flush()
            except BrokenPipeError:
                pass  # the job is done, whether or not anybody reads about it
            except OSError as error:
                raise TrainingError(
                    f"training has ended, but its summary could not be written: {error.strerror}"
                ) from None
    except Exception as error:
        leave(error)
    flush()
    os._exit(0)


def dp_of(processes: int, of_one_rank: int) -> int:
    """What ``parallel.dp = "auto"`` is where ``processes`` were started."""
    if processes % of_one_rank:
        raise UserError(
            f"parallel.dp = 'auto': {processes} processes were started, no multiple of pp x cp x tp = {of_one_rank}; "
            "start a multiple"
        )
    return processes // of_one_rank


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parse() -> argparse.Namespace:
    parser = _Parser(prog="python -m wlb.training")
    parser.add_argument("config", type=Path, help="configuration of the job (TOML)")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="override a setting")
    parser.add_argument("--json", action="store_true", help="print a summary on stdout at the end")
    return parser.parse_args()


def _end_with_launcher(termination: Termination) -> None:
    """End this process when its launcher has ended; orphans would go on writing into the run.

    A launcher that dies while ranks save after a SIGTERM leaves them their grace time.
    """
    launcher = os.getppid()
    if not _store_answers():  # the launcher died before this line, and the parent is whoever adopts orphans
        os._exit(1)

    def watch() -> None:
        while os.getppid() == launcher or termination.requested:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="wlb-launcher-watch", daemon=True).start()


def _store_answers() -> bool:
    """Whether the launcher's store still listens, as it did before this rank was started.

    True also where the launcher has none: with ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE`` the ranks hold the store, and of
    several machines only the first has it.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or os.environ.get("GROUP_RANK", "0") != "0":
        return True
    try:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        socket.create_connection(address, timeout=_CONNECT_SECONDS, all_errors=True).close()
    except ExceptionGroup as errors:  # one for each address of the host
        return errors.subgroup(ConnectionRefusedError) is None  # else the process group will say what is wrong
    except OSError:
        return True
    return True
