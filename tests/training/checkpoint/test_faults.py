"""Real faults of disks and files: what the user reads, and that the job goes on exactly as long as it can."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.programs import finished, forked
from tests.training.checkpoint.mounted import FORBIDDEN
from tests.training.distributed import RankFailure, run_ranks
from tests.training.jobs import job, read_steps, trainer_of, write_config, write_store
from tests.training.processes import said, steps_written, wait_until
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.training.checkpoint.files import HIDDEN, complete_checkpoints

CPU = torch.device("cpu")
_LARGEST_FILE = 20_000  # bytes, less than a rank's share of a checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_store(tmp_path / "store")
    return tmp_path


def checkpoints_every(steps: int, folder: Path, **settings: object) -> dict[str, object]:
    return {"dir": str(folder / "checkpoints"), "every": steps, **settings}


def steps_saved(folder: Path) -> list[int]:
    assert not list((folder / "checkpoints").glob(f"{HIDDEN}*"))
    return [int(path.name[5:]) for path in complete_checkpoints(folder / "checkpoints")]


def train_where(mount: str, folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    """Train after ``mount``, a shell command on the directory of checkpoints ``$1``; then list it on stdout."""
    directory = folder / "checkpoints"
    directory.mkdir()
    done = finished("-m", "tests.training.checkpoint.mounted", mount, directory, "train", config)
    if done.returncode == FORBIDDEN:
        pytest.skip("this system lets nobody mount")
    return done


def test_a_disk_without_room_for_one_checkpoint_ends_the_job_at_the_first(folder):
    config = write_config(folder, checkpoint=checkpoints_every(2, folder))
    done = train_where('mount -t tmpfs -o size=64k tmpfs "$1"', folder, config)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line == (
        f"wlb: error: the checkpoint of step 2 could not be written to {folder / 'checkpoints'}: No space left on "
        "device (rank 0); mend that or choose another checkpoint.dir, and start again"
    )
    assert [row["step"] for row in read_steps(folder)] == [1, 2]
    assert done.stdout.split() == [".lock"]


def test_a_disk_that_fills_up_ends_the_job_only_at_its_end(folder):
    config = write_config(folder, parallel={"dp": 2}, checkpoint=checkpoints_every(2, folder, keep=9))
    done = train_where('mount -t tmpfs -o size=500k tmpfs "$1"', folder, config)
    assert done.returncode == 1, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("wlb: warning: the checkpoint")]
    assert len(warnings) == 2
    for step, line in zip((4, 6), warnings, strict=True):
        assert f"checkpoint of step {step} could not be written" in line
        assert "No space left on device (rank " in line
        assert line.endswith("; the newest one is still step-00000002")
    assert done.stderr.count("wlb: error: the checkpoint of step 6 could not be written") == 1
    assert [row["step"] for row in read_steps(folder)] == [1, 2, 3, 4, 5, 6]
    assert done.stdout.split() == [".lock", "step-00000002"]


def test_a_read_only_directory_is_named_before_anything_starts(folder):
    config = write_config(folder, checkpoint=checkpoints_every(2, folder))
    done = train_where('mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"', folder, config)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"wlb: error: checkpoint.dir {folder / 'checkpoints'} cannot be written: Read-only file system"
    ]


def _train_with_small_files(config: JobConfig, steps: range, said: Path) -> None:
    """Rank 1 alone cannot write large files during ``steps``."""
    sys.stderr = said.open("a", encoding="utf-8", buffering=1)
    trainer = trainer_of(config)
    for step in trainer.steps():
        if dist.get_rank() == 1:
            largest = _LARGEST_FILE if step + 1 in steps else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))


def test_training_goes_on_after_a_checkpoint_that_one_rank_cannot_write(folder):
    checkpoint = checkpoints_every(2, folder, keep=9, asynchronous=False)
    config = job(folder, parallel={"dp": 2}, checkpoint=checkpoint)
    run_ranks(2, _train_with_small_files, config, range(3, 6), folder / "said")
    assert steps_saved(folder) == [2, 6]
    (line,) = [line for line in (folder / "said").read_text().splitlines() if "could not be written" in line]
    assert "checkpoint of step 4" in line
    assert line.endswith("File too large (rank 1); the newest one is still step-00000002")


@pytest.mark.parametrize("first", [1, 3])
def test_the_last_checkpoint_must_be_written(folder, first):
    config = job(folder, parallel={"dp": 2}, checkpoint=checkpoints_every(2, folder))
    with pytest.raises(
        RankFailure, match=r"checkpoint of step \d could not be .*: File too large \(rank 1\); mend that"
    ):
        run_ranks(2, _train_with_small_files, config, range(first, 9), folder / "said")
    assert steps_saved(folder) == ([2] if first == 3 else [])
    assert len(read_steps(folder)) == (6 if first == 3 else 2)


def _train_and_die_while_writing(config: JobConfig) -> None:
    for step in trainer_of(config).steps():
        if step == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _train(config: JobConfig) -> None:
    trainer_of(config).run()


def test_a_rank_killed_while_checkpoints_are_written_costs_nothing(folder, tmp_path_factory):
    straight = tmp_path_factory.mktemp("straight")
    write_store(straight / "store")
    run_ranks(2, _train, job(straight, parallel={"dp": 2}, checkpoint=checkpoints_every(2, straight)))
    config = job(folder, parallel={"dp": 2}, checkpoint=checkpoints_every(2, folder))
    with pytest.raises(RankFailure):
        run_ranks(2, _train_and_die_while_writing, config)
    run_ranks(2, _train, config)
    expected, actual = read_steps(straight), read_steps(folder)
    for key in ("step", "loss", "grad_norm", "document_ids"):
        assert [row[key] for row in actual] == [row[key] for row in expected], key
    assert steps_saved(folder) == [4, 6]


def test_a_store_that_may_not_be_read_is_named(folder):
    index = folder / "store.idx"
    index.chmod(0)
    try:
        if os.geteuid() == 0:
            os.seteuid(65534)  # nobody: root may read everything
        with pytest.raises(UserError, match=r"store\.idx cannot be read: Permission denied"):
            TokenStore.open(folder / "store")
    finally:
        os.seteuid(os.getuid())


def _train_without_store(config: JobConfig) -> None:
    for step in trainer_of(config).steps():
        if step == 2:
            for suffix in (".bin", ".idx"):
                Path(str(config.data.store)).with_suffix(suffix).unlink()


def test_a_store_removed_while_it_is_read_is_missed(folder):
    config = job(folder, training={"steps": 100}, checkpoint=checkpoints_every(3, folder))
    with pytest.raises(RankFailure, match=r"UserError: .*store\.idx changed while it was in use: .*, now it is gone"):
        run_ranks(1, _train_without_store, config)
    with pytest.raises(RankFailure, match=r"store\.idx does not exist"):
        run_ranks(1, _train, config)


def test_a_store_truncated_while_it_is_read_is_named(folder):
    """By the rank that notices, or where that was killed as it read what is no longer there, by the launcher."""
    config = write_config(folder, training={"steps": 100_000}, checkpoint=checkpoints_every(2, folder))
    with forked("-m", "wlb", "train", config) as process:
        wait_until(lambda: steps_written(folder) >= 3)
        os.truncate(folder / "store.bin", 100)
        _, err = process.communicate()
    assert process.returncode == 2
    (line,) = said(err)
    assert "store.bin changed while it was in use" in line or "store.bin has 100 bytes where its index asks for" in line
