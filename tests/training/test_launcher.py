"""Whole jobs, started as a user starts them: what is written, and how they end when something goes wrong."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from tests.programs import Program, finished, forked
from tests.training.checkpoint.fakes import damage, write_checkpoint
from tests.training.distributed import run_ranks
from tests.training.jobs import VOCABULARY, endless, job, read_steps, train, write_config
from tests.training.processes import (
    children_of,
    is_asked_to_end,
    is_running,
    process,
    ranks_of,
    said,
    steps_written,
    wait_until,
)
from wlb.documents.store.reader import TokenStoreWriter
from wlb.job.config_file import load_config
from wlb.training import launcher
from wlb.training.checkpoint.files import complete_checkpoints, step_of
from wlb.training.process import Ending

PARALLEL = {"dp": 2}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "wlb.training")


def started(*arguments: str | Path) -> AbstractContextManager[Program]:
    return forked("-m", "wlb", "train", *arguments)


def test_train_writes_metrics_and_a_summary(folder):
    config = write_config(folder, parallel=PARALLEL)
    with started(config, "--json", "--set", "training.steps=4") as job:
        out, err = job.communicate()
    assert job.returncode == 0, err
    rows = read_steps(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    summary = json.loads(out)
    assert summary["steps"] == 4
    assert summary["tokens"] == sum(row["tokens"] for row in rows)
    assert summary["last_loss"] == rows[-1]["loss"]
    assert summary["pending_documents"] > 0
    assert [line.split()[1] for line in err.splitlines() if line.startswith("step ")] == ["1", "2", "3", "4"]


def test_a_killed_launcher_leaves_no_rank_and_resuming_loses_nothing(folder):
    config = endless(folder)
    with process("-m", "wlb", "train", config) as job:
        wait_until(lambda: steps_written(folder) >= 7)
        ranks = [rank for server in children_of(job.pid) for rank in children_of(server)]
        assert len(ranks) == 2
        job.kill()
        wait_until(lambda: not any(is_running(rank) for rank in ranks))
    before = {row["step"]: row["document_ids"] for row in read_steps(folder)}
    newest = step_of(complete_checkpoints(folder / "checkpoints")[-1])
    with started(config, "--set", "training.steps=12", "--json") as resumed:
        for stream in (resumed.stdout, resumed.stderr):
            stream.close()  # nobody reads what the job says any more
        assert resumed.wait() == 0
    rows = read_steps(folder)
    assert [row["step"] for row in rows] == list(range(1, max(newest, 12) + 1))
    for row in rows:
        assert row["document_ids"] == before.get(row["step"], row["document_ids"])
    trained = [document for row in rows for document in row["document_ids"]]
    assert len(trained) == len(set(trained))


def test_a_killed_rank_ends_a_job_without_checkpoints(folder):
    with started(write_config(folder, parallel=PARALLEL, training={"steps": 100_000})) as job:
        wait_until(lambda: steps_written(folder) >= 3)
        rank = ranks_of(job.pid)[1]
        os.kill(rank, signal.SIGKILL)
        _, err = job.communicate()
    assert (job.returncode, said(err)) == (1, [f"wlb: error: rank 1 (process {rank}) was killed by SIGKILL"])


def test_a_store_that_is_overwritten_ends_the_job_and_is_in_no_checkpoint(folder):
    """When the store is put back, the job goes on as if nothing had happened."""
    config, tokens = endless(folder, every=2), (folder / "store.bin").read_bytes()
    settings = ["--set", "training.lr_schedule=constant"]  # others depend on the number of steps
    with started(config, *settings) as job:
        wait_until(lambda: steps_written(folder) >= 3)
        with (folder / "store.bin").open("r+b") as file:
            file.write(bytes(len(tokens)))
        _, err = job.communicate()
    assert job.returncode == 2
    (line,) = said(err)
    assert line.startswith(f"wlb: error: {folder / 'store.bin'} changed while it was in use: it had ")
    before = read_steps(folder)
    (folder / "store.bin").write_bytes(tokens)
    settings += ["--set", f"training.steps={len(before) + 3}"]
    assert finished("-m", "wlb", "train", config, *settings).returncode == 0
    apart = [f"{name}.dir={folder / 'uninterrupted' / name}" for name in ("metrics", "checkpoint")]
    run_ranks(2, train, load_config(config, [*settings[1::2], *apart]))
    continued, uninterrupted = read_steps(folder), read_steps(folder / "uninterrupted")
    assert len(continued) == len(uninterrupted)
    for rows in (before, continued):
        assert [row["loss"] for row in rows] == [row["loss"] for row in uninterrupted[: len(rows)]]


def test_ctrl_c_ends_the_job_in_good_order(folder):
    with started(endless(folder)) as job:
        wait_until(lambda: steps_written(folder) >= 7)
        ranks = ranks_of(job.pid)
        assert len(ranks) == 2
        os.killpg(job.pid, signal.SIGINT)  # Ctrl-C reaches every process of a terminal
        _, err = job.communicate()
    assert job.returncode == 130
    last = read_steps(folder)[-1]["step"]
    newest = max((folder / "checkpoints").glob("step-*[0-9]"))
    kept = f"the same command continues from the newest checkpoint in {newest.parent}, if there is one"
    assert said(err)[-2:] == [f"wlb: terminated after step {last}; {kept}", "wlb: interrupted"]
    assert step_of(newest) == last
    assert "Traceback" not in err
    assert not any(is_running(rank) for rank in ranks)


def test_ranks_do_not_outlive_torchrun(folder):
    with forked(*TORCHRUN, endless(folder)) as job:
        wait_until(lambda: len(ranks_of(job.pid)) == 2)
        ranks = ranks_of(job.pid)
        job.kill()
        wait_until(lambda: not any(is_running(rank) for rank in ranks))


def test_under_torchrun_a_mistake_of_the_user_comes_without_our_calls(folder):
    with forked(*TORCHRUN, endless(folder, dp=1)) as job:
        _, err = job.communicate()
    assert "UserError: 2 processes were started, but parallel.* asks for 1" in err
    assert "wlb/training" not in err.replace(str(folder), "")


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_job_that_is_terminated_while_it_starts_says_so(folder, ranks):
    """It waits for its store: in the check before the start, or in its ranks."""
    sidecar = folder / "store.json"
    content = sidecar.read_text()
    sidecar.unlink()
    os.mkfifo(sidecar)  # who reads it waits until somebody writes
    with started(endless(folder)) as process:
        if ranks:
            sidecar.write_text(content)
        wait_until(lambda: len(ranks_of(process.pid) if ranks else children_of(process.pid)) >= max(ranks, 1))
        process.terminate()
        _, err = process.communicate()
    assert (process.returncode, err) == (143, "wlb: terminated before the first step\n")


def test_a_job_that_is_terminated_between_its_ranks_starts_says_so(folder, monkeypatch, capsys):
    """Torch's engine has started some ranks and not yet noted any, so it ends none of them; the launcher does."""
    from torch.distributed.elastic.multiprocessing import MultiprocessContext, SignalException

    start, others = MultiprocessContext._start, {*multiprocessing.active_children()}
    begun: list[BaseProcess] = []

    def started(context: MultiprocessContext) -> None:
        context.entrypoint = lambda *_: signal.pause()  # a rank that waits, as for a store that is slow
        start(context)
        begun.extend({*multiprocessing.active_children()} - others)
        context._pc = None  # as before torch's start comes back: another thread may take the signal in the midst of it
        raise SignalException("terminated", signal.SIGTERM)

    monkeypatch.setattr(MultiprocessContext, "_start", started)
    monkeypatch.setattr(launcher, "START_METHOD", "fork")
    assert launcher.launch(load_config(endless(folder))) == 143
    assert capsys.readouterr().err == "wlb: terminated before the first step\n"
    (rank,) = begun  # of the check before the start
    rank.join(30)
    assert rank.exitcode == -signal.SIGKILL


