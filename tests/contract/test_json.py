"""What programs read: keys of ``check --json`` and ``simulate --json``, and of the lines that training appends."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import run
from tests.contract.names import STEP, SYSTEM, VERDICT
from tests.training.jobs import read_steps, write_config, write_store
from wlb.job.config_file import load_config
from wlb.training.process import Termination
from wlb.training.trainer import train

WINDOW = 4096
LENGTHS = f"synthetic:300:{WINDOW}:0"


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (("check", LENGTHS, "--gpus", 2, "--model", "tiny", "--context-window", WINDOW, "--steps", 1), {"config"}),
        (("simulate", "550m-64k", "--lengths", "synthetic:600:65536:0", "--steps", 1), set()),
    ],
)
def test_a_verdict_has_its_keys(arguments: tuple[object, ...], more: set[str]):
    result = run(*arguments, "--systems", "plain-4d,balanced", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert {*VERDICT.split()} | more <= {*found}
    for system in found["systems"]:
        assert {*SYSTEM.split()} <= {*system}


def test_a_step_has_its_keys(tmp_path: Path):
    write_store(tmp_path / "store", documents=60)
    training = {"steps": 2, "timeout_seconds": 600.0}  # of the watchdog, which ends this very process
    train(load_config(write_config(tmp_path, training=training, metrics={"document_ids": True})), Termination())
    steps = read_steps(tmp_path)
    assert steps
    for step in steps:
        assert {*STEP.split()} <= {*step}
