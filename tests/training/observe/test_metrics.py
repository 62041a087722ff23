"""steps.jsonl holds every step once, whatever happened to its writers: what a killed job left is cut off."""

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.job.config import MetricsConfig
from wlb.training import observe
from wlb.training.observe import MetricsFiles, continue_file
from wlb.training.process import TrainingError

ROW: dict[str, Any] = {
    "step": 1,
    "loss": 2.5,
    "slowest_rank": {"predicted": 1.02, "measured": 1.051},
    "rank_seconds": [0.1, 0.2],
    "document_ids": [4, 7, 9],
}
EVALUATION = {"step": 1, "loss": None, "buckets": {"1-255": {"loss": 3.5}, "256+": {"loss": None}}}


def write(folder: Path, last_step: int, steps: range) -> None:
    files = MetricsFiles(MetricsConfig(dir=folder, tensorboard=False), last_step)
    for step in steps:
        files.write("steps", ROW | {"step": step})
    files.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_new_job_sets_an_older_file_aside(tmp_path):
    write(tmp_path, 0, range(1, 4))
    write(tmp_path, 0, range(1, 3))
    write(tmp_path, 0, range(1, 2))
    assert steps_in(tmp_path / "steps.jsonl") == [1]
    assert steps_in(tmp_path / "steps.1.jsonl") == [1, 2, 3]
    assert steps_in(tmp_path / "steps.2.jsonl") == [1, 2]


def test_a_resumed_job_goes_back_to_its_checkpoint(tmp_path, capfd):
    write(tmp_path, 0, range(1, 6))
    (tmp_path / "evaluation.jsonl").write_text('{"step": 2}\n{"step": 4}\n')
    assert MetricsFiles(MetricsConfig(dir=tmp_path, tensorboard=False), 3).evaluated == 2
    assert steps_in(tmp_path / "steps.jsonl") == [1, 2, 3]
    assert "steps.jsonl goes back to step 3, later lines removed: 2" in capfd.readouterr().err


def test_scalars_reach_tensorboard(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    files = MetricsFiles(MetricsConfig(dir=tmp_path), 0)
    files.write("steps", ROW)
    files.write("evaluation", EVALUATION)
    assert json.loads((tmp_path / "steps.jsonl").read_text()) == ROW  # at once
    files.close()
    events = reading.EventAccumulator(str(tmp_path))
    events.Reload()
    names = {"loss", "slowest_rank/predicted", "slowest_rank/measured", "evaluation/buckets/1-255/loss"}
    assert set(events.Tags()["scalars"]) == names
    assert events.Scalars("slowest_rank/measured")[0].value == pytest.approx(1.051)


def test_a_full_disk_is_told_in_one_line(tmp_path):
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    files = MetricsFiles(MetricsConfig(dir=tmp_path, tensorboard=False), 0)
    with pytest.raises(TrainingError, match=r"step 1: .*steps\.jsonl cannot be written: No space left on device"):
        files.write("steps", ROW)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 14), st.integers(0, 60))
def test_a_file_ends_with_the_step_of_the_checkpoint(paddings, last_step, torn_off):
    rows = [json.dumps({"step": step, "ids": "x" * size}) + "\n" for step, size in enumerate(paddings, 1)]
    whole = "".join(rows)
    left = whole[: max(len(whole) - torn_off, len("".join(rows[:last_step])))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        path.write_text(left)
        with mock.patch.object(observe, "tell") as tell:
            last = continue_file(path, last_step)
        expected = "".join(rows[:last_step])
        assert path.read_text() == expected
        assert last == min(last_step, len(rows))
        assert tell.called == (left != expected)


def test_continuing_reads_the_end_of_a_long_file_only(tmp_path, capfd):
    path = tmp_path / "steps.jsonl"
    with path.open("wb") as file:
        file.seek(1 << 40)  # a hole: a terabyte that takes no space, and forever to read
        file.write(b'\n{"step": 7}\n{"step": 8}\n')
    assert continue_file(path, 7) == 7
    assert capfd.readouterr().err == f"{path} goes back to step 7, later lines removed: 1\n"
