"""``wlb reproduce``: files, labels and mistakes."""

from __future__ import annotations

import json
import sys

import pytest

from wlb.cli.app import main


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["wlb", "reproduce", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_writes_json_and_a_picture_and_labels_what_it_prints(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "sharding", "--out", tmp_path, "--steps", 4) == 0
    document = json.loads((tmp_path / "sharding.json").read_text())
    assert {column["kind"] for table in document["tables"] for column in table["columns"]} == {
        None,
        "quoted",
        "simulated",
    }
    assert (tmp_path / "sharding.png").is_file()
    shown = capsys.readouterr().out
    assert "quoted" in shown
    assert "simulated" in shown


def test_json_goes_to_stdout(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "kernel", "--out", tmp_path, "--json") == 0
    assert [one["experiment"] for one in json.loads(capsys.readouterr().out)["experiments"]] == ["kernel"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["figure7"], "experiment 'figure7' is unknown; choose from imbalance"),
        (["speedups", "--profile", "p.json"], "--profile is shown by kernel"),
        (["kernel", "--profile", "missing.json"], "missing.json"),
        (["kernel", "--measured", "m.json"], "--measured is for published"),
        (["published", "--measured", "missing.json"], "missing.json cannot be read"),
        (["published", "--steps", "3"], "--steps is not for published"),
        (["published", "--profile", "p.json"], "--profile is not for published"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    assert run(monkeypatch, *arguments, "--out", tmp_path) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_a_directory_that_cannot_be_made_is_a_mistake(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert run(monkeypatch, "kernel", "--out", tmp_path / "file" / "results") == 2
    assert "cannot be made" in capsys.readouterr().err
