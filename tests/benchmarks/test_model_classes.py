"""The benchmark of model classes gives every model the same GPUs, window and global batch."""

import importlib
import sys
from pathlib import Path

import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("model_classes")
    sys.modules.pop("model_classes")


def test_every_model_trains_as_much_on_the_same_gpus(benchmark):
    jobs = [benchmark.job_of(model, system) for model in benchmark.CLASSES for system in benchmark.SYSTEMS]
    assert {(job.layout.world_size, job.global_batch, job.context_window) for job in jobs} == {(256, 16, 131_072)}


def test_a_row_says_what_balancing_gains(benchmark, capsys):
    row = benchmark.row_of("mistral-7b", steps=1)
    assert 0 < row["attention_share"] < 0.5
    assert row["speed"]["best"] > 1
    assert row["weights"] == row["active"] > 7e9
    Console(width=160).print(benchmark.table_of([row]))
    assert f"{row['speed']['elastic']:.2f}x" in capsys.readouterr().out


def test_an_unknown_model_is_one_line(benchmark, capsys):
    assert benchmark.main(["--models", "gpt-9"]) == 2
    assert capsys.readouterr().err.startswith(
        "model classes benchmark: error: unknown model 'gpt-9'; choose one of tiny"
    )
