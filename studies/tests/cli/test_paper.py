"""``wlb-studies paper``: files, labels and mistakes."""

import json
from pathlib import Path

import pytest

from studies.tests.cli.conftest import studies


def test_writes_json_and_a_picture_and_labels_what_it_prints(tmp_path: Path):
    result = studies("paper", "sharding", "--out", tmp_path, "--steps", 4)
    assert result.returncode == 0, result.stderr
    document = json.loads((tmp_path / "sharding.json").read_text())
    assert {column["kind"] for table in document["tables"] for column in table["columns"]} == {
        None,
        "quoted",
        "simulated",
    }
    assert (tmp_path / "sharding.png").is_file()
    assert "quoted" in result.stdout
    assert "simulated" in result.stdout


def test_json_goes_to_stdout(tmp_path: Path):
    result = studies("paper", "kernel", "--out", tmp_path, "--json")
    assert [one["experiment"] for one in json.loads(result.stdout)["experiments"]] == ["kernel"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["paper", "figure7"], "experiment 'figure7' is unknown; choose from imbalance"),
        (["paper", "speedups", "--profile", "p.json"], "--profile works only with kernel"),
        (["paper", "kernel", "--profile", "missing.json"], "missing.json"),
        (["paper", "kernel", "--seeds", 3], "--seeds is for convergence"),
        (["validate", "--measured", "missing.json"], "missing.json cannot be read"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: list[object], message: str):
    result = studies(*arguments, "--out", tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("wlb-studies: error: ")
    assert message in line


def test_a_directory_that_cannot_be_made_is_a_mistake(tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = studies("paper", "kernel", "--out", tmp_path / "file" / "results")
    assert result.returncode == 2
    assert "cannot be made" in result.stderr
