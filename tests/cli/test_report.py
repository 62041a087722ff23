"""``wlb report`` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.cases import in_turn
from tests.cli.conftest import printed, refusal, run
from tests.report.conftest import write_run
from wlb.documents.store.reader import TokenStoreWriter

SMALL = [
    "synthetic:1500:8192:0",
    "--context-window",
    "8192",
    "--dp",
    "2",
    "--pp",
    "2",
    "--cp",
    "1",
    "--tp",
    "8",
    "--steps",
    "1",
]
GAINS = ["--model", "tiny", "--hardware", "cpu", "--context-window", "4K", "--batch-tokens", "16K", "--steps", "1"]
UNEVEN = [4096, 600, 1500, 900, 3000, 700, *range(20, 100, 10)] * 6


def report_without_torch(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['torch'] = None; from wlb.cli.app import main; main()"
    command = [sys.executable, "-c", code, "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_lengths_become_a_page_and_figures(tmp_path: Path):
    out, edited = tmp_path / "report.html", tmp_path / "report.job.toml"
    edited.write_text("# mine")
    oldest = tmp_path / "report.job.earlier.toml"
    oldest.write_text("# mine, too")
    (tmp_path / "lengths.json").write_text(json.dumps(UNEVEN))
    asked = [tmp_path / "lengths.json", *GAINS, "--dp", "2", "--cp", "2", "--pp", "1", "--tp", "1"]
    result = report_without_torch(*asked, "--out", out, "--json")
    assert result.returncode == 0, result.stderr
    earlier = tmp_path / "report.job.earlier2.toml"
    assert f"{edited} was another job, which is {earlier} now" in result.stderr
    assert (earlier.read_text(), oldest.read_text()) == ("# mine", "# mine, too")
    assert edited.read_text().startswith("# Computed for the documents of")
    summary = json.loads(result.stdout)
    assert (summary["kind"], summary["out"], summary["config_file"]) == ("simulated", str(out), str(edited))
    assert summary["config"] == edited.read_text()
    assert f"{summary['speedup']:.2f}x" in out.read_text()
    assert "wlb simulate and wlb train --dry-run report the same speedup for it." in out.read_text()
    checked = json.loads(printed("check", *asked, "--json"))
    assert {**checked, **{name: summary[name] for name in ("kind", "out", "config_file")}} == summary


def test_where_little_is_gained_no_job_is_written(tmp_path: Path):
    out, config = tmp_path / "report.html", tmp_path / "report.job.toml"
    (tmp_path / "lengths.json").write_text(json.dumps([4096] * 24))
    asked = [tmp_path / "lengths.json", *GAINS, "--gpus", "1", "--out", out]
    result = run("report", *asked)
    assert (result.returncode, result.stderr) == (0, "")
    read, empty, verdict, *_, written = result.stdout.splitlines()
    assert read.startswith(f"read {tmp_path / 'lengths.json'}: 24 documents, 98,304 tokens; median 4,096")
    assert (empty, written) == ("", f"{out}  ({out.stat().st_size / 1e6:.2f} MB)")
    assert verdict == "Keep what you have: no preset gains 5% in every shuffle."
    assert "Keep what you have: no preset gains enough here" in out.read_text()
    assert "preset = " not in out.read_text()
    assert "nothing is sharded" in out.read_text()
    assert not config.exists()
    config.write_text("# of yesterday")
    assert f"{config} is of an earlier report; this one recommends no job" in run("report", *asked).stderr
    assert config.read_text() == "# of yesterday"


def test_a_run_directory_becomes_a_page(tmp_path: Path):
    out = tmp_path / "report.html"
    trained, before = write_run(tmp_path / "run"), write_run(tmp_path / "before", seconds=3.0)
    with TokenStoreWriter(trained / "store", vocab_size=2) as writer:  # as where a job writes beside its store
        writer.add([0, 1])
    shown = json.loads(printed("report", trained, "--before", before, "--out", out, "--json"))
    assert shown["speedup"] == pytest.approx(1.5, rel=0.01)
    assert "measured" in out.read_text()
    with mock.patch("webbrowser.open") as opened:
        told = printed("report", trained, "--out", out, "--open")
    opened.assert_called_once_with(out.as_uri())
    assert told.startswith("The slowest rank computes 1.44 times as long as the mean rank; the plans predict 1.21.\n")


@in_turn(
    ("arguments", "message"),
    [
        ([*SMALL, "--batch-tokens", "24K"], "give a multiple, such as --batch-tokens 16384"),
        (["README.md", "--before", "runs"], "README.md has no steps.jsonl: name the metrics.dir of a training job"),
        (["synthetic:20:8192:0", *SMALL[1:]], "give more documents"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: list[str], message: str):
    assert message in refusal("report", *arguments, "--out", tmp_path / "report.html")
