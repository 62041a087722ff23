"""Benchmark of whole training steps: the paper's systems and ours, on two real processes with one thread each.

    .venv/bin/python benchmarks/training.py [--layouts pp,dp,cp] [--repetitions N] [--steps N] [--peer] [--out FILE]

The documents are the source code of Python's standard library. Every preset trains them with pp = 2, dp = 2 and cp = 2
at hidden size 128 and a 4,096-token window, about the ratio of attention to everything else of a 7B model at 128K. In a
repetition the presets take turns, a step each, in the same processes; the first step is not counted. A step's seconds
are the median over repetitions, and tokens/s is the tokens of all steps over their seconds.

Speeds are over plain-4d. Sequential packing cuts documents and leaves out part of their attention, so "equal work" is
the speed in predicted seconds of work; "in tokens" is that of tokens/s. "predicted" is the same for the same plans by
the simulator, from times measured on this machine at the start (``wlb profile``).

``--peer`` adds a Hugging Face Trainer with padding-free packing for dp = 2, on the same documents with the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measurement import machine, versions
from rich.console import Console
from rich.table import Table
from training_prediction import plan_steps, predicted_seconds

from wlb.config import PRESETS
from wlb.config_file import load_config
from wlb.packing.phases import micro_batch_seconds
from wlb.packing.plan import StepPlan
from wlb.workload.profile import WorkloadProfile, read_profile

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny.toml"
VOCABULARY = 512  # that of the preset tiny, which is what is profiled
PROCESSES = 2
PEER = "hf-trainer"


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
    parser.add_argument("--peer", action="store_true", help="also run a Hugging Face Trainer (needs transformers)")
    return parser.parse_args()


def make_parser(description: str | None, directory: str) -> argparse.ArgumentParser:
    """The options of a benchmark that trains every preset in turns; working files go to ``directory``."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--layouts", default="pp,dp,cp", help="which of pp, dp and cp is 2")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="counted steps of every preset in a repetition")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a step, over all ranks")
    parser.add_argument("--directory", type=Path, default=Path(directory), help="working files")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    return parser


def prepare(directory: Path) -> Path:
    store = directory / "stdlib"
    if not store.with_suffix(".idx").exists():
        run("-m", "wlb", "prepare", "--stdlib", "--train-bpe", VOCABULARY, "--out", store)
    return store


def measure_profile(directory: Path) -> WorkloadProfile:
    """What the model costs on this machine now."""
    path = directory / "profile.json"
    run("-m", "wlb", "profile", "--model", "tiny", "--device", "cpu", "--threads", 1, "--quick", "--out", path)
    return read_profile(path)


def run(*words: object, processes: int = 1) -> None:
    """Run this Python with ``words``, under torchrun where several processes are asked for."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), *map(str, words)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def overrides(layout: str, preset: str, repetition: int, arguments: argparse.Namespace, store: Path) -> list[str]:
    directory = arguments.directory / layout / preset / str(repetition)
    return [
        f"preset={preset}",
        "parallel.pp=1",
        f"parallel.{layout}={PROCESSES}",
        f"data.store={store}",
        f"packing.micro_batches={arguments.micro_batches}",
        f"training.steps={arguments.steps + 1}",
        f"checkpoint.dir={directory / 'checkpoints'}",
        f"checkpoint.every={10**6}",
        f"metrics.dir={directory}",
        "metrics.tensorboard=false",
    ]


def train_in_turns(layout: str, repetition: int, arguments: argparse.Namespace, store: Path) -> None:
    words: list[str] = []
    for preset in PRESETS:
        shutil.rmtree(arguments.directory / layout / preset / str(repetition), ignore_errors=True)
        words += ["--job", str(CONFIG), *overrides(layout, preset, repetition, arguments, store)]
    run(ROOT / "examples" / "side_by_side.py", *words, processes=PROCESSES)


def train_peer(repetition: int, arguments: argparse.Namespace, store: Path) -> None:
    config = ROOT / "benchmarks" / "training_peer.py"
    directory = arguments.directory / "dp" / PEER / str(repetition)
    shutil.rmtree(directory, ignore_errors=True)
    sizes = ["--micro-batches", arguments.micro_batches, "--steps", arguments.steps + 1]
    run(config, "--store", store, "--out", directory, *sizes, processes=PROCESSES)


def compare(layout: str, arguments: argparse.Namespace, store: Path, profile: WorkloadProfile) -> list[Result]:
    jobs = {preset: _job_of(layout, preset, arguments, store, profile) for preset in PRESETS}
    if arguments.peer and layout == "dp":
        rows = _rows(layout, PEER, arguments)
        jobs[PEER] = Job([row["tokens"] for row in rows[0]], _median_seconds(rows), None, None, 1.0)
    base = jobs["plain-4d"]
    return [_result(layout, preset, job, base) for preset, job in jobs.items()]


def _job_of(layout: str, preset: str, arguments: argparse.Namespace, store: Path, profile: WorkloadProfile) -> Job:
    config = load_config(CONFIG, overrides(layout, preset, 0, arguments, store))
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


def measured_rows(
    layout: str, preset: str, arguments: argparse.Namespace, plans: Sequence[StepPlan]
) -> list[list[dict[str, Any]]]:
    """Counted steps of every repetition, which are those of ``plans``."""
    rows = _rows(layout, preset, arguments)
    for repetition in rows:
        if [plan.tokens for plan in plans] != [row["tokens"] for row in repetition]:
            raise SystemExit(f"{layout} {preset}: the steps trained are not the steps planned")
    return rows


def _rows(layout: str, name: str, arguments: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The lines of steps.jsonl of every repetition, without the first."""
    files = [arguments.directory / layout / name / str(n) / "steps.jsonl" for n in range(arguments.repetitions)]
    return [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][1:] for file in files]


def _median_seconds(repetitions: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    return [median(row["step_seconds"] for row in rows) for rows in zip(*repetitions, strict=True)]


def _result(layout: str, preset: str, job: Job, base: Job) -> Result:
    predicted = equal_work = predicted_equal_work = None
    if job.predicted and base.predicted and job.work and base.work:
        predicted = sum(job.tokens) / sum(job.predicted) / (sum(base.tokens) / sum(base.predicted))
        equal_work = job.work / sum(job.seconds) / (base.work / sum(base.seconds))
        predicted_equal_work = job.work / sum(job.predicted) / (base.work / sum(base.predicted))
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
    )


def report(results: Sequence[Result], arguments: argparse.Namespace) -> None:
    here = machine() | versions("torch", "transformers")
    table = Table(
        title=f"measured on {PROCESSES} processes with one thread each, {here['cpu']}, torch {here['torch']}; "
        f"medians of {arguments.repetitions} repetitions of {arguments.steps} steps"
    )
    for heading in ("= 2", "preset", "equal work", "predicted", "imbalance", "tokens/s", "in tokens", "predicted"):
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
