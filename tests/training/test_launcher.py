"""Whole jobs, started as a user starts them: what is written, and how they end when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from shlex import quote

import numpy as np
import pytest

from tests.limits import HUNG_SECONDS
from tests.programs import Program, finished, forked
from tests.training.jobs import VOCABULARY, read_steps, write_config, write_store
from tests.training.processes import children_of, is_running, process, ranks_of, said, steps_written, wait_until
from wlb.documents.store.reader import TokenStoreWriter
from wlb.job.config import JobConfig
from wlb.job.config_file import load_config
from wlb.training import launcher as launch_module
from wlb.training.checkpoint.files import complete_checkpoints, step_of
from wlb.training.forks import Forks
from wlb.training.runtime.failures import Ending

PARALLEL = {"dp": 2}
COMMANDS = {
    "wlb": ("-m", "wlb", "train"),
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "wlb.training"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_store(tmp_path / "store")
    return tmp_path


def endless(folder: Path, dp: int = 2) -> Path:
    return write_config(
        folder,
        parallel={"dp": dp},
        training={"steps": 100_000},
        checkpoint={"dir": str(folder / "checkpoints"), "every": 5},
    )


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


@pytest.mark.parametrize(
    ("launcher", "steps"),
    [
        # Once steps run there is more that can notice.
        pytest.param("wlb", 1, marks=pytest.mark.exhaustive),
        ("wlb", 0),
        ("torchrun", 0),
    ],
)
def test_ranks_do_not_outlive_their_launcher(folder, launcher, steps):
    config = endless(folder)
    with forked(*COMMANDS[launcher], config) as job:
        wait_until(lambda: len(ranks_of(job.pid)) == 2 and steps_written(folder) >= steps)
        ranks = ranks_of(job.pid)
        job.kill()
        wait_until(lambda: not any(is_running(rank) for rank in ranks))


@contextmanager
def stuck_job(folder: Path, *, checked: bool) -> Iterator[Program]:
    """A job that waits for its store: in the check before the start, or where it was ``checked``, in its ranks.

    The sidecar is a pipe, and who reads it waits until somebody writes.
    """
    sidecar = folder / "store.json"
    content = sidecar.read_text()
    sidecar.unlink()
    os.mkfifo(sidecar)
    with started(endless(folder)) as process:
        if checked:
            sidecar.write_text(content)
        yield process


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_job_that_is_terminated_while_it_starts_says_so(folder, ranks):
    with stuck_job(folder, checked=ranks > 0) as process:
        wait_until(lambda: len(ranks_of(process.pid) if ranks else children_of(process.pid)) >= max(ranks, 1))
        process.terminate()
        _, err = process.communicate()
    assert (process.returncode, err) == (143, "wlb: terminated before the first step\n")


def test_a_check_that_is_killed_is_no_mistake_of_the_user(folder):
    with stuck_job(folder, checked=False) as process:
        wait_until(lambda: len(children_of(process.pid)) == 1)
        os.kill(children_of(process.pid)[0], signal.SIGKILL)
        _, err = process.communicate()
    (line,) = err.splitlines()
    assert process.returncode == 1
    assert line.startswith("wlb: error: the process that checks the job was killed by SIGKILL; free memory")


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
        config = JobConfig.model_validate(
            {
                "data": {"store": "s"},
                "parallel": {"dp": len(self._commands)},
                "packing": {"micro_batches": len(self._commands)},
                "training": {"grace_seconds": 0.0},
            }
        )
        ending = launch_module._run_ranks(config, (), self._request, Forks())
        assert not any(is_running(process.pid) for process in self.processes)
        return ending

    def _start(self, *_: object, rank: int, error_file: Path) -> subprocess.Popen[bytes]:
        record = f"""record() {{ echo '{{"message": {{"message": "'$1'"}}}}' > {quote(str(error_file))}; }}"""
        self.processes.append(
            subprocess.Popen(["sh", "-c", f"{record}; {self._commands[rank]}"], start_new_session=True)
        )
        return self.processes[-1]


def test_a_job_whose_ranks_all_end_well_has_ended_well(monkeypatch):
    assert Script("exit 0", "sleep 0.3").run(monkeypatch) is None


@pytest.mark.parametrize("other", ["kill -STOP $$", "trap '' TERM; while :; do sleep 1; done"])
def test_a_rank_that_does_not_end_is_killed_when_another_has_failed(monkeypatch, other):
    ending = Script("record 'no progress'; exit 124", other).run(monkeypatch, last_words=0.2)
    assert ending is not None
    assert (ending.cause, ending.status, ending.restart) == ("no progress", 124, True)


@pytest.mark.parametrize(
    ("failure", "limit", "status"),
    [("record hung; exit 124", "last_words", 124), ("kill -KILL $$", "last_words", 1), ("exit 1", "lost_peer", 1)],
)
def test_the_others_have_longer_to_end_where_a_peer_may_have_been_killed(monkeypatch, failure, limit, status):
    ending = Script(failure, f"sleep {HUNG_SECONDS}; exit 2").run(monkeypatch, **{limit: 0.2})
    assert ending is not None
    assert ending.status == status  # and not that of a rank that had the time to end by itself


def test_ranks_that_end_by_themselves_after_another_are_heard(monkeypatch):
    script = Script("record 'lost a peer'; exit 1", "sleep 0.2; record 'correct the config'; exit 2")
    ending = script.run(monkeypatch, last_words=0.0)
    assert ending is not None
    assert (ending.text, ending.status) == ("correct the config", 2)


def test_where_one_rank_is_terminated_the_others_end_in_good_order(monkeypatch, tmp_path):
    ready = quote(str(tmp_path / "ready"))
    other = f"trap 'record saved; exit 143' TERM; touch {ready}; while :; do sleep 0.1; done"
    ending = Script(f"until [ -e {ready} ]; do sleep 0.1; done; exit 143", other).run(monkeypatch)
    assert ending is not None
    assert (ending.cause, ending.status, ending.restart) == ("saved", 143, False)


def test_ranks_that_pass_over_a_request_to_end_are_killed(monkeypatch, tmp_path):
    ready = tmp_path / "ready"
    script = Script(f"trap '' TERM; touch {quote(str(ready))}; kill -STOP $$")
    script.ask_when(ready.exists)
    ending = script.run(monkeypatch, beyond_grace=0.2)
    assert ending is not None
    assert ending.text.startswith(
        "wlb: terminated: not all ranks ended within 0.2 s, and were killed; nothing is saved without"
    )
    assert (ending.status, ending.restart) == (143, False)


class Interrupted(Script):
    """Ctrl-C comes when a rank runs and the launcher has yet to hear of it."""

    def _start(self, *arguments: object, rank: int, error_file: Path) -> subprocess.Popen[bytes]:
        process = super()._start(*arguments, rank=rank, error_file=error_file)
        signal.raise_signal(signal.SIGINT)
        return process


def test_what_ctrl_c_loses_without_a_checkpoint(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "steps.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')  # killed while it wrote
    without = load_config(write_config(tmp_path))
    assert launch_module._what_is_kept(without) == "nothing is saved without checkpoint.dir; lost: 2 steps"
    config = load_config(write_config(tmp_path, checkpoint={"dir": str(tmp_path / "checkpoints"), "every": 5}))
    assert launch_module._what_is_kept(config) == "there is no checkpoint yet (checkpoint.every = 5); lost: 2 steps"


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


def test_a_vocabulary_that_is_too_small_is_found_before_the_start(folder):
    (folder / "store.json").unlink()
    done = finished("-m", "wlb", "train", write_config(folder, parallel=PARALLEL, model={"vocab_size": 10}))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "outside the vocabulary of model.vocab_size = 10; raise it" in line


def test_a_job_of_one_process_needs_no_launcher(folder):
    config = write_config(folder, training={"steps": 2})
    done = finished("-m", "wlb.training", config)
    assert done.returncode == 0, done.stderr
    assert len(read_steps(folder)) == 2


def test_a_second_job_keeps_off_the_files_of_the_first(folder):
    config = endless(folder, dp=1)
    with started(config) as first:
        wait_until(lambda: steps_written(folder) >= 1)
        with started(config) as second:
            _, err = second.communicate()
        assert first.poll() is None
    assert second.returncode == 2
    (line,) = err.splitlines()
    assert f"another job is writing to metrics.dir {folder / 'metrics'}" in line


def test_a_rank_without_arguments_says_what_is_missing_in_one_line():
    done = subprocess.run([sys.executable, "-m", "wlb.training"], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("wlb: error: the following arguments are required: config")
