"""Real faults of disks and files: what the user reads, and that the job goes on exactly as long as it can."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.programs import finished
from tests.training.checkpoint.mounted import FORBIDDEN
from tests.training.distributed import RankFailure, run_ranks
from tests.training.jobs import job, read_steps, trainer_of, write_config
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.training.checkpoint.files import HIDDEN, complete_checkpoints

_LARGEST_FILE = 20_000  # bytes, less than a rank's share of a checkpoint


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
        "device (rank 0); correct that or choose another checkpoint.dir, and start again"
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
        f"wlb: error: checkpoint.dir {folder / 'checkpoints'} cannot be written; choose another checkpoint.dir"
    ]


def _train_with_small_files(config: JobConfig, steps: range, said: Path) -> None:
    """Rank 1 alone cannot write large files during ``steps``."""
    sys.stderr = said.open("a", encoding="utf-8", buffering=1)
    trainer = trainer_of(config)
    for step in trainer.steps():
        if dist.get_rank() == 1:
            largest = _LARGEST_FILE if step + 1 in steps else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))


@pytest.mark.parametrize("first", [1, 3])
def test_the_last_checkpoint_must_be_written(folder, first):
    config = job(folder, parallel={"dp": 2}, checkpoint=checkpoints_every(2, folder))
    with pytest.raises(
        RankFailure, match=r"checkpoint of step \d could not be .*: File too large \(rank 1\); correct that"
    ):
        run_ranks(2, _train_with_small_files, config, range(first, 9), folder / "said")
    assert steps_saved(folder) == ([2] if first == 3 else [])
    assert len(read_steps(folder)) == (6 if first == 3 else 2)


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
