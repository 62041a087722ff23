"""With ``parallel.dp = "auto"`` a job goes on with fewer machines when one is lost, and with more when it returns."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

import pytest

from tests.training.jobs import VOCABULARY, read_steps, write_config, write_store
from tests.training.processes import is_listening, process, reserved_port, steps_written, wait_until
from wlb.errors import UserError
from wlb.job.config_file import load_config
from wlb.job.job import Job
from wlb.job.planner import StepPlanner
from wlb.training.worker import dp_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_elastic.sh"
PATIENCE = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=8"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(
        tmp_path,
        parallel={"dp": "auto"},
        training={"steps": 100_000},  # it is ended when it has been seen on one machine and on two again
        checkpoint={"dir": str(tmp_path / "checkpoints"), "every": 5},
    )


class Listener:
    """What processes have said on stderr so far.

    Only rank 0 speaks, and torchrun makes it of the agent with the lowest process id, which is not the one that was
    started first where the system has begun to count again.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def listen_to(self, listened_to: subprocess.Popen[str]) -> None:
        assert listened_to.stderr is not None
        threading.Thread(target=self._listen, args=(listened_to.stderr,), daemon=True).start()

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.append(line)


def test_a_job_outlives_a_machine_and_takes_it_back(tmp_path: Path, config: Path) -> None:
    store = write_store(tmp_path / "store", shards=12)
    said = Listener()

    @contextmanager
    def agent(port: int) -> Iterator[subprocess.Popen[str]]:
        arguments = (f"localhost:{port}", "1:2", "1", config)
        with process(EXAMPLE, *arguments, program="bash", PYTHON=sys.executable, RDZV_CONF=PATIENCE) as started:
            said.listen_to(started)
            yield started

    with reserved_port() as port, agent(port):
        wait_until(lambda: is_listening(port))  # or the other machine may hold the store of both
        with agent(port) as other:
            wait_until(lambda: "on 2 cpu processes" in said.text)
            seen = steps_written(tmp_path)
            wait_until(lambda: steps_written(tmp_path) >= max(seen, 7))
            os.killpg(other.pid, signal.SIGKILL)  # the agent and its rank: the machine is gone
        heard = len(said.text)
        wait_until(lambda: "on 1 cpu process" in said.text[heard:])
        after = steps_written(tmp_path)
        wait_until(lambda: steps_written(tmp_path) > after + 5)
        heard = len(said.text)
        with agent(port):
            wait_until(lambda: "on 2 cpu processes" in said.text[heard:])
            after = steps_written(tmp_path)
            wait_until(lambda: steps_written(tmp_path) > after + 3)
    rows = read_steps(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    job = Job.from_config(load_config(config, auto_dp=partial(dp_of, 1)), "cpu", vocab_size=VOCABULARY)
    uninterrupted = islice(StepPlanner(job, store.lengths), len(rows))
    assert [row["document_ids"] for row in rows] == [list(step.documents) for step in uninterrupted]


def test_dp_follows_from_the_processes(config: Path) -> None:
    assert load_config(config, auto_dp=partial(dp_of, 4)).parallel.dp == 4
    assert load_config(config, ["parallel.tp=2"], auto_dp=partial(dp_of, 4)).parallel.dp == 2
    with pytest.raises(UserError, match=r"3 processes were started, no multiple of pp x cp x tp = 2"):
        load_config(config, ["parallel.cp=2"], auto_dp=partial(dp_of, 3))
    of_three = partial(Job.from_config, hardware="cpu", vocab_size=VOCABULARY)
    assert of_three(load_config(config, auto_dp=partial(dp_of, 3))).layout.dp == 3
    with pytest.raises(UserError, match=r"must be a multiple of parallel\.dp = 3"):
        of_three(load_config(config, ["packing.method=sequential"], auto_dp=partial(dp_of, 3)))
    with pytest.raises(UserError, match=r"give a number: --set parallel\.dp=N"):
        load_config(config)
    with pytest.raises(UserError, match=r"parallel\.tp = .x.: must be a whole number"):
        load_config(config, ["parallel.tp=x"], auto_dp=partial(dp_of, 2))
