"""Every preset trained in turns on real processes, and the same steps simulated: what two benchmarks share.

A layout names the parallel sizes that are 2: ``dp``, or ``dp+cp`` on four processes. ``elastic:even`` is the preset
with that ``packing.grouping``. Presets take turns, a step each, in the same processes
(``examples/side_by_side.py``). Each repetition leaves a ``steps.jsonl`` per preset, whose first step is not counted,
and notes of CPU seconds. The plans of those steps, and their predicted seconds, come from the configuration, the
document lengths and a profile measured on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

from parts.measurement import make_parser
from wlb.documents.store.reader import TokenStore
from wlb.job.config import PRESETS
from wlb.job.config_file import load_config
from wlb.job.planner import StepPlanner
from wlb.profiling.accuracy import micro_batch_seconds
from wlb.simulate import simulate_steps
from wlb.training.preflight import check_job
from wlb.workload import make_workload
from wlb.workload.profile import WorkloadProfile, read_profile

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "examples"))
import side_by_side  # noqa: E402  # the examples are no package

CONFIG = ROOT / "configs" / "tiny.toml"
PROGRAM = Path(side_by_side.__file__)
NAMES = [*PRESETS, *(f"elastic:{grouping}" for grouping in ("even", "alike", "level"))]
VOCABULARY = 512  # that of the preset tiny, which is what is profiled
PROCESSES = 2
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Trained:
    """One preset in one layout: its counted steps, by what was measured and as they are simulated."""

    layout: str
    preset: str
    measured: list[float]  # seconds of each step
    predicted: list[float]
    work: float  # predicted seconds of one process that does all of these steps
    in_repetitions: list[float] = field(default_factory=list)  # measured seconds of all steps, each by itself
    tokens: list[int] = field(default_factory=list)
    imbalance_degree: float = 1.0
    exchanged: float = 0.0  # tokens whose keys a rank gets from another, over all tokens
    busy: float = 1.0  # the mean rank's share of the CPU seconds of critical paths

    @property
    def errors(self) -> list[float]:
        return [p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.measured)

    def measured_speed(self, base: Trained) -> float:
        """At equal work: predicted seconds of work done in a second, over ``base``."""
        return _speed(self.work, sum(self.measured), base.work, sum(base.measured))

    def predicted_speed(self, base: Trained) -> float:
        return _speed(self.work, sum(self.predicted), base.work, sum(base.predicted))

    def predicted_speed_in_tokens(self, base: Trained) -> float:
        return _speed(sum(self.tokens), sum(self.predicted), sum(base.tokens), sum(base.predicted))

    def speeds_in_repetitions(self, base: Trained) -> list[float]:
        pairs = zip(self.in_repetitions, base.in_repetitions, strict=True)
        return [_speed(self.work, mine, base.work, theirs) for mine, theirs in pairs]

    def apart(self, base: Trained) -> float:
        """How far predicted is from measured speed."""
        return self.predicted_speed(base) / self.measured_speed(base) - 1


def _speed(work: float, seconds: float, base_work: float, base_seconds: float) -> float:
    return work / seconds / (base_work / base_seconds)


def parser_of_turns(description: str | None, directory: str) -> argparse.ArgumentParser:
    """The options of a benchmark that trains every preset in turns; working files go to ``directory``."""
    parser = make_parser(description)
    parser.add_argument("--layouts", default="pp,dp,cp", help="which of pp, dp and cp are 2, as in dp,dp+cp")
    parser.add_argument(
        "--presets", default=",".join(PRESETS), help="which to train, as in plain-4d,elastic:even; default: all"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="counted steps of every preset in a repetition")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a step, over all ranks")
    parser.add_argument("--directory", type=Path, default=Path(directory), help="working files")
    return parser


def prepare(directory: Path) -> Path:
    store = directory / "stdlib"
    if not store.with_suffix(".idx").exists():
        run("-m", "wlb", "prepare", "--stdlib", "--train-bpe", VOCABULARY, "--out", store)
    return store


def measure_profile(directory: Path) -> WorkloadProfile:
    """What the model costs on this machine now, on the slowest of two cores that compute at the same time.

    Ranks wait for the slowest, and the cores of a shared machine differ by more than a prediction may err.
    """
    paths = [directory / f"profile-{process}.json" for process in range(PROCESSES)]
    words = [sys.executable, "-m", "wlb", "profile", "--model", "tiny", "--device", "cpu", "--threads", "1", "--quick"]
    running = [subprocess.Popen([*words, "--out", str(path)], env=ONE_THREAD) for path in paths]
    if sum([process.wait() for process in running]):  # of all, or one would go on
        raise SystemExit("wlb profile has failed")
    return max(map(read_profile, paths), key=_measured_seconds)


def _measured_seconds(profile: WorkloadProfile) -> float:
    parts = (profile.attention, profile.linear)
    return sum(sum(part.forward_seconds) + sum(part.backward_seconds) for part in parts)


def run(*words: object, processes: int = 1) -> None:
    """Run this Python with ``words``, under torchrun where several processes are asked for."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), *map(str, words)]
    subprocess.run(command, check=True, env=ONE_THREAD)


