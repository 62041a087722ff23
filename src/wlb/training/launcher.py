"""Starts one process per rank on this machine, supervises and restarts them.

The processes run ``python -m wlb.training CONFIG`` in the environment that ``torchrun`` would give them, forked from
this one where that is safe, and meet in a store that the launcher holds. When one fails, the others have a moment to
end by themselves, and are killed then. Whatever can be checked without them is checked before they start. Where a rank
was killed or the job hung, all of them start again from the newest checkpoint.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from wlb.errors import UserError, require
from wlb.job.config import JobConfig
from wlb.job.config_file import load_config
from wlb.terminal import number_of
from wlb.training.checkpoint.files import step_of
from wlb.training.console import meanwhile, say, show_meanwhile
from wlb.training.failures import (
    FAILURE_STATUS,
    HUNG_STATUS,
    TERMINATED_STATUS,
    USER_ERROR_STATUS,
    Ending,
    Terminated,
    TrainingError,
    explain_failures,
    leave,
    recorded_failure,
)
from wlb.training.forks import ForkedRank, Forks
from wlb.training.termination import held_back, signals_to_end

_BEYOND_GRACE_SECONDS = 5.0  # ranks leave by themselves when training.grace_seconds are over; then they are killed
_LAST_WORDS_SECONDS = 2.0  # for the other ranks to end by themselves when it is known what has ended the job
_LOST_PEER_SECONDS = 30.0  # the same after any other error: a peer may have been killed and still be about to end
_KILL_SECONDS = 30.0  # a process that waits for a disk or a device dies only when that answers
_POLL_SECONDS = 0.1
_THIS_MACHINE = "127.0.0.1"

_Rank = ForkedRank | subprocess.Popen[bytes]


def launch(config_path: Path, overrides: Sequence[str] = (), *, summary: bool = False) -> int:
    """Train ``config_path`` with ``parallel.*`` processes on this machine; returns the exit status.

    With ``summary``, rank 0 prints one JSON object on stdout at the end. Raises ``UserError`` for mistakes that show
    before the processes start, and ``KeyboardInterrupt`` on Ctrl-C once they have ended.
    """
    forks = Forks()
    with _EndRequest() as request:
        try:
            return _launch(config_path, overrides, request, forks, summary=summary)
        except TrainingError as error:
            say(f"wlb: error: {error}")
            return FAILURE_STATUS


def _launch(config_path: Path, overrides: Sequence[str], request: _EndRequest, forks: Forks, *, summary: bool) -> int:
    with meanwhile("checking the job"):
        config = load_config(config_path, overrides, auto_dp=partial(_dp_of_this_machine, forks))
        forks.prepare()
        require("torch", "train")
        forks.call(partial(_check, config))
    arguments = [str(config_path)]
    for override in overrides:
        arguments += ["--set", override]
    if summary:
        arguments.append("--json")
    restarts = Restarts(config)
    request.ranks_answer = True
    while ending := _run_to_end(config, arguments, request, forks):
        request.ranks_answer = False  # there are none: what follows may take longer than a grace time
        restart = ending.restart and not request.received
        if restart and (mistake := _why_not_again(config, forks)):
            say(f"wlb: error: {ending.cause}, and the job cannot be started again: {mistake}")
            return USER_ERROR_STATUS
        origin = restarts.take() if restart else None
        request.ranks_answer = True
        if origin is None:
            _tell(ending, restarts)
            return ending.status
        say(f"wlb: {ending.cause}; restarting from {origin}, restarts left: {restarts.left}")
    return 0


def _why_not_again(config: JobConfig, forks: Forks) -> str | None:
    """What stops the job at its start by now, such as a file that has shrunk: to read it kills who has it mapped."""
    try:
        forks.call(partial(_check, config))
    except UserError as error:
        return str(error)
    return None


def _dp_of_this_machine(forks: Forks, of_one_rank: int) -> int:
    """As many data-parallel ranks as there are GPUs for; one on a machine without GPUs."""
    forks.prepare()
    gpus: int = forks.call(require("torch", "train").cuda.device_count)
    return max(1, gpus // of_one_rank)


def _check(config: JobConfig) -> None:
    from wlb.training.preflight import check_job

    check_job(config, local_processes=config.parallel.layout.world_size)


class _EndRequest:
    """Listens for SIGTERM and SIGHUP inside its block.

    Until ``ranks_answer`` is set, one of them ends this process at once; from then on ``received`` says that one came.
    """

    def __init__(self) -> None:
        self.received = False
        self.ranks_answer = False

    def __enter__(self) -> _EndRequest:
        self._handlers = {asked: signal.signal(asked, self._answer) for asked in signals_to_end()}
        return self

    def __exit__(self, *_: object) -> None:
        for asked, handler in self._handlers.items():
            signal.signal(asked, handler)

    def _answer(self, *_: object) -> None:
        self.received = True
        if not self.ranks_answer:
            leave(Terminated("terminated before the first step"))


class Restarts:
    """How often a job whose ranks were killed or hung starts again: ``training.max_restarts`` times in a row.

    Restarts are counted between checkpoints: whenever the job has written a newer one than it was last started from,
    all of them are available again. So a job on a flaky machine runs for months, and one that dies at the same place
    every time ends. A damaged checkpoint does not count, as the job does not continue from it. There are none without
    ``checkpoint.dir``, as nothing would be kept. ``refusal`` says why ``take`` has given none, in words; None where
    there were none to begin with.
    """

    def __init__(self, config: JobConfig) -> None:
        self._config = config.checkpoint
        resumes = config.checkpoint.dir is not None and config.checkpoint.resume
        self._most = config.training.max_restarts if resumes else 0
        self._started_from = 0  # step of the checkpoint; unknown of the first start, which has used no restart
        self.left = self._most
        self.refusal: str | None = None

    def take(self) -> str | None:
        """Use one: where the job continues from, in words, or None if it is not to be started again."""
        if not self._most:
            return None
        from wlb.training.checkpoint.resuming import newest_checkpoint

        try:
            newest = newest_checkpoint(self._config, contents=True)
        except UserError as error:
            self.refusal = str(error)
            return None
        step = step_of(newest) if newest else 0
        if step > self._started_from:
            self.left = self._most
        if not self.left:
            self.refusal = "there was no newer checkpoint since the last restart, and no restart is left"
            return None
        self.left -= 1
        self._started_from = step
        return f"checkpoint {newest.name}" if newest else "the first step, as there is no checkpoint yet"


def _run_to_end(config: JobConfig, arguments: Sequence[str], request: _EndRequest, forks: Forks) -> Ending | None:
    """``_run_ranks``, and what Ctrl-C loses."""
    try:
        return _run_ranks(config, arguments, request, forks)
    except KeyboardInterrupt:
        say(f"wlb: {_what_is_kept(config)}")
        raise


def _what_is_kept(config: JobConfig) -> str:
    from wlb.training.checkpoint.resuming import what_is_kept
    from wlb.training.observe.metrics import STEPS, last_step_in

    return what_is_kept(config.checkpoint, last_step_in(config.metrics.dir / STEPS))


def _run_ranks(config: JobConfig, arguments: Sequence[str], request: _EndRequest, forks: Forks) -> Ending | None:
    """Start all ranks and wait until they have ended; returns how, unless they have trained to the end."""
    from torch.distributed import TCPStore

    listening = socket.create_server((_THIS_MACHINE, 0))
    port = listening.getsockname()[1]
    environment = _environment(config, port)
    with tempfile.TemporaryDirectory(prefix="wlb-") as folder:
        error_files = [Path(folder, f"rank-{rank}.json") for rank in range(config.parallel.layout.world_size)]
        ranks: list[_Rank] = []
        try:
            show_meanwhile(f"starting {number_of(len(error_files), 'process')}")
            with held_back({signal.SIGINT}):  # or Ctrl-C could come between the start of a rank and the list of them
                for rank, error_file in enumerate(error_files):
                    ranks.append(_start(forks, arguments, environment, rank=rank, error_file=error_file))
            # Only now, as it has threads, beside which nothing is forked. It ends with this function.
            store = TCPStore(  # noqa: F841
                _THIS_MACHINE, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            unfinished = _wait(ranks, request, config.training.grace_seconds)
        finally:
            _kill(ranks)
        failures = {
            rank: recorded_failure(process.pid, process.returncode, error_files[rank])
            for rank, process in enumerate(ranks)
            if process not in unfinished and process.returncode != 0
        }
    if failures:
        return explain_failures(failures)
    if unfinished:
        limit = config.training.grace_seconds + _BEYOND_GRACE_SECONDS
        text = f"terminated: not all ranks ended within {limit:g} s, and were killed; {_what_is_kept(config)}"
        return Ending(text, f"wlb: {text}", TERMINATED_STATUS)
    return None


def _environment(config: JobConfig, port: int) -> dict[str, str]:
    """What all ranks find in their environment, under the names that ``torchrun`` has for it."""
    from wlb.training.environment import threads_per_process

    world_size = config.parallel.layout.world_size
    return os.environ | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": _THIS_MACHINE,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"wlb-{os.getpid()}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # For libraries that a rank has yet to load; joined_job sets torch's threads. Where the variable is set and
        # training.threads is not, it keeps its value.
        "OMP_NUM_THREADS": str(threads_per_process(config.training, world_size)),
    }


def _start(
    forks: Forks, arguments: Sequence[str], environment: Mapping[str, str], *, rank: int, error_file: Path
) -> _Rank:
    """Start a rank in a session of its own: what is meant for this process by a terminal does not reach it.

    SIGTERM is blocked until it listens for it, so that none is too early.
    """
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file)}
    if forked := forks.fork(arguments, {**environment, **own}):
        return forked
    with held_back(signals_to_end()):
        program = [sys.executable, "-m", "wlb.training", *arguments]
        return subprocess.Popen(program, env={**environment, **own}, start_new_session=True)


def _wait(ranks: Sequence[_Rank], request: _EndRequest, grace_seconds: float) -> list[_Rank]:
    """Wait until all ranks have ended, but not for long after a failure or a request to end; returns those that run."""
    deadline, asked = math.inf, False
    while running := [process for process in ranks if process.poll() is None]:
        now = time.monotonic()
        if now > deadline:
            break
        failed = {process.returncode for process in ranks} - {None, 0}
        if not asked and (request.received or TERMINATED_STATUS in failed):
            asked, deadline = True, now + grace_seconds + _BEYOND_GRACE_SECONDS
            for process in running:
                os.kill(process.pid, signal.SIGTERM)
        elif not asked and failed:
            known = any(status < 0 or status in (USER_ERROR_STATUS, HUNG_STATUS) for status in failed)
            deadline = min(deadline, now + (_LAST_WORDS_SECONDS if known else _LOST_PEER_SECONDS))
        time.sleep(_POLL_SECONDS)
    return running


def _kill(ranks: Sequence[_Rank]) -> None:
    """End what still runs with all that it has started, also what is stopped and would not answer a SIGTERM."""
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        with suppress(ProcessLookupError):  # it has ended just now
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_SECONDS
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _tell(ending: Ending, restarts: Restarts) -> None:
    if not ending.text:
        return
    if ending.restart and restarts.refusal:
        say(f"{ending.text}; {restarts.refusal}")
    elif ending.restart:
        say(f"{ending.text}. Run the same command to continue from the newest checkpoint, if there is one")
    else:
        say(ending.text)
