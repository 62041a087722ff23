"""Whole jobs, started as a user starts them: what is written, and how they end when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from shlex import quote

import numpy as np
import pytest

from tests.limits import HUNG_SECONDS
from tests.programs import Program, finished, forked
from tests.training.checkpoint.fakes import damage, write_checkpoint
from tests.training.jobs import VOCABULARY, endless, read_steps, write_config
from tests.training.processes import children_of, is_running, process, ranks_of, said, steps_written, wait_until
from wlb.documents.store.reader import TokenStoreWriter
from wlb.job.config import JobConfig
from wlb.job.config_file import load_config
from wlb.training import launcher as launch_module
from wlb.training.checkpoint.files import complete_checkpoints, step_of
from wlb.training.failures import Ending
from wlb.training.forks import Forks

PARALLEL = {"dp": 2}
COMMANDS = {
    "wlb": ("-m", "wlb", "train"),
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "wlb.training"),
}


def started(*arguments: str | Path) -> AbstractContextManager[Program]:
    return forked("-m", "wlb", "train", *arguments)


def test_train_writes_metrics_and_a_summary(folder):
    config = write_config(folder, parallel=PARALLEL)
    with process("-m", "wlb", "train", config, "--json", "--set", "training.steps=4") as job:
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


def test_without_restarts_a_killed_rank_ends_the_job_and_resuming_loses_nothing(folder):
    config = endless(folder)
    with started(config, "--set", "training.max_restarts=0") as process:
        wait_until(lambda: steps_written(folder) >= 7)
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        _, err = process.communicate()
    assert process.returncode == 1
    (line,) = said(err)
    assert "rank 1" in line
    assert "was killed by SIGKILL; all ranks were stopped. Run the same command to continue" in line
    before = {row["step"]: row["document_ids"] for row in read_steps(folder)}
    newest = step_of(complete_checkpoints(folder / "checkpoints")[-1])
    with started(config, "--set", "training.steps=12", "--json") as process:
        for stream in (process.stdout, process.stderr):
            stream.close()  # nobody reads what the job says any more
        assert process.wait() == 0
    rows = read_steps(folder)
    assert [row["step"] for row in rows] == list(range(1, max(newest, 12) + 1))
    for row in rows:
        assert row["document_ids"] == before.get(row["step"], row["document_ids"])
    trained = [document for row in rows for document in row["document_ids"]]
    assert len(trained) == len(set(trained))


def test_a_store_that_is_overwritten_ends_the_job_and_is_in_no_checkpoint(folder):
    """When the store is put back, the job goes on as if nothing had happened."""
    config, tokens = endless(folder), (folder / "store.bin").read_bytes()
    settings = ["--set", "training.lr_schedule=constant"]  # others depend on the number of steps
    with started(config, *settings) as job:
        wait_until(lambda: steps_written(folder) >= 7)
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
    for name in ("metrics", "checkpoint"):
        settings += ["--set", f"{name}.dir={folder / 'uninterrupted' / name}"]
    assert finished("-m", "wlb", "train", config, *settings).returncode == 0
    continued, uninterrupted = read_steps(folder), read_steps(folder / "uninterrupted")
    assert len(continued) == len(uninterrupted)
    for rows in (before, continued):
        assert [row["loss"] for row in rows] == [row["loss"] for row in uninterrupted[: len(rows)]]


def test_ctrl_c_ends_the_job_at_once(folder):
    with started(endless(folder)) as process:
        wait_until(lambda: steps_written(folder) >= 7)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches every process of a terminal
        _, err = process.communicate()
    assert process.returncode == 130
    kept, last = err.splitlines()[-2:]
    assert last == "wlb: interrupted"
    newest = max((folder / "checkpoints").glob("step-*[0-9]"))
    lost = steps_written(folder) - int(newest.name.removeprefix("step-"))
    steps = "1 step" if lost == 1 else f"{lost} steps"
    assert kept == f"wlb: the same command continues from checkpoint {newest}; lost since then: {steps}"
    assert "Traceback" not in err
    assert not any(is_running(rank) for rank in ranks)


@pytest.mark.parametrize("launcher", COMMANDS)
def test_ranks_do_not_outlive_their_launcher(folder, launcher):
    config = endless(folder)
    with forked(*COMMANDS[launcher], config) as job:
        wait_until(lambda: len(ranks_of(job.pid)) == 2)
        ranks = ranks_of(job.pid)
        job.kill()
        wait_until(lambda: not any(is_running(rank) for rank in ranks))


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


def test_a_killed_job_that_cannot_start_again_says_why_at_once(folder):
    """A rank that reads what is no longer in a file is killed, and only the next start would say what is wrong."""
    with started(endless(folder)) as process:
        wait_until(lambda: steps_written(folder) >= 7)
        ranks = ranks_of(process.pid)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)  # or it might notice, and say so itself
        os.truncate(folder / "store.bin", 100)
        os.kill(rank, signal.SIGKILL)
        _, err = process.communicate()
    (line,) = said(err)
    assert (process.returncode, rank) == (2, ranks[1])
    assert line.startswith(f"wlb: error: rank 1 (process {rank}) was killed by SIGKILL, and the job cannot be started ")
    assert "store.bin has 100 bytes where its index asks for" in line


class Script:
    """Stands in for the ranks: shell commands, one a rank. ``record WORDS`` leaves words for the launcher."""

    def __init__(self, *commands: str) -> None:
        self._commands = commands
        self._request = launch_module._EndRequest()
        self.processes: list[subprocess.Popen[bytes]] = []

    def ask_when(self, ready: Callable[[], bool]) -> None:
        """Ask the job to end once it is ``ready``."""

        def ask() -> None:
            wait_until(ready)
            self._request.received = True

        threading.Thread(target=ask, daemon=True).start()

    def run(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> Ending | None:
        """How a job of these ranks ends; ``seconds`` are the launcher's limits by name, the others are long."""
        monkeypatch.setattr(launch_module, "_start", self._start)
        for limit in ("last_words", "lost_peer", "beyond_grace"):
            monkeypatch.setattr(launch_module, f"_{limit.upper()}_SECONDS", seconds.get(limit, HUNG_SECONDS))
        ranks = len(self._commands)
        sections = {"parallel": {"dp": ranks}, "packing": {"micro_batches": ranks}, "training": {"grace_seconds": 0.0}}
        config = JobConfig.model_validate({"data": {"store": "s"}, **sections})
        ending = launch_module._run_ranks(config, (), self._request, Forks())
        assert not any(is_running(process.pid) for process in self.processes)
        return ending

    def _start(self, *_: object, rank: int, error_file: Path) -> subprocess.Popen[bytes]:
        record = f"""record() {{ echo '{{"message": {{"message": "'$1'"}}}}' > {quote(str(error_file))}; }}"""
        self.processes.append(
            subprocess.Popen(["sh", "-c", f"{record}; {self._commands[rank]}"], start_new_session=True)
        )
        return self.processes[-1]


