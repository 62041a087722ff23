"""A job that hangs ends by itself and says which rank is missing; the faults are real."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.cases import in_turn
from tests.limits import HUNG_SECONDS
from tests.training.jobs import write_config
from tests.training.processes import ranks
from wlb.training.failures import HungError, TrainingError
from wlb.training.watchdog import (
    Activity,
    Pulse,
    backend_timeout,
    describe_hang,
    time_outs_are_hangs,
)

LIMIT = 3.0


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("stop", "rank 1 does not answer (stopped, or its machine is gone); rank 0 waits in "),
        ("spin", "rank 1 is in no collective but in spin (tests/training/faulty_rank.py:"),
    ],
)
def test_the_rank_that_others_wait_for_is_named(folder, fault, verdict):
    config = write_config(folder, parallel={"dp": 2}, training={"steps": 100_000})
    with ranks(2, "-m", "tests.training.faulty_rank", fault, "1", "3", str(LIMIT), config) as (waiting, missing):
        _, err = waiting.communicate()
        if fault != "stop":
            missing.communicate()
            assert missing.returncode == 124
    assert waiting.returncode == 124
    (line,) = [line for line in err.splitlines() if "error:" in line]
    assert line.startswith(f"wlb: error: no progress for {LIMIT:g} s (training.timeout_seconds): {verdict}")
    assert "rank 0 waits in all_gather (torch/distributed/distributed_c10d.py:" in line
    assert "called from gathered_rows (wlb/runtime/collectives.py:" in line
    assert line.endswith("step 4")


def test_the_verdict_puts_those_who_are_missing_first():
    here, there = Activity(True, "all_reduce (a.py:1)", 7), Activity(True, "all_gather (b.py:2)", 8)
    busy = Activity(False, "read (c.py:3)", 7)
    assert describe_hang({0: here, 1: here, 2: busy, 4: there}, 6, 5.0) == (
        "no progress for 5 s (training.timeout_seconds): ranks 3, 5 do not answer (stopped, or its machine is gone); "
        "rank 2 is in no collective but in read (c.py:3), step 7; ranks 0, 1 wait in all_reduce (a.py:1), step 7; "
        "rank 4 waits in all_gather (b.py:2), step 8"
    )
    many = "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 48 more do not answer"
    assert many in describe_hang({}, 64, 5.0)


def wait_for_a_rank() -> None:
    store, limit = dist.HashStore(), timedelta(seconds=HUNG_SECONDS)
    with ThreadPoolExecutor(2) as pool:
        rank, _ = pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), range(2))
    options = dist.AllreduceOptions()
    options.timeout = timedelta(milliseconds=10)
    rank.allreduce([torch.zeros(1)], options).wait()  # type: ignore[attr-defined]  # torch's stubs leave it out


def wait_for_the_store() -> None:
    dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).wait(["verdict"], timedelta(milliseconds=10))


@pytest.mark.parametrize("wait", [wait_for_a_rank, wait_for_the_store])
def test_a_backend_that_gives_up_waiting_has_found_a_hang(wait):
    pulse = Pulse()
    pulse.begin(7)
    verdict = f"no progress for 0.01 s: rank 0 waited in {wait.__name__} (training/"
    with pytest.raises(HungError) as raised, time_outs_are_hangs(LIMIT, pulse):
        wait()
    assert str(raised.value).startswith(verdict)
    assert re.search(r", step 7: (Timed out waiting|wait timeout after) 10ms", str(raised.value))


def test_a_backend_that_gives_up_after_the_jobs_time_names_the_setting():
    milliseconds = int(backend_timeout(LIMIT).total_seconds() * 1000)
    with pytest.raises(HungError) as raised, time_outs_are_hangs(LIMIT, Pulse()):
        raise RuntimeError(f"[/pytorch/gloo/buffer.cc:81] Timed out waiting {milliseconds}ms for send operation")
    assert str(raised.value).startswith("no progress for 3 s (training.timeout_seconds): rank 0 waited in ")
    assert f", step 0: Timed out waiting {milliseconds}ms for send operation; ranks were" in str(raised.value)


@in_turn("error", [RuntimeError("Connection closed by peer"), TrainingError("timed out"), TimeoutError()])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as raised, time_outs_are_hangs(LIMIT, Pulse()):
        raise error
    assert raised.value is error
