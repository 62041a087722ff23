"""Processes as tests start them: forked from a server that has imported what takes each of them seconds to import.

``forked`` is to a test what ``subprocess.Popen`` is, and ``finished`` what ``subprocess.run`` is, for ``python -m
MODULE ARGUMENTS`` and ``python SCRIPT ARGUMENTS``. ``FORKS`` forks functions. What would be spawned is forked, too.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any

from tests.cores import allow_cores, kept_cores
from tests.limits import HUNG_SECONDS
from wlb.training.process import signals_to_end

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("pytest", "hypothesis", "torch.distributed.pipelining", "fsspec", "numpy.ma", "wlb.cli.app"),
        *("transformers.models.llama.modeling_llama", "transformers.trainer"),
        *("wlb.training.trainer", "wlb.training.worker", "wlb.training.launcher", "wlb.training.dry_run"),
        "torch.distributed.launcher.api",
        "tests.frozen",  # last
    ]
)
multiprocessing.context._concrete_contexts["spawn"] = FORKS  # type: ignore[attr-defined]
_STDOUT, _STDERR = 1, 2
_SERVER: Any = forkserver._forkserver


def server_address() -> str:
    """Of the server that this process forks from, which is started if there is none."""
    _SERVER.ensure_running()
    return str(_SERVER._forkserver_address)


def fork_from(address: str) -> None:
    """Let the server there, which another process has started, fork what this one asks for."""
    if _SERVER._forkserver_alive_fd is None:
        _, _SERVER._forkserver_alive_fd = os.pipe()  # forks are sent it, but the server goes by its own
    _SERVER._forkserver_address = address
    _SERVER.ensure_running = forkserver.ensure_running = lambda: None


class Program:
    """A program that was forked, with what tests use of ``subprocess.Popen``; it leads a session of its own."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        readers, writers = zip(*(FORKS.Pipe(duplex=False) for _ in range(3)), strict=True)
        given = (arguments, dict(environment), os.getcwd(), server_address())
        self._process = FORKS.Process(target=_run, args=(*given, *writers))
        self._process.start()
        for writer in writers:
            writer.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno()), encoding="utf-8") for reader in readers[:2])
        with suppress(EOFError):
            readers[2].recv()  # it leads its session now
        for reader in readers:
            reader.close()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[str, str]:
        """What is left of stdout and of stderr, and the end of the program, and of those that it has started.

        Raises ``TimeoutError`` where one of them still holds an output after ``HUNG_SECONDS``.
        """
        texts = ["", ""]

        def read(index: int, stream: IO[str]) -> None:
            with stream:
                texts[index] = stream.read()

        streams = [(index, stream) for index, stream in enumerate((self.stdout, self.stderr)) if not stream.closed]
        threads = [threading.Thread(target=read, args=stream, daemon=True) for stream in streams]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + HUNG_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"process {self.pid} or one that it started did not end within {HUNG_SECONDS:g} s")
        self.wait()
        return texts[0], texts[1]


@contextmanager
def forked(*arguments: object, **environment: str) -> Iterator[Program]:
    """``python ARGUMENTS``, of which nothing is left afterwards."""
    program = Program([*map(str, arguments)], os.environ | environment)
    try:
        yield program
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
        sys.stderr.write(kept_cores())


def finished(*arguments: object, **environment: str) -> CompletedProcess[str]:
    """``python ARGUMENTS``, when it has ended."""
    with forked(*arguments, **environment) as program:
        out, err = program.communicate()
    status = program.returncode
    assert status is not None
    return CompletedProcess([*map(str, arguments)], status, out, err)


def _run(
    arguments: list[str],
    environment: Mapping[str, str],
    directory: str,
    server: str,
    stdout: Connection,
    stderr: Connection,
    ready: Connection,
) -> None:
    """Be the program, as if Python had just started."""
    os.setsid()
    allow_cores()
    # A launcher that ran in this process may have started the server, with signals blocked.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for connection, stream in ((stdout, _STDOUT), (stderr, _STDERR)):
        os.dup2(connection.fileno(), stream)
        connection.close()
    sys.stdout = open(_STDOUT, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(_STDERR, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    ready.send(None)
    ready.close()
    _fork_ranks(server)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent.resolve()))
        runpy.run_path(arguments[0], run_name="__main__")


def _fork_ranks(server: str) -> None:
    """The server has imported torch, and so has this fork of it, where nothing has used it: ranks need no server.

    Those that it asks ``server`` for have not used torch either.
    """
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    from wlb.training import launcher

    fork_from(server)
    start, launcher.START_METHOD = MultiprocessContext._start, "fork"

    def start_held_back(self: MultiprocessContext) -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals_to_end())
        work = self.entrypoint
        assert callable(work)

        @wraps(work)
        def named(*arguments: Any) -> Any:
            Path("/proc/self/comm").write_text(f"{work.__name__[:5]}-{os.environ['RANK']}")
            return work(*arguments)

        self.entrypoint = named
        start(self)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    MultiprocessContext._start = start_held_back  # type: ignore[method-assign]
