"""``wlb-studies rivals`` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from studies.tests.cli.conftest import studies
from tests.cli.conftest import run as wlb

SMALL = ["synthetic:2000:8192:0", "--gpus", "4", "--context-window", "8K", "--batch-tokens", "64K", "--steps", "1"]
MODEL = ["--model", "550m"]


def without_torch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['torch'] = None; from wlb_studies.app import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rivals")
    picture = folder / "speeds.png"
    result = without_torch("rivals", *SMALL, *MODEL, "--policies", "bytescale,fcp", "--json", "--plot", picture)
    assert result.returncode == 0, result.stderr
    assert picture.stat().st_size > 5_000
    (folder / "rivals.json").write_text(result.stdout)
    return folder / "rivals.json"


def test_the_base_comes_first_and_is_one(compared: Path):
    found = json.loads(compared.read_text())
    assert [p["policy"] for p in found["policies"]] == ["plain-4d", "bytescale", "fcp"]
    assert found["policies"][0]["speedup"] == found["policies"][0]["speed_at_equal_work"] == 1.0
    assert found["policies"][0]["spread"] == [1.0, 1.0]
    assert all(p["spread"][0] <= p["speedup"] <= p["spread"][1] for p in found["policies"])
    assert (found["draws"], found["policies"][0]["steps"]) == (3, 1)
    assert found["epochs"] == 4  # of each draw, with the steps that warm up
    assert all(p["token_delay"] == 0 for p in found["policies"])


def test_presets_are_as_fast_as_in_check():
    smaller = [*SMALL, *MODEL, "--gpus", "2", "--batch-tokens", "32K", "--json"]  # fewer layouts to try
    checked, compared = wlb("check", *smaller), studies("rivals", *smaller, "--policies", "per-document-4d,balanced")
    assert (checked.returncode, compared.returncode) == (0, 0), checked.stderr + compared.stderr
    systems = {system["system"]: system for system in json.loads(checked.stdout)["systems"]}
    for found in json.loads(compared.stdout)["policies"]:
        same = systems[found["policy"]]
        for figure in ("speedup", "spread", "speed_at_equal_work"):
            assert found[figure] == pytest.approx(same[figure]), (found["policy"], figure)


def test_tables_fit_80_columns():
    result = studies("rivals", *SMALL, *MODEL, "--policies", "fixed-4d")
    assert result.returncode == 0, result.stderr
    first, _, _ = result.stdout.partition("its best layout")
    assert "1.00x" in first
    assert max(map(len, (line.rstrip() for line in first.splitlines()))) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "nobody"], "policy 'nobody' is unknown"),
        (["--model", "8t"], "unknown model '8t'"),
        (["--batch-tokens", "1K"], "is smaller than one context window"),
        (["--plot", "speeds.gif"], "must end in one of"),
        (["--gpus", "1", "--model", "70b", "--policies", "plain-4d"], "no layout of 1 GPU"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str):
    result = studies("rivals", *SMALL, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