READY = "until [ -e ready ]; do sleep 0.1; done"


@pytest.mark.parametrize(
    ("ranks", "seconds", "expected"),
    [
        pytest.param(["exit 0", "sleep 0.3"], {}, None, id="all end well"),
        # A rank that does not end is killed when another has failed.
        (["record hung; exit 124", "kill -STOP $$"], {"last_words": 0.2}, ("hung", 124, True)),
        (
            ["record hung; exit 124", "trap '' TERM; while :; do sleep 1; done"],
            {"last_words": 0.2},
            ("hung", 124, True),
        ),
        # The others have longer to end where a peer may have been killed; their status is not the one of the job.
        (["kill -KILL $$", f"sleep {HUNG_SECONDS}; exit 2"], {"last_words": 0.2}, ("was killed by SIGKILL", 1, True)),
        (["exit 1", f"sleep {HUNG_SECONDS}; exit 2"], {"lost_peer": 0.2}, ("exited with status 1", 1, False)),
        # Ranks that end by themselves after another are heard.
        (["record lost; exit 1", "sleep 0.2; record mistake; exit 2"], {"last_words": 0.0}, ("mistake", 2, False)),
        # Where one rank is terminated the others end in good order.
        (
            [f"{READY}; exit 143", "trap 'record saved; exit 143' TERM; touch ready; while :; do sleep 0.1; done"],
            {},
            ("saved", 143, False),
        ),
    ],
)
def test_a_job_ends_as_its_ranks_do(monkeypatch, tmp_path, ranks, seconds, expected):
    monkeypatch.chdir(tmp_path)
    ending = Script(*ranks).run(monkeypatch, **seconds)
    if expected is None:
        assert ending is None
    else:
        assert ending is not None
        cause, *others = expected
        assert cause in ending.cause
        assert [ending.status, ending.restart] == others


