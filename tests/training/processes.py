"""Jobs as processes that tests signal and kill: started, waited for, and never left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.limits import HUNG_SECONDS
from tests.programs import Program, forked


@contextmanager
def process(
    *arguments: str | Path, program: str = sys.executable, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """``PROGRAM ARGUMENTS`` in a process group of its own, of which nothing is left afterwards."""
    started = subprocess.Popen(
        [program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | environment,
        preexec_fn=ignore_nothing,
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


def ignore_nothing() -> None:
    """Hear the signals that tests send, also where the tests run under nohup or in the background and ignore them."""
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_DFL)


@contextmanager
def ranks(world_size: int, *arguments: str | Path, **environment: str) -> Iterator[list[Program]]:
    """``python ARGUMENTS`` as each rank of a job, without a launcher; rank 0 holds the store."""
    with reserved_port() as port, ExitStack() as stack:
        yield [
            stack.enter_context(
                forked(
                    *arguments,
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(world_size),
                    MASTER_ADDR="localhost",
                    MASTER_PORT=str(port),
                    **environment,
                )
            )
            for rank in range(world_size)
        ]


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else is given as long as it is reserved, and on which one may listen who asks for it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("localhost", 0))
        port: int = holder.getsockname()[1]
        yield port


def is_listening(port: int) -> bool:
    """Whether a process of this machine accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def wait_until(condition: Callable[[], bool], seconds: float = HUNG_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "ran out of time"
        time.sleep(0.02)


def steps_written(folder: Path) -> int:
    try:
        return len((folder / "metrics" / "steps.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def ranks_of(launcher: int) -> list[int]:
    """Ranks whose parent is ``launcher``, in order: forked, or programs of their own."""
    try:
        return [child for child in children_of(launcher) if _is_rank(Path("/proc", str(child)))]
    except (FileNotFoundError, ProcessLookupError):  # one of them has just ended, its file perhaps open already
        return []


def children_of(parent: int) -> list[int]:
    """Processes that the main thread of ``parent`` has started, in order."""
    try:
        return [*map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _is_rank(child: Path) -> bool:
    program = (child / "cmdline").read_bytes()
    return (child / "comm").read_text().startswith("train-") or b"-m\0wlb.training" in program


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_asked_to_end(pid: int) -> bool:
    """Whether a SIGTERM waits for ``pid``, which is stopped."""
    (pending,) = re.findall(r"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


def stands_still(pid: int, seconds: float = 0.3) -> bool:
    """Whether the main thread of ``pid`` sleeps for so long: it waits for something that does not come by itself."""
    before = _scheduling(pid)
    time.sleep(seconds)
    return before == _scheduling(pid) and before[0].endswith("S (sleeping)")


def _scheduling(pid: int) -> list[str]:
    """The state of the main thread, and how often it was given a core."""
    lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
    return [line for line in lines if line.startswith("State:") or "ctxt_switches" in line]


def said(err: str) -> Sequence[str]:
    """What a job wrote to stderr, without progress, greeting and warnings."""
    passed_over = ("step ", "starting ", "resuming ", "wlb: warning: ")
    return [line for line in err.splitlines() if line and not line.startswith(passed_over)]
