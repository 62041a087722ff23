"""Forked ranks are as programs of their own would be, and where none can be forked they are that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (the process in which nothing is forked)

from tests.limits import HUNG_SECONDS
from tests.training.jobs import write_config, write_store
from tests.training.processes import ignore_nothing, process, ranks_of, said, steps_written, wait_until
from wlb.training.fork_server import ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")

# As the launcher, which has handlers, files and memory that are none of a rank's business, starts ranks in both ways.
LAUNCHER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from unittest import mock
from wlb.training import fork_server, worker
from wlb.training.runtime.termination import signals_to_end

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

worker.main, fork_server.require = rank, require
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
    signal.signal(number, lambda *_: None)
os.set_inheritable(os.open("/dev/zero", os.O_RDONLY), True)
arguments, environment = ["job.toml", "--json"], os.environ | {"RANK": "7", "OMP_NUM_THREADS": "3"}
with fork_server.ForkServer() as server:
    server.start()
    print("written once")
    statuses = [ended(server.fork(arguments, environment)) for _ in range(2)]
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


def test_a_job_whose_fork_server_is_gone_restarts_with_new_programs(tmp_path):
    write_store(tmp_path / "store")
    checkpoint = {"dir": str(tmp_path / "checkpoints"), "every": 10_000}
    config = write_config(tmp_path, training={"steps": 100_000}, checkpoint=checkpoint)
    with process("-m", "wlb", "train", config) as job:
        wait_until(lambda: steps_written(tmp_path) >= 2)
        (tmp_path / "metrics" / "steps.jsonl").unlink()
        children = map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())
        for child in sorted(children, key=ranks_of(job.pid).count):  # the server, then the rank
            os.kill(child, signal.SIGKILL)
        wait_until(lambda: steps_written(tmp_path) >= 2)
        (rank,) = ranks_of(job.pid)
        assert b"-m\0wlb.training\0" in Path(f"/proc/{rank}/cmdline").read_bytes()
        job.terminate()
        _, err = job.communicate()
    assert job.returncode == 143, err
    restarted, terminated = said(err)
    assert "was killed by SIGKILL; restarting from the first step" in restarted
    assert terminated.startswith("wlb: terminated after step")


def test_nothing_is_forked_from_a_process_that_may_have_used_torch():
    with ForkServer() as server:
        server.start()
        assert server.fork([], {}) is None


CLOSED = """
import sys, types
from wlb.training import fork_server
sys.modules |= dict.fromkeys(("wlb.training.trainer", "wlb.training.worker"), types.ModuleType("imported"))
fork_server.require = lambda *_: None
with fork_server.ForkServer() as server:
    server.start()
    assert server._connection.fileno() > 2
"""


def test_the_server_ends_with_its_block_where_a_standard_stream_is_closed():
    command = [sys.executable, "-c", CLOSED]
    subprocess.run(command, check=True, preexec_fn=lambda: os.close(0), timeout=HUNG_SECONDS)