def test_ranks_that_pass_over_a_request_to_end_are_killed(monkeypatch, tmp_path):
    ready = tmp_path / "ready"
    script = Script(f"trap '' TERM; touch {quote(str(ready))}; kill -STOP $$")
    script.ask_when(ready.exists)
    ending = script.run(monkeypatch, beyond_grace=0.2)
    assert ending is not None
    words = "wlb: terminated: not all ranks ended within 0.2 s, and were killed; nothing is saved without"
    assert ending.text.startswith(words)
    assert (ending.status, ending.restart) == (143, False)


def restarts_of(directory: Path | None, most: int = 2, resume: bool = True) -> launch_module.Restarts:
    sections = {"training": {"max_restarts": most}, "checkpoint": {"dir": directory, "resume": resume}}
    return launch_module.Restarts(JobConfig.model_validate({"data": {"store": "s"}, **sections}))


def test_restarts_are_counted_between_checkpoints(tmp_path):
    restarts = restarts_of(tmp_path)
    assert restarts.take() == "the first step, as there is no checkpoint yet"
    write_checkpoint(tmp_path, 10)
    assert restarts.take() == "checkpoint step-00000010"
    assert restarts.left == 1
    assert restarts.take()
    assert restarts.take() is None
    assert restarts.refusal == "there was no newer checkpoint since the last restart, and no restart is left"
    write_checkpoint(tmp_path, 20)
    assert restarts.take() == "checkpoint step-00000020"


@pytest.mark.parametrize("damaged", ["flipped", "truncated", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_neither_named_nor_progress(tmp_path, damaged):
    """Newer ones than the job continues from are progress, also where they are older than the damaged one."""
    damage(write_checkpoint(tmp_path, 30), damaged)
    restarts = restarts_of(tmp_path, most=1)
    for step in (10, 12, 14):
        write_checkpoint(tmp_path, step)
        assert restarts.take() == f"checkpoint step-{step:08d}"
    damage(tmp_path / "step-00000014", damaged)
    assert restarts.take() is None


def test_a_job_that_cannot_or_may_not_continue_is_not_restarted(tmp_path):
    for may_not in (restarts_of(tmp_path, most=0), restarts_of(tmp_path, resume=False), restarts_of(None)):
        assert (may_not.take(), may_not.refusal) == (None, None)
    damage(write_checkpoint(tmp_path, 10), "truncated")
    restarts = restarts_of(tmp_path)
    assert restarts.take() is None
    assert "none of the 1 checkpoints" in str(restarts.refusal)


def test_what_ctrl_c_loses_without_a_checkpoint(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "steps.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')  # killed while it wrote
    without = load_config(write_config(tmp_path))
    assert launch_module._what_is_kept(without) == "nothing is saved without checkpoint.dir; lost: 2 steps"
    config = load_config(write_config(tmp_path, checkpoint={"dir": str(tmp_path / "checkpoints"), "every": 5}))
    assert launch_module._what_is_kept(config) == "there is no checkpoint yet (checkpoint.every = 5); lost: 2 steps"


class Interrupted(Script):
    """Ctrl-C comes when a rank runs and the launcher has yet to hear of it."""

    def _start(self, *arguments: object, rank: int, error_file: Path) -> subprocess.Popen[bytes]:
        process = super()._start(*arguments, rank=rank, error_file=error_file)
        signal.raise_signal(signal.SIGINT)
        return process


def test_ctrl_c_while_ranks_start_leaves_none_of_them(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    script = Interrupted("sleep 1000", "sleep 1000")
    try:
        with pytest.raises(KeyboardInterrupt):
            script.run(monkeypatch)
        assert not any(is_running(process.pid) for process in script.processes)
    finally:
        signal.signal(signal.SIGINT, before)
        for process in script.processes:
            process.kill()


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


def test_a_rank_without_arguments_says_what_is_missing_in_one_line():
    done = subprocess.run([sys.executable, "-m", "wlb.training"], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("wlb: error: the following arguments are required: config")
