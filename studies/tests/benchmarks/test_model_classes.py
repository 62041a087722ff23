"""The benchmark of model classes gives every model the same GPUs, window and global batch."""

import json
from pathlib import Path

import pytest

from studies.benchmarks import model_classes


def test_every_model_trains_as_much_on_the_same_gpus():
    jobs = [model_classes.job_of(model, system) for model in model_classes.CLASSES for system in model_classes.SYSTEMS]
    assert {(job.layout.world_size, job.global_batch, job.context_window) for job in jobs} == {(256, 16, 131_072)}


def test_a_row_says_what_balancing_gains(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "classes.json"
    assert model_classes.main(["--models", "mistral-7b", "--steps", "1", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["models"]
    assert 0 < row["attention_share"] < 0.5
    assert row["speed"]["balanced"] > 1
    assert row["weights"] == row["active"] > 7
    assert f"{row['speed']['balanced']:.2f}x" in capsys.readouterr().out


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert model_classes.main(["--models", "gpt-9"]) == 2
    assert capsys.readouterr().err.startswith("model classes benchmark: error: unknown model 'gpt-9'; choose from tiny")
