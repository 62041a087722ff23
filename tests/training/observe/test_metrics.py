"""steps.jsonl holds every step once, whatever happened to its writers: what a killed job left is cut off."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.terminal import Terminal
from wlb.documents.segments import Segment
from wlb.job.config import MetricsConfig
from wlb.training.failures import TrainingError
from wlb.training.observe.metrics import MetricsWriter, continue_file, last_step_in, live_line, sparkline

ROW: dict[str, Any] = {
    "step": 1,
    "loss": 2.5,
    "grad_norm": 1.0,
    "learning_rate": 1e-3,
    "tokens": 100,
    "documents": 3,
    "step_seconds": 0.5,
    "tokens_per_second": 200.0,
    "imbalance_degree": 1.1,
    "token_delay": 0.0,
    "data_wait_seconds": 0.0,
    "planning_seconds": 0.001,
    "pending_documents": 12,
    "mfu": 0.25,
    "imbalance": {
        "cp": {"predicted": 1.0, "measured": 1.0},
        "dp": {"predicted": 1.02, "measured": 1.051},
        "pp": {"predicted": 1.1, "measured": None},
    },
    "slow_ranks": (),
    "document_ids": (4, 7, 9),
}


def config(folder: Path, tensorboard: bool = False) -> MetricsConfig:
    return MetricsConfig(dir=folder, tensorboard=tensorboard, document_ids=True)


def write(folder: Path, last_step: int, steps: range) -> None:
    writer = MetricsWriter(config(folder), last_step)
    for step in steps:
        writer.write(ROW | {"step": step})
    writer.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_the_first_step_without_labels_is_reported(tmp_path, capsys):
    writer = MetricsWriter(config(tmp_path), 0)
    for step, labelled in enumerate((None, 3, 0, 0), 1):
        writer.write(ROW | {"step": step, "loss_tokens": labelled})
    writer.close()
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert "step 3 has no labelled token among its 100" in said


def test_a_line_holds_the_metrics_as_soon_as_it_is_written(tmp_path):
    writer = MetricsWriter(config(tmp_path), 0)
    writer.write(ROW)
    row = json.loads((tmp_path / "steps.jsonl").read_text())
    assert row == json.loads(json.dumps(ROW))
    writer.write(ROW | {"step": 2, "document_ids": None})
    writer.write(ROW | {"step": 3, "segments": (Segment(4, 0, 60), Segment(9, 128, 40))})
    writer.close()
    _, without, audited = map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines())
    assert not {"document_ids", "segments"} & without.keys()
    assert audited["segments"] == [[4, 0, 60], [9, 128, 40]]


def test_a_new_job_sets_an_older_file_aside(tmp_path):
    write(tmp_path, 0, range(1, 4))
    write(tmp_path, 0, range(1, 3))
    write(tmp_path, 0, range(1, 2))
    assert steps_in(tmp_path / "steps.jsonl") == [1]
    assert steps_in(tmp_path / "steps.1.jsonl") == [1, 2, 3]
    assert steps_in(tmp_path / "steps.2.jsonl") == [1, 2]


def test_scalars_reach_tensorboard(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = MetricsWriter(config(tmp_path, tensorboard=True), 0)
    writer.write(ROW)
    writer.close()
    events = reading.EventAccumulator(str(tmp_path))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {"loss", "tokens_per_second", "mfu", "pending_documents", "imbalance/pp/predicted"} <= names
    assert not {"step", "document_ids", "imbalance/pp/measured"} & names  # the last was not measured
    assert events.Scalars("loss")[0].value == 2.5
    assert events.Scalars("imbalance/dp/measured")[0].value == pytest.approx(1.051)


def test_the_live_line_shows_dimensions_that_have_several_ranks():
    assert live_line(ROW) == (
        "step 1  loss 2.5000  200 tokens/s  0.50 s  imbalance 1.100  delay 0.00  mfu 25.0%  data wait 0%  12 pending"
        "  dp 1.02/1.05"
    )
    assert live_line(ROW, pooled=True).endswith("  pools 1.02/1.05")


@given(st.integers(1, 200))
def test_a_narrow_terminal_goes_without_whole_fields(columns):
    fields = live_line(ROW).split("  ")
    prefixes = ["  ".join(fields[:shown]) for shown in range(1, len(fields) + 1)]
    assert live_line(ROW, columns) == max([fields[0], *(line for line in prefixes if len(line) <= columns)], key=len)


def test_steps_stay_on_a_terminal_and_the_run_ends_in_what_it_came_to(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    writer = MetricsWriter(config(tmp_path), 0)
    assert not [*writer.closing_lines()]
    for step, loss in enumerate((4.0, math.nan, 3.0, 1.0), 1):
        writer.write(ROW | {"step": step, "loss": loss})
    shown = [line.removeprefix("\r\x1b[K") for line in terminal.getvalue().split("\n")[:-1]]
    assert [line.split("  ")[1] for line in shown] == ["loss 4.0000", "loss nan", "loss 3.0000", "loss 1.0000"]
    assert max(map(len, shown)) <= 80
    expected = {"steps": 4, "last_step": 4, "tokens": 400, "documents": 12, "median_step_seconds": 0.5}
    assert expected.items() <= writer.summary().items()
    assert [*writer.closing_lines()] == [
        "trained to step 4: 400 tokens in 2.0 s, 200 tokens/s",
        "loss 4.0000 to 1.0000  █▆▁",
    ]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_a_sparkline_is_short_and_reaches_from_the_least_to_the_largest(losses):
    bars = sparkline(losses)
    assert len(bars) == min(len(losses), 40)
    assert set(bars) <= set("▁▂▃▄▅▆▇█")
    assert "▁" in bars


def test_a_skipped_step_is_valid_json_and_says_so(tmp_path):
    writer = MetricsWriter(config(tmp_path, tensorboard=True), 0)
    writer.write(ROW | {"loss": math.nan, "grad_norm": math.inf})
    writer.close()
    row = json.loads((tmp_path / "steps.jsonl").read_text(), parse_constant=pytest.fail)
    assert (row["loss"], row["grad_norm"], row["skipped"]) == (None, None, True)
    assert writer.summary()["last_loss"] is None


def test_a_full_disk_is_told_in_one_line(tmp_path):
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(config(tmp_path), 0)
    with pytest.raises(TrainingError, match=r"step 1: .*steps\.jsonl cannot be written: No space left on device"):
        writer.write(ROW)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 14), st.integers(0, 60))
def test_a_file_ends_with_the_step_of_the_checkpoint(paddings, last_step, torn_off):
    rows = [json.dumps({"step": step, "ids": "x" * size}) + "\n" for step, size in enumerate(paddings, 1)]
    whole = "".join(rows)
    left = whole[: max(len(whole) - torn_off, len("".join(rows[:last_step])))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        path.write_text(left)
        note = continue_file(path, last_step)
        expected = "".join(rows[:last_step])
        assert path.read_text() == expected
        assert last_step_in(path) == min(last_step, len(rows))
        assert (note is None) == (left == expected)


def test_continuing_reads_the_end_of_a_long_file_only(tmp_path):
    path = tmp_path / "steps.jsonl"
    with path.open("wb") as file:
        file.seek(1 << 40)  # a hole: a terabyte that takes no space, and forever to read
        file.write(b'\n{"step": 7}\n{"step": 8}\n')
    assert continue_file(path, 7) == f"{path} goes back to step 7, later lines removed: 1"
    assert last_step_in(path) == 7
