"""One verdict: what it is made of, which preset it names, and that every command gives the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from wlb.cli.app import app
from wlb.documents.synthetic import sample_lengths
from wlb.job.memory.fit import fits, largest_factor
from wlb.simulate import CAUSES, simulated_job
from wlb.simulate.verdict import BASELINE, BEST, ELASTIC, PARTS, Verdict, judge, presets_of

WINDOW = 8192
LENGTHS = sample_lengths(2000, WINDOW, seed=1)
JOB = simulated_job("7b", WINDOW, dp=2, pp=2, cp=2, tp=8)
SIZES = ("--model", "7b", "--context-window", WINDOW, "--dp", 2, "--pp", 2, "--cp", 2, "--tp", 8)


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    return judge(presets_of(JOB, LENGTHS, (BASELINE, BEST, ELASTIC)), LENGTHS, 6)


def wlb(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.exception or result.output
    return json.loads(result.stdout)


def test_parts_are_the_whole_step(verdict: Verdict):
    assert sorted(cause for causes in PARTS.values() for cause in causes) == sorted(CAUSES)
    for name in verdict.systems:
        assert sum(verdict.parts(name).values()) == pytest.approx(1 / verdict.speed(name))
    assert verdict.base == BASELINE
    assert verdict.given_back == pytest.approx(1 - 1 / verdict.speed(verdict.winner))
    assert f"{sum(verdict.lost.values()):.0%} of GPU time" in str(verdict)


@pytest.mark.parametrize(
    ("of_best", "of_elastic", "winner"),
    [(1.2, 1.4, ELASTIC), (1.2, 1.195, ELASTIC), (1.2, 1.1, BEST), (0.9, 0.8, BASELINE), (1.008, 1.004, BASELINE)],
)
def test_the_fastest_wins_and_elastic_if_it_is_as_fast(verdict: Verdict, of_best, of_elastic, winner):
    rate = verdict.systems[BASELINE].work_rate
    speeds = {BASELINE: 1.0, BEST: of_best, ELASTIC: of_elastic}
    systems = {name: replace(verdict.systems[name], work_seconds=x * rate, seconds=1.0) for name, x in speeds.items()}
    assert Verdict(systems, 0).winner == winner
    said = str(Verdict(systems, 0))
    assert ("No other preset is faster" if winner == BASELINE else f'preset = "{winner}"') in said


def test_a_system_that_delays_is_as_fast_later_on():
    """As many documents wait at the end as at the beginning, so it is not fast because the dear ones still wait."""
    job = presets_of(JOB, LENGTHS, [BEST])[BEST]
    early, late = (judge({BEST: job}, LENGTHS, steps).systems[BEST] for steps in (16, 64))
    assert early.work_rate == pytest.approx(late.work_rate, rel=0.02)
    assert judge({BEST: job}, LENGTHS).steps == 32


def test_checkpointing_is_the_cheapest_that_fits():
    """Of a 7B model on 8 GPUs of 80 GB: more tokens, more recomputation, and in the end no room."""
    kinds = {}
    for window in (8192, 65_536, 1_048_576):
        job = simulated_job("7b", window, BEST, dp=1, pp=1, cp=1, tp=8)
        found = presets_of(job, sample_lengths(200, window, 0), [BASELINE, BEST])
        kinds[window] = [job.activation_checkpointing for job in found.values()]
        assert all(map(fits, found.values())) == (window < 1_048_576)
        if window < 1_048_576:
            assert float(found[BEST].packing.length_factor) <= (largest_factor(found[BEST]) or 0.0)
    assert kinds[8192] == ["none", "none"]
    assert "none" not in kinds[65_536]


@pytest.mark.parametrize(
    ("sizes", "steps", "winner"),
    [(SIZES, (), BEST), ((*SIZES[:4], "--dp", 2, "--cp", 4, "--pp", 1), ("--steps", 8), ELASTIC)],
)
def test_every_command_gives_the_same_verdict(
    tmp_path: Path, sizes: tuple[object, ...], steps: tuple[object, ...], winner: str
):
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps(LENGTHS[LENGTHS > 200].tolist()))
    job = (*sizes, *steps, "--micro-batches", 4)
    checked = wlb("check", lengths, *job)
    compared = wlb("compare", lengths, *job)["verdict"]
    reported = wlb("report", lengths, *job, "--out", tmp_path / "report.html")
    config = tmp_path / "job.toml"
    config.write_text(checked["config"])
    simulated = wlb("simulate", config, "--lengths", lengths, *steps)
    speeds = {
        command: {row["system"]: row["speed_at_equal_work"] for row in output["systems"]}
        for command, output in (("check", checked), ("compare", compared), ("simulate", simulated))
    }
    assert winner == checked["winner"] == compared["winner"] == reported["recommended"]["preset"]
    assert speeds["compare"][winner] == speeds["check"][winner]
    assert reported["speed_at_equal_work"][winner]["factor"] == pytest.approx(speeds["check"][winner])
    assert speeds["simulate"]["as configured"] == pytest.approx(speeds["check"][winner], rel=0.005)
    assert checked["lost"] == compared["lost"] == reported["lost"]


def test_nothing_but_lengths_is_needed():
    found = wlb("check", f"synthetic:400:{WINDOW}:0", "--gpus", 4, "--steps", 2)
    assert "window 8,192 tokens (assumed: documents up to it hold 100% of" in found["assumed"]
    assert "4 GPUs in the layout in which plain-4d is fastest" in found["assumed"]
    assert found["gpu_hours_a_day"] == pytest.approx(24 * 4 * found["given_back"])
    assert np.isfinite(found["speed_at_equal_work"])
