"""A job that hangs ends by itself and says which rank is missing; the faults are real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.jobs import write_config, write_store
from tests.training.processes import SECONDS, ranks
from wlb.training.watchdog import Report, describe_hang

LIMIT = 3.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_store(tmp_path / "store")
    return tmp_path


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("stop", "rank 1 does not answer (stopped, or its machine is gone); rank 0 waits in "),
        ("sleep", "rank 1 is in no collective but in sleep (tests/training/faulty_rank.py:"),
        ("spin", "rank 1 is in no collective but in spin (tests/training/faulty_rank.py:"),
    ],
)
def test_the_rank_that_others_wait_for_is_named(folder, fault, verdict):
    config = write_config(folder, parallel={"dp": 2}, training={"steps": 100_000, "timeout_seconds": LIMIT})
    with ranks(2, "-m", "tests.training.faulty_rank", fault, "1", "3", config) as (waiting, missing):
        _, err = waiting.communicate(timeout=SECONDS)
        if fault != "stop":
            missing.communicate(timeout=SECONDS)
            assert missing.returncode == 124
    assert waiting.returncode == 124
    (line,) = [line for line in err.splitlines() if "error:" in line]
    assert line.startswith(f"wlb: error: no progress for {LIMIT:g} s (training.timeout_seconds): {verdict}")
    assert "rank 0 waits in all_gather (torch/distributed/distributed_c10d.py:" in line
    assert "called from gathered_rows (wlb/training/agreement.py:" in line
    assert line.endswith("step 4")


def test_the_verdict_puts_those_who_are_missing_first():
    here, there = Report(True, "all_reduce (a.py:1)", 7), Report(True, "all_gather (b.py:2)", 8)
    busy = Report(False, "read (c.py:3)", 7)
    assert describe_hang({0: here, 1: here, 2: busy, 4: there}, 6, 5.0) == (
        "no progress for 5 s (training.timeout_seconds): ranks 3, 5 do not answer (stopped, or its machine is gone); "
        "rank 2 is in no collective but in read (c.py:3), step 7; ranks 0, 1 wait in all_reduce (a.py:1), step 7; "
        "rank 4 waits in all_gather (b.py:2), step 8"
    )


def test_many_ranks_are_abbreviated():
    line = describe_hang({}, 64, 5.0)
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 48 more do not answer" in line
