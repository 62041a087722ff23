"""Every preset trained in turns on real processes, and the same steps simulated.

A layout names the parallel sizes that are 2: ``dp``, or ``dp+cp`` on four processes. ``balanced:even`` is the preset
with that ``packing.grouping``. Presets take turns, a step each, in the same processes (``side_by_side``). A repetition
leaves a ``steps.jsonl`` per preset, whose first step is not counted, and notes of CPU seconds. The plans of those steps
and their predicted seconds come from the configuration, the document lengths and profiles measured on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.parts.measurement import differences, lower_median, spread
from benchmarks.parts.training.side_by_side import (
    files_of,
    launch,
    micro_batch_seconds,
    read_notes,
    step_seconds,
    typical,
)
from wlb.documents.store.reader import TokenStore
from wlb.job.config_file import load_config
from wlb.job.planner import StepPlanner
from wlb.simulate import simulate_steps
from wlb.training.preflight import check_job
from wlb.workload import make_workload
from wlb.workload.profile import WorkloadProfile, read_profile

CONFIG = Path("configs/tiny.toml")
CORES = 2


@dataclass(frozen=True)
class Trained:
    """One preset in one layout: its counted steps, by what was measured and as they are simulated."""

    layout: str
    preset: str
    clock: list[float]  # seconds of each step, lower medians over repetitions
    clock_of_repetitions: list[float]  # of all steps
    cpu: list[float]  # CPU seconds of each step's critical path
    cpu_of_repetitions: list[float]  # of all steps
    differences: dict[str, float]  # of the CPU seconds of one micro-batch, in the repetitions
    busy: float  # the mean rank's share of these
    predicted: list[float]  # seconds of each step, medians over profiles
    work: float  # predicted seconds of one process that does all of these steps
    tokens: list[int]
    imbalance_degree: float
    exchanged: float  # tokens whose keys a rank gets from another, over all tokens

    @property
    def errors(self) -> list[float]:
        return [p / m - 1 for p, m in zip(self.predicted, self.cpu, strict=True)]

    def row(self, base: Trained) -> dict[str, Any]:
        """Speeds are over ``base``: at equal work, predicted seconds of work done in a second."""

        def speed(mine: float, its: float) -> float:
            return self.work / mine / (base.work / its)

        measured, predicted = speed(sum(self.cpu), sum(base.cpu)), speed(sum(self.predicted), sum(base.predicted))
        clock = speed(sum(self.clock), sum(base.clock))
        repeated = [speed(*pair) for pair in zip(self.cpu_of_repetitions, base.cpu_of_repetitions, strict=True)]
        by_clock = [speed(*pair) for pair in zip(self.clock_of_repetitions, base.clock_of_repetitions, strict=True)]
        return {
            "layout": self.layout,
            "preset": self.preset,
            "speed": measured,
            **spread([measured, *repeated]),
            **self.differences,
            "predicted_speed": predicted,
            "apart": predicted / measured - 1,
            "cpu_seconds": mean(self.cpu),
            "predicted_seconds": mean(self.predicted),
            "prediction_error": median(self.errors),
            "busy": self.busy,
            "of_ideal": measured * base.busy,
            "clock_speed": clock,
            **{f"clock_{name}": bound for name, bound in spread([clock, *by_clock]).items()},
            "tokens_per_second": sum(self.tokens) / sum(self.clock),
            "clock_speed_in_tokens": sum(self.tokens) / sum(self.clock) / (sum(base.tokens) / sum(base.clock)),
            "imbalance_degree": self.imbalance_degree,
            "exchanged": self.exchanged,
        }


def prepare(directory: Path) -> Path:
    """The prefix of a store of the standard library, made once."""
    store = directory / "stdlib"
    if not store.with_suffix(".idx").exists():
        words = ["prepare", "--stdlib", "--train-bpe", "512", "--out", str(store)]  # as tiny has, which is profiled
        subprocess.run([sys.executable, "-m", "wlb", *words], check=True)
    return store


def measure_profile(directory: Path) -> WorkloadProfile:
    """What the model costs on this machine now, on the slowest of two cores that compute at the same time.

    Ranks wait for the slowest, and the cores of a shared machine differ by more than a prediction may err.
    """
    paths = [directory / f"profile-{core}.json" for core in range(CORES)]
    words = [sys.executable, "-m", "wlb", "profile", "--model", "tiny", "--device", "cpu", "--threads", "1", "--quick"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([*words, "--out", str(path)], env=one_thread) for path in paths]
    if sum([process.wait() for process in running]):  # of all, or one would go on
        raise SystemExit("wlb profile has failed")
    return max(map(read_profile, paths), key=_measured_seconds)


def _measured_seconds(profile: WorkloadProfile) -> float:
    parts = (profile.attention, profile.linear)
    return sum(sum(part.forward_seconds) + sum(part.backward_seconds) for part in parts)


def train_in_turns(layout: str, repetition: int, options: argparse.Namespace, store: Path) -> None:
    """Train a step of every preset in turn, and note the ranks' CPU seconds."""
    words: list[str] = []
    for preset in options.presets:
        shutil.rmtree(_folder(options, layout, preset, repetition), ignore_errors=True)
        words += ["--job", str(CONFIG), *_settings(options, store, layout, preset, repetition)]
    launch(_processes(layout), _folder(options, layout, "notes", repetition), words)


