"""Benchmark of whole training steps: the paper's systems and ours, on two real processes with one thread each.

    .venv/bin/python benchmarks/training.py [--layouts pp,dp,cp] [--presets NAMES] [--repetitions N] [--steps N]
        [--peer] [--out FILE]

The documents are the source code of Python's standard library. Every preset trains them with pp = 2, dp = 2 and cp = 2
(or two of these at once on four processes: ``--layouts dp+cp,dp+pp``) at hidden size 128 and a 4,096-token window,
about the ratio of attention to everything else of a 7B model at 128K. In a repetition the presets take turns, a step
each, in the same processes; the first step is not counted. A step's seconds are the median over repetitions, and
tokens/s is the tokens of all steps over their seconds.

Speeds are over plain-4d. Sequential packing cuts documents and leaves out part of their attention, so "equal work" is
the speed in predicted seconds of work; "in tokens" is that of tokens/s. "predicted" is the same for the same plans by
the simulator, from times measured on this machine at the start (``wlb profile``), and "error" what it predicts for a
step's seconds over those measured, less one, the median; it holds where every process has a core of its own.

``--peer`` adds a Hugging Face Trainer with padding-free packing for dp = 2, on the same documents with the same model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from parts.measurement import machine, versions
from parts.training.turns import (
    PROCESSES,
    counted_rows,
    job_config,
    make_parser,
    measure_profile,
    measured_rows,
    plan_steps,
    predicted_seconds,
    prepare,
    run,
    train_in_turns,
)
from wlb.packing.arrange import micro_batch_seconds
from wlb.workload.profile import WorkloadProfile

PEER = "hf-trainer"
TRAINER = Path(__file__).parent / "parts" / "training" / "hf_trainer.py"


@dataclass(frozen=True)
class Result:
    """One preset in one layout; speeds are over plain-4d in the same layout."""

    layout: str
    preset: str
    tokens_per_second: float
    step_seconds: float  # median over steps
    imbalance_degree: float
    measured_speed: float
    predicted_speed: float | None
    measured_speed_at_equal_work: float | None
    predicted_speed_at_equal_work: float | None
    prediction_error: float | None  # predicted over measured seconds of a step less one, median


@dataclass(frozen=True)
class Job:
    """A preset's counted steps: tokens, seconds (medians over repetitions), and what was expected of them."""

    tokens: list[int]
    seconds: list[float]
    predicted: list[float] | None
    work: float | None  # predicted seconds of one process doing all of it
    imbalance_degree: float

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


def main() -> None:
    arguments = parse_arguments()
    out: Path = arguments.directory
    out.mkdir(parents=True, exist_ok=True)
    store = prepare(out)
    profile = measure_profile(out)
    results: list[Result] = []
    for layout in arguments.layouts.split(","):
        for repetition in range(arguments.repetitions):
            train_in_turns(layout, repetition, arguments, store)
            if arguments.peer and layout == "dp":
                train_peer(repetition, arguments, store)
        results += compare(layout, arguments, store, profile)
    report(results, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, "runs/benchmark-training")
    parser.add_argument(
        "--peer", action="store_true", help="also run a Hugging Face Trainer (needs transformers and accelerate)"
    )
    return parser.parse_args()


def train_peer(repetition: int, arguments: argparse.Namespace, store: Path) -> None:
    directory = arguments.directory / "dp" / PEER / str(repetition)
    shutil.rmtree(directory, ignore_errors=True)
    sizes = ["--micro-batches", arguments.micro_batches, "--steps", arguments.steps + 1]
    run(TRAINER, "--store", store, "--out", directory, *sizes, processes=PROCESSES)


def compare(layout: str, arguments: argparse.Namespace, store: Path, profile: WorkloadProfile) -> list[Result]:
    jobs = {preset: _job_of(layout, preset, arguments, store, profile) for preset in arguments.presets}
    if arguments.peer and layout == "dp":
        rows = counted_rows(layout, PEER, arguments)
        jobs[PEER] = Job([row["tokens"] for row in rows[0]], _median_seconds(rows), None, None, 1.0)
    base = jobs.get("plain-4d", jobs[arguments.presets[0]])
    return [_result(layout, preset, job, base) for preset, job in jobs.items()]


def _job_of(layout: str, preset: str, arguments: argparse.Namespace, store: Path, profile: WorkloadProfile) -> Job:
    config = job_config(layout, preset, arguments, store)
    plans = plan_steps(config, arguments.steps + 1)[1:]
    rows = measured_rows(layout, preset, arguments, plans)
    tokens = [plan.tokens for plan in plans]
    return Job(
        tokens,
        _median_seconds(rows),
        predicted_seconds(plans, config, profile),
        sum(float(micro_batch_seconds(plan.ranks, profile.workload()).sum()) for plan in plans),
        sum(plan.imbalance for plan in plans) / len(plans),
    )


def _median_seconds(repetitions: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    return [median(row["step_seconds"] for row in rows) for rows in zip(*repetitions, strict=True)]


def _result(layout: str, preset: str, job: Job, base: Job) -> Result:
    predicted = equal_work = predicted_equal_work = error = None
    if job.predicted and base.predicted and job.work and base.work:
        predicted = sum(job.tokens) / sum(job.predicted) / (sum(base.tokens) / sum(base.predicted))
        equal_work = job.work / sum(job.seconds) / (base.work / sum(base.seconds))
        predicted_equal_work = job.work / sum(job.predicted) / (base.work / sum(base.predicted))
        error = median(p / m - 1 for p, m in zip(job.predicted, job.seconds, strict=True))
    return Result(
        layout,
        preset,
        tokens_per_second=job.tokens_per_second,
        step_seconds=median(job.seconds),
        imbalance_degree=job.imbalance_degree,
        measured_speed=job.tokens_per_second / base.tokens_per_second,
        predicted_speed=predicted,
        measured_speed_at_equal_work=equal_work,
        predicted_speed_at_equal_work=predicted_equal_work,
        prediction_error=error,
    )


def report(results: Sequence[Result], arguments: argparse.Namespace) -> None:
    here = machine() | versions("torch", "transformers")
    table = Table(
        title=f"measured, a thread for each process, {here['cores']} cores, {here['cpu']}, torch {here['torch']}; "
        f"medians of {arguments.repetitions} repetitions of {arguments.steps} steps"
    )
    headings = ("= 2", "preset", "equal work", "predicted", "imbalance", "tokens/s", "in tokens", "predicted", "error")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("= 2", "preset") else "right")
    for result in results:
        table.add_row(
            result.layout,
            result.preset,
            _times(result.measured_speed_at_equal_work),
            _times(result.predicted_speed_at_equal_work),
            f"{result.imbalance_degree:.3f}",
            f"{result.tokens_per_second:,.0f}",
            _times(result.measured_speed),
            _times(result.predicted_speed),
            "" if result.prediction_error is None else f"{result.prediction_error:+.0%}",
        )
    Console(width=110).print(table)
    if arguments.out:
        summary = {"machine": here, "steps": arguments.steps, "repetitions": arguments.repetitions}
        rows = [asdict(result) for result in results]
        arguments.out.write_text(json.dumps(summary | {"results": rows}, indent=1) + "\n", encoding="utf-8")


def _times(speed: float | None) -> str:
    return "" if speed is None else f"{speed:.3f}x"


if __name__ == "__main__":
    main()
