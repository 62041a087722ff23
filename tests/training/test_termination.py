"""SIGTERM, sent as schedulers send it: the job saves the step it is in and leaves, all ranks at the same step."""

import os
import signal

import pytest

from tests.limits import HUNG_SECONDS
from tests.programs import forked
from tests.training.jobs import endless, read_steps
from tests.training.processes import is_running, process, ranks_of, steps_written, wait_until
from wlb.training.checkpoint.files import complete_checkpoints, step_of
from wlb.training.process import Terminated, Termination, signals_to_end


@pytest.mark.parametrize(
    ("to", "asked"),
    [
        ("launcher", signal.SIGHUP),  # a terminal that is closed
        # A rank asks the others as the launcher's signal makes every one of them ask.
        pytest.param("rank 1", signal.SIGTERM, marks=pytest.mark.exhaustive),
    ],
)
def test_a_terminated_job_saves_the_step_it_is_in(folder, to, asked):
    config = endless(folder, every=10_000)
    with forked("-m", "wlb", "train", config) as job:
        wait_until(lambda: steps_written(folder) >= 3)
        ranks = ranks_of(job.pid)
        os.kill(job.pid if to == "launcher" else ranks[1], asked)
        _, err = job.communicate()
    last = read_steps(folder)[-1]["step"]
    lines = [line for line in err.splitlines() if line.startswith("wlb: ")]
    (checkpoint,) = complete_checkpoints(folder / "checkpoints")
    assert step_of(checkpoint) == last
    kept = f"the same command continues from the newest checkpoint in {checkpoint.parent}, if there is one"
    assert lines == [f"wlb: terminated after step {last}; {kept}"]
    assert f"\ntrained to step {last}: " in err
    assert f"\nnext: wlb report {folder / 'metrics'}\n" in err
    assert not any(is_running(rank) for rank in ranks)
    assert job.returncode == 143
    assert "Traceback" not in err


def test_a_signal_to_all_processes_of_a_job_is_one_to_the_job(folder):
    """As SLURM sends it; the server that forks the ranks hears it as well."""
    with process("-m", "wlb", "train", endless(folder, every=10_000)) as job:
        wait_until(lambda: steps_written(folder) >= 3)
        os.killpg(job.pid, signal.SIGTERM)
        _, err = job.communicate()
    last = read_steps(folder)[-1]["step"]
    assert (job.returncode, err.count("wlb: terminated")) == (143, 1)
    assert f"wlb: terminated after step {last}; the same command continues from the newest checkpoint in " in err
    assert "c10d" not in err  # the ranks' store outlives them


def test_when_the_grace_time_is_over_the_job_leaves_unsaved(folder):
    config = endless(folder, dp=1, every=10_000, grace_seconds=1.0)
    with forked("-m", "tests.training.faulty_rank", "sleep", "0", "3", config) as job:
        wait_until(lambda: steps_written(folder) >= 3)
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate()
    assert job.returncode == 143
    assert (
        "wlb: terminated: training.grace_seconds = 1 was too short to finish the step and save it; "
        f"the same command continues from the newest checkpoint in {folder / 'checkpoints'}, if there is one"
    ) in err
    assert complete_checkpoints(folder / "checkpoints") == []


@pytest.mark.parametrize(
    ("grace_seconds", "message"),
    [
        (None, "terminated before the first step"),
        (0.0, "training.grace_seconds = 0 was too short"),
        (HUNG_SECONDS, "terminated: a rank hung and there was no way to finish the step"),
    ],
)
def test_a_rank_without_time_says_why(monkeypatch, grace_seconds, message):
    def leave(error: Exception) -> None:
        raise error

    monkeypatch.setattr("wlb.training.process.leave", leave)
    monkeypatch.setattr(signal, "sigwait", lambda _: signal.SIGTERM)
    termination = Termination()
    if grace_seconds is not None:
        termination.allow(grace_seconds, "")
    if grace_seconds:
        termination.hung.set()
    with pytest.raises(Terminated, match=message):
        termination._answer({signal.SIGTERM})


def test_a_job_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signals_to_end() - {signal.SIGINT} == {
            signal.SIGTERM
        }  # what was started in the background has no SIGINT
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signals_to_end() - {signal.SIGINT} == {signal.SIGTERM, signal.SIGHUP}
    finally:
        signal.signal(signal.SIGHUP, before)