def folder(arguments: argparse.Namespace, layout: str, name: str, repetition: int) -> Path:
    """Where the files of one repetition of a preset go."""
    directory: Path = arguments.directory
    return directory / layout / name / str(repetition)


def _overrides(arguments: argparse.Namespace, store: Path, layout: str, preset: str, repetition: int) -> list[str]:
    directory = folder(arguments, layout, preset, repetition)
    name, _, grouping = preset.partition(":")
    return [
        f"preset={name}",
        *([f"packing.grouping={grouping}"] if grouping else []),
        *(f"parallel.{name}={2 if name in layout.split('+') else 1}" for name in ("pp", "dp", "cp")),
        f"data.store={store}",
        f"packing.micro_batches={arguments.micro_batches}",
        f"training.steps={arguments.steps + 1}",
        f"checkpoint.dir={directory / 'checkpoints'}",
        f"checkpoint.every={10**6}",
        f"metrics.dir={directory}",
        "metrics.tensorboard=false",
    ]


def train_in_turns(layout: str, repetition: int, arguments: argparse.Namespace, store: Path) -> None:
    """Train a step of every preset in turn, and note the ranks' CPU seconds."""
    words: list[str] = []
    for preset in arguments.presets:
        shutil.rmtree(folder(arguments, layout, preset, repetition), ignore_errors=True)
        words += ["--job", str(CONFIG), *_overrides(arguments, store, layout, preset, repetition)]
    notes = folder(arguments, layout, "notes", repetition)
    run(PROGRAM, "--out", notes, *words, processes=processes_of(layout))


def processes_of(layout: str) -> int:
    return 1 << len(layout.split("+"))


def counted_rows(layout: str, name: str, arguments: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The lines of steps.jsonl of every repetition, without the first."""
    files = [folder(arguments, layout, name, n) / "steps.jsonl" for n in range(arguments.repetitions)]
    return [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][1:] for file in files]


def median_seconds(repetitions: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    """Of every step, over repetitions."""
    return [median(row["step_seconds"] for row in rows) for rows in zip(*repetitions, strict=True)]


def trained(
    layout: str, preset: str, arguments: argparse.Namespace, store: Path, profiles: Sequence[WorkloadProfile]
) -> Trained:
    """The counted steps of a preset, measured by the clock, and predicted: medians over ``profiles``, works their mean.

    Steps are planned once more, from the job's configuration and document lengths alone; others are refused.
    """
    config = load_config(CONFIG, _overrides(arguments, store, layout, preset, 0))
    job = check_job(config, config.parallel.layout.world_size).job
    plans = [*islice(StepPlanner(job, TokenStore.open(store).lengths).plans(), 1, arguments.steps + 1)]
    rows = counted_rows(layout, preset, arguments)
    tokens = [plan.tokens for plan in plans]
    if any(tokens != [row["tokens"] for row in repetition] for repetition in rows):
        raise SystemExit(f"{layout} {preset}: the steps trained are not the steps planned")
    simulated = [simulate_steps(plans, replace(job, profile=profile)) for profile in profiles]
    prices = [make_workload(profile.model, "cpu", profile=profile) for profile in profiles]
    works = [
        sum(micro_batch_seconds(workload, one.lengths) for plan in plans for one in plan.micro_batches)
        for workload in prices
    ]
    return Trained(
        layout,
        preset,
        median_seconds(rows),
        [median(of_step) for of_step in zip(*(steps.seconds.tolist() for steps in simulated), strict=True)],
        mean(works),
        tokens=tokens,
        imbalance_degree=mean(plan.imbalance for plan in plans),
        exchanged=float(simulated[0].shards.received.sum()) / sum(tokens),
    )


def in_cpu_seconds(row: Trained, options: argparse.Namespace) -> Trained:
    """``row`` with the CPU seconds of its steps' critical paths for what was measured."""
    job = options.presets.index(row.preset)
    steps = [(job, step) for step in range(2, options.steps + 2)]  # counted from 1, without the first
    repetitions = [
        side_by_side.read_notes(folder(options, row.layout, "notes", n), processes_of(row.layout))
        for n in range(options.repetitions)
    ]
    ranks = [
        [side_by_side.typical(of_rank) for of_rank in zip(*(notes[step] for notes in repetitions), strict=True)]
        for step in steps
    ]
    measured = [side_by_side.step_seconds(of_step) for of_step in ranks]
    alone = [sum(side_by_side.step_seconds(notes[step]) for step in steps) for notes in repetitions]
    busy = sum(mean(notes[-1].cpu_seconds for notes in of_step) for of_step in ranks) / sum(measured)
    return replace(row, measured=measured, in_repetitions=alone, busy=busy)
