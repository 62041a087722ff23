"""A report on a training run: its own figures, alone and beside another, and readable mistakes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.report.conftest import HOSTILE, write_run
from tests.report.html.reader import read
from wlb.errors import UserError
from wlb.report.measured import gain_at_equal_work, measured_report
from wlb.report.run_directory import TrainingRun, read_diagnosis, read_run


def two_runs(folder: Path) -> list[TrainingRun]:
    return [read_run(write_run(folder / name, seconds=s)) for name, s in (("plain", 3.0), ("best", 2.0))]


def test_the_first_step_is_left_out_and_the_rest_measured(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run"))
    assert run.columns["step"].tolist() == list(range(2, 21))
    assert run.tokens_per_second == pytest.approx(
        sum(8000 + 10 * step for step in range(2, 21)) / sum(2 + 0.01 * (step % 3) for step in range(2, 21))
    )
    assert run.compute_seconds is not None
    np.testing.assert_array_equal(run.compute_seconds[:, :, 0], [[1.0, 1.2], [0.9, 0.9]])


def test_tensor_parallel_ranks_count_as_their_slowest(tmp_path: Path):
    path = write_run(tmp_path / "run")
    diagnosis = json.loads((path / "diagnosis.json").read_text())
    diagnosis["ranks"] = [
        rank | {"tp": tp, "compute_seconds": 1.0 + tp} for rank in diagnosis["ranks"] for tp in (1, 0)
    ]
    (path / "diagnosis.json").write_text(json.dumps(diagnosis))
    assert np.all(read_run(path).compute_seconds == 2.0)


def test_hosts_and_names_stay_text(tmp_path: Path):
    name = HOSTILE.replace("/", "⁄")
    page = measured_report(read_run(write_run(tmp_path / name, host=HOSTILE)))
    reader = read(page)
    assert HOSTILE in reader.text
    assert name in reader.text
    assert not {element for element, _ in reader.elements} & {"script", "img"}


def test_waiting_for_a_core_is_no_compute(tmp_path: Path):
    page = measured_report(read_run(write_run(tmp_path / "run")))
    hints = dict(re.findall(r"<title>run, ([^:]*): ([\d.]+) s</title>", page))
    ratio = float(hints["wait for a core"]) / float(hints["compute of the mean rank"])
    assert ratio == pytest.approx(0.25 / 0.75, rel=0.01)


def test_two_runs_are_compared(tmp_path: Path):
    before, after = two_runs(tmp_path)
    page = measured_report(after, before)
    charts = [attributes["id"] for name, attributes in read(page).elements if name == "svg"]
    assert charts == ["gain-chart", "steps-chart", "where-chart", "ranks-chart"]
    assert "1.50x" in page


def test_a_run_has_one_step_time_on_the_page(tmp_path: Path):
    """Over all steps but the first, whatever steps its diagnosis covers: 19 of one run, the last 3 of the other."""
    paths = [write_run(tmp_path / name, seconds=s) for name, s in (("plain", 3.0), ("best", 2.0))]
    for path, steps in zip(paths, (19, 3), strict=True):
        file = path / "diagnosis.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"steps": steps, "step_seconds": 2.34}))
    before, after = map(read_run, paths)
    page = measured_report(after, before)
    text = read(page).text
    shown = {f"{run.mean('step_seconds'):.3g} s" for run in (before, after)}
    totals = re.findall(r'<text[^>]*class="label">([\d.]+ s)</text>', page)
    assert set(totals) == shown
    assert "2.34 s" not in text
    assert f"{after.mean('step_seconds'):.3g} sa step, mean" in text
    assert "plain: 19 steps up to step 20; best: 3 steps up to step 20" in text


def test_the_gain_is_at_equal_work_over_all_steps(tmp_path: Path):
    before, after = two_runs(tmp_path)
    cut = replace(before, columns={name: column[:5] for name, column in before.columns.items()})
    result = gain_at_equal_work(cut, after)
    assert result.factor == pytest.approx(after.utilisation / cut.utilisation)
    text = read(measured_report(after, cut)).text
    assert f"{result.factor:.2f}xspeed at equal work, over plain" in text


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path):
    before, after = (
        read_run(write_run(tmp_path / name / "metrics", seconds=s)) for name, s in (("a", 3.0), ("b", 2.0))
    )
    text = read(measured_report(after, before)).text
    assert "metrics does 1.50 times the work of metrics (before)" in text
    assert "metrics (before), predicted" in text


def test_a_run_that_goes_on_has_no_diagnosis_and_a_last_line_cut_short(tmp_path: Path):
    path = write_run(tmp_path / "run", diagnosed=False)
    with (path / "steps.jsonl").open("a") as file:
        file.write('{"step": 21, "tok')
    run = read_run(path)
    assert run.columns["step"][-1] == 20
    assert "has written no diagnosis.json yet" in measured_report(run)
    with pytest.raises(UserError, match=r"has no diagnosis\.json"):
        read_diagnosis(path)


def test_mistakes_name_the_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"has no steps.jsonl"):
        read_run(tmp_path)
    path = write_run(tmp_path / "run")
    rows = (path / "steps.jsonl").read_text().splitlines(keepends=True)
    (path / "steps.jsonl").write_text("".join([rows[0], "[]\n", *rows[1:]]))
    with pytest.raises(UserError, match="line 2 is not a step"):
        read_run(path)
    (path / "steps.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no steps"):
        read_run(path)
    (path / "steps.jsonl").write_text("".join(rows))
    for broken in ("{}", "[1]", "{", '{"ranks": []}', '{"ranks": [{"compute_seconds": 1, "host": "a", "pp": 5}]}'):
        (path / "diagnosis.json").write_text(broken)
        with pytest.raises(UserError, match="is not a diagnosis"):
            read_run(path)
