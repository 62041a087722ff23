"""A process of a test that crashes leaves its core and its stack, and a rank the result that it had."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cores import KEPT
from tests.training.distributed import run_ranks


def _crash_at_the_end(folder: Path) -> int:
    os.chdir(folder)
    if dist.get_rank() == 1:
        dist.destroy_process_group = os.abort  # type: ignore[assignment]
    return dist.get_rank()


def test_a_rank_that_crashes_while_it_leaves_has_its_result_and_a_core(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no other test looks for the cores of its own processes
    monkeypatch.setattr("tests.cores.shutil.which", lambda _: None)  # gdb takes seconds
    with pytest.warns(UserWarning, match=r"rank 1 left its process group with exit code -6") as warned:
        assert run_ranks(2, _crash_at_the_end, tmp_path) == [0, 1]
    if Path("/proc/sys/kernel/core_pattern").read_text() == "core\n":
        (core,) = KEPT.glob("*")
        assert f"its core is kept in {core.absolute()}\n" in str(warned[0].message)
