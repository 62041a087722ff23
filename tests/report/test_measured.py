"""A report on a training run: its own figures, alone and beside another, and readable mistakes."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.conftest import HOSTILE, write_run
from tests.report.html.reader import read
from wlb.errors import UserError
from wlb.report.measured import gain_at_equal_work, gain_in_tokens, measured_report
from wlb.report.run_directory import TrainingRun, read_run


def two_runs(folder: Path) -> list[TrainingRun]:
    return [read_run(write_run(folder / name, seconds=s)) for name, s in (("plain", 3.0), ("balanced", 2.0))]


def test_the_first_step_is_left_out_and_the_rest_measured(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run"))
    assert run.columns["step"].tolist() == list(range(2, 21))
    assert run.tokens_per_second == pytest.approx(
        sum(8000 + 10 * step for step in range(2, 21)) / sum(2 + 0.01 * (step % 3) for step in range(2, 21))
    )
    assert (run.mean("measured"), run.mean("predicted")) == pytest.approx((1.44, 1.21))


def test_names_stay_text(tmp_path: Path):
    name = HOSTILE.replace("/", "⁄")
    reader = read(measured_report(read_run(write_run(tmp_path / name)))[0])
    assert name in reader.text
    assert not {element for element, _ in reader.elements} & {"script", "img"}


def test_the_slowest_rank_is_shown(tmp_path: Path):
    text = read(measured_report(read_run(write_run(tmp_path / "run")))[0]).text
    assert "The slowest rank computes 1.44 times as long as the mean rank; the plans predict 1.21." in text
    assert "1.2101.440" in text


def test_two_runs_are_compared(tmp_path: Path):
    before, after = two_runs(tmp_path)
    page = measured_report(after, before)[0]
    charts = [attributes["id"] for name, attributes in read(page).elements if name == "svg"]
    assert charts == ["gain-chart", "steps-chart"]
    of_steps = page[page.index('id="steps-chart"') :].partition("</svg>")[0]
    assert all(f">{percent}</text>" in of_steps for percent in (0, 20, 40))  # the utilisation of 0.27 and of 0.41
    assert "1.50x" in page


def test_the_gain_is_in_tokens_over_all_steps_and_at_equal_work(tmp_path: Path):
    before, after = two_runs(tmp_path)
    cut = replace(before, columns={name: column[:5] for name, column in before.columns.items()})
    equal, faster = gain_at_equal_work(cut, after), gain_in_tokens(cut, after)
    assert equal.factor == pytest.approx(after.utilisation / cut.utilisation)
    assert faster.factor == pytest.approx(after.tokens_per_second / cut.tokens_per_second)
    text = read(measured_report(after, cut)[0]).text
    assert f"{faster.factor:.2f}xtokens/s over plain" in text
    assert f"it is {equal}" in text


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path):
    before, after = (
        read_run(write_run(tmp_path / name / "metrics", seconds=s)) for name, s in (("a", 3.0), ("b", 2.0))
    )
    text = read(measured_report(after, before)[0]).text
    assert "metrics trains 1.50x the tokens per second of metrics (before)" in text
    assert "metrics (before)19" in text


def test_mistakes_name_the_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"has no steps.jsonl"):
        read_run(tmp_path)
    path = write_run(tmp_path / "run")
    with (path / "steps.jsonl").open("a") as file:
        file.write('{"step": 21, "tok')  # cut short when its writer was killed
    assert read_run(path).columns["step"][-1] == 20
    rows = (path / "steps.jsonl").read_text().splitlines(keepends=True)
    (path / "steps.jsonl").write_text("".join([rows[0], "[]\n", *rows[1:]]))
    with pytest.raises(UserError, match="line 2 is not a step"):
        read_run(path)
    (path / "steps.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no steps"):
        read_run(path)
