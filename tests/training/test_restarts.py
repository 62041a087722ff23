"""A job whose ranks are killed goes on as if nothing had happened, as long as it gets anywhere."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.programs import forked
from tests.training.checkpoint.test_checkpointer import damage, fake_checkpoint
from tests.training.checkpoint.test_files import write_checkpoint
from tests.training.jobs import read_steps, write_config, write_store
from tests.training.processes import (
    is_running,
    process,
    ranks_of,
    reserved_port,
    said,
    stands_still,
    steps_written,
    wait_until,
)
from tests.training.soak import soak
from wlb.job.config import JobConfig
from wlb.training.launcher import Restarts
from wlb.training.runtime.watchdog import backend_timeout

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_two_nodes.sh"


def configure(directory: Path | None, most: int = 2, resume: bool = True) -> JobConfig:
    return JobConfig.model_validate(
        {
            "data": {"store": "s"},
            "training": {"max_restarts": most},
            "checkpoint": {"dir": directory, "resume": resume},
        }
    )


def test_restarts_are_counted_between_checkpoints(tmp_path):
    restarts = Restarts(configure(tmp_path))
    assert restarts.take() == "the first step, as there is no checkpoint yet"
    fake_checkpoint(tmp_path, 10)
    assert restarts.take() == "checkpoint step-00000010"
    assert restarts.left == 1
    assert restarts.take()
    assert restarts.take() is None
    assert restarts.refusal == "there was no newer checkpoint since the last restart, and no restart is left"
    fake_checkpoint(tmp_path, 20)
    assert restarts.take() == "checkpoint step-00000020"


@pytest.mark.parametrize("damaged", ["flipped", "truncated", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_neither_named_nor_progress(tmp_path, damaged):
    """Newer ones than the job continues from are progress, also where they are older than the damaged one."""
    write_checkpoint(tmp_path, 10)
    damage(write_checkpoint(tmp_path, 30), damaged)
    restarts = Restarts(configure(tmp_path, most=1))
    for step in (10, 12, 14):
        write_checkpoint(tmp_path, step)
        assert restarts.take() == f"checkpoint step-{step:08d}"
    damage(tmp_path / "step-00000014", damaged)
    assert restarts.take() is None


def test_without_a_usable_checkpoint_the_job_is_not_restarted(tmp_path):
    restarts = Restarts(configure(tmp_path))
    damage(write_checkpoint(tmp_path, 10), "truncated")
    assert restarts.take() is None
    assert restarts.refusal is not None
    assert "none of the 1 checkpoints" in restarts.refusal


@pytest.mark.parametrize(("most", "resume"), [(0, True), (2, False)])
def test_a_job_that_may_not_continue_is_not_restarted(tmp_path, most, resume):
    restarts = Restarts(configure(tmp_path, most, resume))
    assert restarts.take() is None
    assert restarts.refusal is None


def test_a_job_without_checkpoints_is_not_restarted():
    assert Restarts(configure(None)).take() is None


# test_watchdog has each of the two hangs, test_launcher that ranks which found one are started again, the kills below
# that a job goes on after it. This is all of it together, and has to let a time limit pass that busy machines keep.
@pytest.mark.exhaustive
def test_a_job_that_is_suspended_starts_again_and_ends_where_it_gets_nowhere(tmp_path):
    """First all of it stands still, as in a machine that is paused; then one rank does not come back."""
    limit = 30.0  # on a busy machine ranks start some seconds apart
    write_store(tmp_path / "store")
    config = write_config(
        tmp_path,
        parallel={"dp": 2},
        training={"steps": 100_000, "max_restarts": 1, "timeout_seconds": limit},
        checkpoint={"dir": str(tmp_path / "checkpoints"), "every": 10_000},
    )
    with forked("-m", "wlb", "train", config) as job:
        wait_until(lambda: steps_written(tmp_path) >= 2)
        first_rank, second_rank = ranks_of(job.pid)
        os.kill(second_rank, signal.SIGSTOP)
        wait_until(lambda: stands_still(first_rank))  # in a collective, where it waits for the other
        for pid in (first_rank, job.pid):
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / "metrics" / "steps.jsonl").unlink()
        time.sleep(backend_timeout(limit).total_seconds())
        for pid in (job.pid, first_rank):
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not is_running(first_rank))  # it finds its time over, before the other can answer
        with suppress(ProcessLookupError):  # the launcher may have killed it by now
            os.kill(second_rank, signal.SIGCONT)
        wait_until(lambda: steps_written(tmp_path) >= 2)
        ranks = ranks_of(job.pid)
        os.kill(ranks[1], signal.SIGSTOP)
        _, err = job.communicate()
    assert job.returncode == 124
    first, last = said(err)
    assert re.fullmatch(
        r"wlb: no progress for 30 s \(training.timeout_seconds\): rank 0 waited in \w+ \(.*\), step \d+: "
        r"Timed out waiting \d+ms for \w+ operation to complete; ranks were suspended, or cannot reach each other; "
        r"restarting from the first step, as there is no checkpoint yet, restarts left: 0",
        first,
    )
    assert last.startswith("wlb: error: no progress for 30 s (training.timeout_seconds): rank 1 does not answer")
    assert last.endswith("there was no newer checkpoint since the last restart, and no restart is left")
    assert not any(is_running(rank) for rank in ranks)


# Every preset restarts alike; that elastic resumes with the same bits, test_checkpointer proves without kills.
@pytest.mark.parametrize(
    ("kills", "preset"),
    [
        (2, "best"),
        pytest.param(6, "best", marks=pytest.mark.exhaustive),
        pytest.param(2, "elastic", marks=pytest.mark.exhaustive),
    ],
)
def test_kills_at_random_moments_change_nothing(tmp_path, kills, preset):
    report = soak(tmp_path, kills=kills, seed=1, preset=preset, documents=30 * kills)
    assert not report.differences, report
    assert report.kills.total() >= kills - 1


@pytest.mark.exhaustive  # test_elastic_machines kills one, too
def test_two_nodes_survive_a_kill_on_one_of_them(tmp_path):
    """Two torchrun agents on this machine, each with one process of a job, started as on two machines."""
    write_store(tmp_path / "store")
    config = write_config(
        tmp_path,
        parallel={"dp": 2},
        training={"steps": 40},
        checkpoint={"dir": str(tmp_path / "checkpoints"), "every": 5},
    )
    with ExitStack() as stack:
        endpoint = f"localhost:{stack.enter_context(reserved_port())}"
        agent = partial(process, EXAMPLE, endpoint, "1", config, program="bash", PYTHON=sys.executable)
        one, other = (stack.enter_context(agent()) for _ in range(2))
        wait_until(lambda: steps_written(tmp_path) >= 7)
        os.kill(ranks_of(other.pid)[0], signal.SIGKILL)
        for node in (one, other):
            _, err = node.communicate()
            assert node.returncode == 0, err
    rows = read_steps(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 41))
    trained = [document for row in rows for document in row["document_ids"]]
    assert len(trained) == len(set(trained))