def test_a_killed_job_that_cannot_start_again_says_why_at_once(folder):
    """A rank that reads what is no longer in a file is killed, and only the next start would say what is wrong."""
    with started(endless(folder)) as process:
        wait_until(lambda: steps_written(folder) >= 7)
        ranks = ranks_of(process.pid)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)  # or it might notice, and say so itself
        os.truncate(folder / "store.bin", 100)
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: is_asked_to_end(ranks[0]))
        os.kill(ranks[0], signal.SIGKILL)  # or the launcher would give it 30 seconds
        _, err = process.communicate()
    killed, mistake = said(err)
    assert process.returncode == 2
    assert killed.startswith(f"wlb: error: rank 1 (process {ranks[1]}) was killed by SIGKILL; restarting from step ")
    assert mistake.startswith("wlb: error: ")
    assert "store.bin has 100 bytes, but its index asks for" in mistake


class Ranks:
    """Stands in for the processes of a job: a check that passes, and ranks that are killed or hang each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, progress: Sequence[int], ending: Ending) -> None:
        monkeypatch.setattr(launcher, "_run", self._run)
        self._folder, self._progress, self._ending, self.starts = folder, iter(progress), ending, 0

    def _run(self, processes: int, *_: object) -> Ending | None:
        if processes == 1:
            return None
        self.starts += 1
        if step := next(self._progress, 0):
            write_checkpoint(self._folder, step)
        return self._ending


KILLED = Ending("rank 1 was killed", 1, restart=True)


@pytest.mark.parametrize(
    ("progress", "ending", "resume", "starts"),
    [
        ([], KILLED, True, 4),  # three restarts without a checkpoint
        ([0, 0, 10], KILLED, True, 6),  # a newer checkpoint counts, the same one again does not
        ([10, 0, 0, 20], KILLED, True, 7),
        ([], KILLED, False, 1),
        ([], Ending("rank 1: a mistake", 2), True, 1),
    ],
)
def test_restarts_are_counted_between_checkpoints(progress, ending, resume, starts, tmp_path, monkeypatch, capsys):
    config = job(tmp_path, parallel=PARALLEL, checkpoint={"dir": str(tmp_path / "checkpoints"), "resume": resume})
    ranks = Ranks(monkeypatch, tmp_path / "checkpoints", progress, ending)
    assert launcher._train(config, summary=False) == ending.status
    assert ranks.starts == starts
    assert capsys.readouterr().err.splitlines()[-1] == ending.text


@pytest.mark.parametrize("damaged", ["flipped", "truncated", "manifest.json"])
def test_a_damaged_checkpoint_is_neither_named_nor_progress(tmp_path, damaged, capsys):
    config = job(tmp_path, checkpoint={"dir": str(tmp_path)}).checkpoint
    assert launcher._step_to_continue_from(config) == 0
    damage(write_checkpoint(tmp_path, 30), damaged)
    write_checkpoint(tmp_path, 10)
    assert launcher._step_to_continue_from(config) == 10
    damage(tmp_path / "step-00000010", damaged)
    assert launcher._step_to_continue_from(config) is None
    assert "all 2 checkpoints" in capsys.readouterr().err


def test_a_mistake_found_by_the_ranks_is_told_once(tmp_path):
    with TokenStoreWriter(tmp_path / "store", vocab_size=VOCABULARY) as writer:
        writer.add(np.zeros(1 << 20, np.int64))  # as many tokens as are looked at before the start
        for _ in range(20):
            writer.add([1, VOCABULARY - 1])
    (tmp_path / "store.json").unlink()  # so nothing says that tokens go up to 66, until they are read
    config = write_config(tmp_path, parallel=PARALLEL, model={"vocab_size": VOCABULARY - 1})
    with started(config) as process:
        out, err = process.communicate()
    assert process.returncode == 2
    assert out == ""
    assert err.count("wlb: error: token 66 is outside the vocabulary of model.vocab_size = 66") == 1
    assert err.count("error:") == 1
    assert "Traceback" not in err


def test_a_rank_without_arguments_says_what_is_missing():
    done = subprocess.run([sys.executable, "-m", "wlb.training"], capture_output=True, text=True)
    assert done.returncode == 2
    *_, line = done.stderr.splitlines()
    assert line.endswith("error: the following arguments are required: config")
