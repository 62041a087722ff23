"""The machine-readable outputs hold what they held before, on the smallest inputs that fill them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from tests.contract.json_keys import OUTPUTS
from tests.training.jobs import read_steps, write_config, write_store
from tests.training.observe.test_diagnosis import EVEN, diagnosis_of
from tests.training.observe.test_imbalance import rows_of
from wlb.cli.app import app
from wlb.job.config_file import load_config
from wlb.profiling.timing import Effort
from wlb.training.observe.diagnosis import FILE
from wlb.training.runtime.termination import Termination
from wlb.training.trainer import train

WINDOW = 4096
LENGTHS = f"synthetic:300:{WINDOW}:0"
STEP = ("--context-window", WINDOW, "--micro-batches", 2, "--pp", 2, "--steps", 2)
SEARCHED = ("--model", "tiny", "--context-window", WINDOW, "--batch-tokens", 2 * WINDOW)


def wlb(*arguments: object) -> Any:
    """What a command prints with ``--json``."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.exception or result.output
    return json.loads(result.stdout)


def differences(expected: Any, value: Any, where: str = "") -> Iterator[str]:
    """Where ``value`` lacks something that ``expected`` (see ``json_keys``) has, or has it with another type."""
    kind = type(expected) if isinstance(expected, dict | list) else expected
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted:
        yield f"{where} is {value!r}, not {kind.__name__}"
    elif isinstance(expected, list):
        if not value:
            yield f"{where} is empty"
        for index, element in enumerate(value):
            yield from differences(expected[0], element, f"{where}[{index}]")
    elif isinstance(expected, dict):
        keys = dict.fromkeys(value, expected["*"]) if "*" in expected else expected
        for name, of_name in keys.items():
            key = name.removesuffix("?")
            if key not in value:
                yield f"{where}.{key} is missing"
            elif key == name or value[key] not in (None, []):
                yield from differences(of_name, value[key], f"{where}.{key}")


def check(output: str, value: Any) -> None:
    assert not [*differences(OUTPUTS[output], value)]


class Run(NamedTuple):
    """A job of two steps that has ended."""

    config: Path
    summary: Any


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    write_store(folder / "store", documents=60)
    write_store(folder / "held_out", documents=8, longest=64)
    config = write_config(
        folder,
        training={"steps": 2, "timeout_seconds": 600.0},  # of the watchdog, which ends this very process
        checkpoint={"dir": str(folder / "checkpoints"), "every": 2},
        metrics={"diagnose_every": 2},
        evaluation={"store": str(folder / "held_out")},
    )
    return Run(config, train(load_config(config), Termination()))


def test_prepare(tmp_path: Path):
    (tmp_path / "documents.jsonl").write_text('{"text": "one"}\n{oops\n')
    command = ("prepare", tmp_path / "documents.jsonl", "--out", tmp_path / "store")
    check("prepare", wlb(*command, "--shard", "1/1"))
    check("prepare", wlb(*command))
    check("prepare --check", wlb("prepare", "--check", tmp_path / "store"))


@pytest.mark.parametrize(
    ("output", "arguments"),
    [
        ("compare", (LENGTHS, *STEP, "--methods", "sequential,fixed_solver,makespan", "--solver-seconds", 0.05)),
        ("check", (LENGTHS, "--gpus", 2, *SEARCHED, "--steps", 1)),
        ("prefill", (LENGTHS, "--token-budget", 1024, "--model", "tiny")),
        ("tune", (LENGTHS, *STEP)),
        ("shard", (LENGTHS, "--context-window", WINDOW, "--cp", 2, "--model", "tiny", "--samples", 2)),
        ("simulate", ("550m-64k", "--lengths", "synthetic:600:65536:0", "--steps", 1, "--systems", "plain-4d,best")),
        ("rivals", (LENGTHS, "--gpus", 2, *SEARCHED, "--steps", 1, "--policies", "plain-4d,bytescale,distca")),
        ("simulate --search", ("--gpus", 2, *SEARCHED, "--lengths", LENGTHS, "--steps", 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_planning(output: str, arguments: tuple[object, ...]):
    check(output, wlb(*output.split(), *arguments))


def test_profile(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("wlb.profiling.measure._QUICK_EFFORT", Effort(0.0, fewest_rounds=1))
    check("profile", wlb("profile", "--quick", "--max-length", 256, "--out", tmp_path / "profile.json"))


def test_reproduce(tmp_path: Path):
    check("reproduce", wlb("reproduce", "kernel", "--out", tmp_path))


def test_report_of_lengths(tmp_path: Path):
    job = ("--context-window", WINDOW, "--model", "tiny", "--parallel", "dp=1,pp=2,cp=2,tp=1", "--steps", 2)
    check("report LENGTHS", wlb("report", LENGTHS, *job, "--out", tmp_path / "report.html"))


def test_train(run: Run):
    check("train", run.summary)
    for row in read_steps(run.config.parent):
        check("steps.jsonl", row)
    for line in (run.config.parent / "metrics" / "evaluation.jsonl").read_text().splitlines():
        check("evaluation.jsonl", json.loads(line))


def test_dry_run(run: Run):
    check("train --dry-run", wlb("train", run.config, "--dry-run", "--device", "cuda", "--set", "parallel.pp=2"))


def test_report_of_a_run(run: Run, tmp_path: Path):
    metrics = run.config.parent / "metrics"
    check("report RUN_DIR", wlb("report", metrics, "--before", metrics, "--out", tmp_path / "report.html"))


def test_diagnose(run: Run, tmp_path: Path):
    check("diagnose", wlb("diagnose", run.config.parent / "metrics"))
    uneven = EVEN.copy()
    uneven[:, 1] = 1.5
    (tmp_path / FILE).write_text(json.dumps(diagnosis_of(rows_of(uneven))))
    diagnosis = wlb("diagnose", tmp_path)
    assert diagnosis["causes"]
    check("diagnose", diagnosis)


def test_export(run: Run, tmp_path: Path):
    check("export", wlb("export", run.config, "--out", tmp_path / "model"))


def _changed(change: Callable[[Any], None]) -> Any:
    value = {"out": "x", "checkpoint": "y", "step": 3, "parameters": 7, "dtype": "z", "tokenizer_files": ["t"]}
    change(value)
    return value


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda value: value.update(more=1, tokenizer_files=None), []),
        (lambda value: value.pop("step"), [".step is missing"]),
        (lambda value: value.update(step=3.0), [".step is 3.0, not int"]),
        (lambda value: value.update(step=True), [".step is True, not int"]),
        (lambda value: value.update(tokenizer_files=[1]), [".tokenizer_files[0] is 1, not str"]),
    ],
)
def test_a_changed_output_is_found(change: Callable[[Any], None], difference: list[str]):
    assert [*differences(OUTPUTS["export"], _changed(change))] == difference
