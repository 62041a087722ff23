"""``wlb diagnose`` shows what a job wrote, without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.observe.test_diagnosis import EVEN, diagnosis_of
from tests.training.observe.test_imbalance import rows_of
from wlb.cli import app
from wlb.training.observe.diagnosis import FILE


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["wlb", "diagnose", *arguments])
    with pytest.raises(SystemExit) as stopped:
        app.main()
    return int(stopped.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    uneven = EVEN.copy()
    uneven[:, 1] = 1.5
    (tmp_path / FILE).write_text(json.dumps(diagnosis_of(rows_of(uneven))))
    return tmp_path


def test_text_and_json(folder, monkeypatch, capsys):
    assert run(monkeypatch, str(folder)) == 0
    text = capsys.readouterr().out
    assert "slowest/mean" in text
    assert "packing.assignment" in text
    assert run(monkeypatch, str(folder), "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((folder / FILE).read_text())


def test_a_folder_without_a_diagnosis_is_a_users_mistake(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, str(tmp_path)) == 2
    assert "has no diagnosis.json" in capsys.readouterr().err


def test_it_needs_no_torch(folder):
    code = "import sys; sys.modules['torch'] = None; from wlb.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "diagnose", str(folder)], capture_output=True)
    assert done.returncode == 0
    assert b"slowest/mean" in done.stdout


def test_profile_is_a_setting_of_train(monkeypatch):
    asked: list[list[str]] = []

    def launch(config: Path, overrides: list[str], *, summary: bool) -> int:
        asked.append(overrides)
        return 0

    monkeypatch.setattr("wlb.training.launcher.launch", launch)
    monkeypatch.setattr("sys.argv", ["wlb", "train", "job.toml", "--set", "training.steps=4", "--profile"])
    with pytest.raises(SystemExit):
        app.main()
    assert asked == [["training.steps=4", "metrics.profile=true"]]
