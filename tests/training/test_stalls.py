"""A job that hangs ends by itself and says which rank is missing; the faults are real."""

import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from tests.cases import in_turn
from tests.limits import HUNG_SECONDS
from tests.programs import forked
from tests.training.faulty_rank import FOREVER
from tests.training.jobs import endless, read_steps, write_config
from tests.training.processes import ranks, said
from wlb.training import stalls
from wlb.training.process import HungError, Termination, TrainingError
from wlb.training.stalls import record_flight, stalls_named

LIMIT = f"wlb: error: step {{}} did not end within training.timeout_seconds = {HUNG_SECONDS:g} s: rank 1 "
STOPPED = "does not answer (stopped, or its machine is gone)"


def test_a_rank_that_is_stopped_while_a_checkpoint_is_written_is_named(folder):
    """The threads that write wait for each other much longer."""
    config = endless(folder, every=2)
    with ranks(2, "-m", "tests.training.faulty_rank", "stop-writing", "1", "2", config) as (waiting, _):
        _, err = waiting.communicate()
    assert waiting.returncode == 124
    assert said(err) == [f"{LIMIT.format(2)}{STOPPED}"]


# A rank that is busy is named in the test of NCCL, and easier to end than one that is stopped.
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        pytest.param("spin", r"is in spin \(faulty_rank.py:\d+\)", id="spin", marks=pytest.mark.exhaustive),
        pytest.param("stop", re.escape(STOPPED), id="stop"),
    ],
)
def test_a_job_that_hung_goes_on_without_waiting_for_the_grace_time(folder, fault, found):
    config = endless(folder, every=2, grace_seconds=FOREVER, steps=6)
    with forked("-m", "tests.training.faulty_rank", fault, "1", "3", "train", config) as job:
        _, err = job.communicate()
    assert job.returncode == 0
    (line,) = (line for line in said(err) if "error:" in line)
    assert re.fullmatch(rf"{re.escape(LIMIT.format(4))}{found}; restarting from step 2, 1 of 3 .*", line)
    assert [row["step"] for row in read_steps(folder)] == [1, 2, 3, 4, 5, 6]


def test_nccl_names_the_rank_before_it_ends_the_process(folder):
    config = write_config(folder, parallel={"dp": 2}, training={"steps": 100_000})
    with ranks(2, "-m", "tests.training.faulty_rank", "spin-nccl", "1", "3", config) as (waiting, _):
        _, err = waiting.communicate()
    assert waiting.returncode == 124
    (line,) = said(err)
    limit = "step 4 did not end within training.timeout_seconds = "
    assert re.fullmatch(rf"wlb: error: {limit}\d+ s: rank 1 is in spin \(faulty_rank.py:\d+\)", line)


def test_only_what_nccl_has_not_ended_is_waited_for(monkeypatch):
    ended: dict[str, object] = {"time_created_ns": 1, "timeout_ms": 1, "state": "scheduled", "retired": True}
    entries = [ended, ended | {"retired": False, "state": "completed"}, ended | {"retired": False, "state": "started"}]
    monkeypatch.setattr(
        _distributed_c10d, "_dump_nccl_trace", lambda *_: pickle.dumps({"entries": entries}), raising=False
    )
    assert stalls._unfinished() == entries[2:]
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", lambda *_: pickle.dumps({}))  # recorder off
    assert stalls._unfinished() == []


def wait_for_a_rank() -> None:
    store, limit = dist.HashStore(), timedelta(seconds=HUNG_SECONDS)
    with ThreadPoolExecutor(2) as pool:
        rank, _ = pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), range(2))
    options = dist.AllreduceOptions()
    options.timeout = timedelta(milliseconds=10)
    rank.allreduce([torch.zeros(1)], options).wait()  # type: ignore[attr-defined]  # torch's stubs leave it out


def wait_for_the_store() -> None:
    dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).wait(["verdict"], timedelta(milliseconds=10))


@pytest.fixture
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("wait", [wait_for_a_rank, wait_for_the_store])
def test_a_backend_that_gives_up_waiting_has_found_a_hang(wait):
    termination = Termination()
    termination.step = 7
    verdict = "step 7 did not end within training.timeout_seconds = 3 s: all ranks wait in collectives: they were "
    with pytest.raises(HungError, match=verdict), stalls_named(3.0, termination):
        wait()


@pytest.mark.usefixtures("_alone")
@in_turn("error", [RuntimeError("Connection closed by peer"), TrainingError("timed out"), TimeoutError()])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as raised, stalls_named(3.0, Termination()):
        raise error
    assert raised.value is error


def test_nccl_records_its_last_collectives_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr("wlb.training.stalls.os.environ", environment := {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"})
    record_flight(tmp_path)
    assert environment == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight_",
    }