def trained(
    layout: str, preset: str, options: argparse.Namespace, store: Path, profiles: list[WorkloadProfile]
) -> Trained:
    """The counted steps of a preset. They are planned once more, from the job alone; others are refused."""
    config = load_config(CONFIG, _settings(options, store, layout, preset, 0))
    job = check_job(config, config.parallel.layout.world_size).job
    plans = [*islice(StepPlanner(job, TokenStore.open(store).lengths).plans(), 1, options.steps + 1)]
    tokens = [plan.tokens for plan in plans]
    rows = [_counted(_folder(options, layout, preset, n)) for n in range(options.repetitions)]
    if any(tokens != [row["tokens"] for row in of_repetition] for of_repetition in rows):
        raise SystemExit(f"{layout} {preset}: the steps trained are not the steps planned")
    simulated = [simulate_steps(plans, replace(job, profile=profile)) for profile in profiles]
    prices = [make_workload(profile.model, "cpu", profile=profile) for profile in profiles]
    lengths = [segment.length for plan in plans for segment in plan.segments]
    clock = [[row["step_seconds"] for row in of_repetition] for of_repetition in rows]
    return Trained(
        layout,
        preset,
        clock=lower_median(clock).tolist(),
        clock_of_repetitions=[*map(sum, clock)],
        **_cpu_seconds(layout, preset, options),
        predicted=[median(of_step) for of_step in zip(*(steps.seconds.tolist() for steps in simulated), strict=True)],
        work=mean(float(workload.document_seconds(lengths).sum()) for workload in prices),
        tokens=tokens,
        imbalance_degree=mean(plan.imbalance for plan in plans),
        exchanged=float(simulated[0].shards.received.sum()) / sum(tokens),
    )


def _cpu_seconds(layout: str, preset: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the notes of a preset's ranks say: fields of ``Trained``."""
    job = options.presets.index(preset)
    steps = [(job, step) for step in range(2, options.steps + 2)]  # counted from 1, without the first
    folders = [_folder(options, layout, "notes", n) for n in range(options.repetitions)]
    repetitions = [read_notes(folder, _processes(layout)) for folder in folders]
    ranks = [[typical(one) for one in zip(*(notes[step] for notes in repetitions), strict=True)] for step in steps]
    seconds = [step_seconds(of_step) for of_step in ranks]
    return {
        "cpu": seconds,
        "cpu_of_repetitions": [sum(step_seconds(notes[step]) for step in steps) for notes in repetitions],
        "busy": sum(mean(notes[-1].cpu_seconds for notes in of_step) for of_step in ranks) / sum(seconds),
        "differences": differences(
            [
                [one for step in steps for rank in notes[step] for one in micro_batch_seconds(rank)]
                for notes in repetitions
            ]
        ),
    }


def _counted(folder: Path) -> list[dict[str, Any]]:
    """The lines of steps.jsonl without the first."""
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()][1:]


def _processes(layout: str) -> int:
    return 1 << len(layout.split("+"))


def _folder(options: argparse.Namespace, layout: str, name: str, repetition: int) -> Path:
    directory: Path = options.directory
    return directory / layout / name / str(repetition)


def _settings(options: argparse.Namespace, store: Path, layout: str, preset: str, repetition: int) -> list[str]:
    directory = _folder(options, layout, preset, repetition)
    name, _, grouping = preset.partition(":")
    return [
        f"preset={name}",
        *([f"packing.grouping={grouping}"] if grouping else []),
        *(f"parallel.{size}={2 if size in layout.split('+') else 1}" for size in ("pp", "dp", "cp")),
        f"data.store={store}",
        f"packing.global_batch={options.micro_batches}",
        f"training.steps={options.steps + 1}",
        *files_of(directory),
    ]
