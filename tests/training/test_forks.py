"""Forked ranks are as programs of their own would be, and where none can be forked they are that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch  # noqa: F401  (the process in which nothing is forked)

from tests.limits import HUNG_SECONDS
from tests.training.processes import ignore_nothing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")

# As the launcher, which has handlers, files and memory that are none of a rank's business, starts ranks in both ways.
LAUNCHER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from unittest import mock
from wlb.training import forks, worker
from wlb.training.termination import signals_to_end

FACTS = '''
import json, os, sys
from pathlib import Path
status = dict(line.split(":\\t") for line in Path("/proc/self/status").read_text().splitlines())
facts = {
    "signals": [status[name][-8:] for name in ("SigBlk", "SigIgn", "SigCgt")],  # the C library has others, for threads
    "threads": status["Threads"],
    "files": [file for file in os.listdir("/proc/self/fd") if Path("/proc/self/fd", file).exists()],
    "limits": Path("/proc/self/limits").read_text(),
    "arguments": sys.argv[1:],
    "variables": {name: os.environ.get(name) for name in ("RANK", "OMP_NUM_THREADS")},
    "parent": os.getppid(),
    "leads its session": os.getsid(0) == os.getpgid(0) == os.getpid(),
}
print(json.dumps(facts), flush=True)
'''

def rank():
    exec(FACTS, {})
    os.kill(os.getpid(), signal.SIGKILL)

def require(*_):
    import torch
    for name in ("is_available", "device_count", "init", "_lazy_init"):
        mock.patch.object(torch.cuda, name, side_effect=AssertionError("CUDA is used before ranks are forked")).start()

def ended(process):
    while process.poll() is None:
        time.sleep(0.01)
    return process.returncode

worker.main, forks.require = rank, require
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
    signal.signal(number, lambda *_: None)
os.set_inheritable(os.open("/dev/zero", os.O_RDONLY), True)
arguments, environment = ["job.toml", "--json"], os.environ | {"RANK": "7", "OMP_NUM_THREADS": "3"}
own = forks.Forks()
own.prepare()
print("written once")
started = [own.fork(arguments, environment) for _ in range(2)]
assert [os.getsid(rank.pid) for rank in started] == [rank.pid for rank in started]  # so that killpg reaches them
statuses = [*map(ended, started)]
mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals_to_end())
program = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)" + FACTS
ended(subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, start_new_session=True))
print(json.dumps([statuses, os.getpid()]))
"""


def test_a_forked_rank_is_like_a_program_of_its_own():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # NumPy has threads
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER], env=environment, capture_output=True, text=True, preexec_fn=ignore_nothing
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    lines.remove("written once")
    first, second, program, (statuses, launcher) = map(json.loads, lines)
    assert first == second == program
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL]
    assert program["parent"] == launcher
    assert program["leads its session"]
    assert program["threads"] == "1"
    assert sorted(program["files"]) == ["0", "1", "2"]


CALLS = """
import os, signal, sys, types
from wlb.errors import UserError
from wlb.training import forks
from wlb.training.failures import TrainingError
sys.modules |= dict.fromkeys(("wlb.training.trainer", "wlb.training.worker"), types.ModuleType("imported"))
forks.require = lambda *_: None

def raised(work):
    try:
        own.call(work)
    except Exception as error:
        return error

def mistaken():
    raise UserError("no such store")

class Odd(BaseException):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")

def odd():
    raise Odd(1, 2)

own = forks.Forks()
assert own.fork([], {}) is None  # it may not be safe
assert own.call(os.getpid) == os.getpid()
own.prepare()
assert os.path.samefile("/proc/self/fd/0", os.devnull)  # the closed one
assert own.call(os.getpid) != os.getpid()
assert repr(raised(mistaken)) == "UserError('no such store')"
assert "Odd: 1 and 2" in str(raised(odd))
killed = raised(lambda: os.kill(os.getpid(), signal.SIGKILL))
assert type(killed) is TrainingError  # and no mistake of the user
assert "the process that checks the job was killed by SIGKILL; free memory" in str(killed)
assert "exited with status 1 and no error message" in str(raised(lambda: lambda: None))  # which cannot be handed over
"""


def test_what_uses_torch_first_is_called_in_a_fork():
    command = [sys.executable, "-c", CALLS]
    subprocess.run(command, check=True, preexec_fn=lambda: os.close(0), timeout=HUNG_SECONDS)
