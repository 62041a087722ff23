"""Benchmark of the simulator: predicted against measured seconds of real steps on two processes.

    .venv/bin/python benchmarks/fidelity.py [--layouts pp,dp,cp] [--presets NAMES] [--repetitions N] [--steps N]
        [--out FILE]

Trains every preset with pp = 2, dp = 2 and cp = 2 as ``training.py`` does, on the same documents, and simulates the
same plans from profiles measured before and after each repetition. Presets take turns, a step each, in the same
processes; the first step is not counted.

Other programs take the machine's cores away from ranks, so nothing is measured in wall time: a step's measured seconds
are the CPU seconds of its critical path (``parts/training/critical_path.py``), with the median over repetitions of what
each rank computes between two messages. Its predicted seconds are the median over profiles. Programs that share caches
with ranks still lengthen CPU seconds, most of what reads much memory; the spread between repetitions says how much.

Speed is at equal work, over the first preset in the same layout: predicted seconds of work done in a second. "apart" is
predicted over measured speed, less one.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.table import Table

from parts.measurement import machine, versions
from parts.training import critical_path
from parts.training.turns import (
    PROCESSES,
    job_config,
    make_parser,
    measure_profile,
    measured_rows,
    plan_steps,
    predicted_seconds,
    prepare,
    processes_of,
    train_in_turns,
)
from wlb.packing.arrange import micro_batch_seconds
from wlb.workload.profile import WorkloadProfile

TARGET = 0.05  # median absolute error that the simulator is held to
SPEED_TARGET = 0.03  # distance of predicted from measured speed
PROGRAM = Path(critical_path.__file__)


@dataclass(frozen=True)
class Fidelity:
    """One preset in one layout: seconds of each counted step, and speeds over the first preset."""

    layout: str
    preset: str
    measured: list[float]
    predicted: list[float]
    work: float  # predicted seconds of one process that does all of the counted steps
    in_repetitions: list[float]  # measured seconds of all counted steps, in each repetition by itself

    @property
    def errors(self) -> list[float]:
        return [p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True)]

    def measured_speed(self, base: Fidelity) -> float:
        return _speed(self.work, sum(self.measured), base.work, sum(base.measured))

    def predicted_speed(self, base: Fidelity) -> float:
        return _speed(self.work, sum(self.predicted), base.work, sum(base.predicted))

    def speeds_in_repetitions(self, base: Fidelity) -> list[float]:
        pairs = zip(self.in_repetitions, base.in_repetitions, strict=True)
        return [_speed(self.work, mine, base.work, theirs) for mine, theirs in pairs]

    def apart(self, base: Fidelity) -> float:
        return self.predicted_speed(base) / self.measured_speed(base) - 1


def _speed(work: float, seconds: float, base_work: float, base_seconds: float) -> float:
    return work / seconds / (base_work / base_seconds)


def main() -> None:
    arguments = make_parser(__doc__, "runs/benchmark-fidelity").parse_args()
    out: Path = arguments.directory
    out.mkdir(parents=True, exist_ok=True)
    store = prepare(out)
    rows: list[Fidelity] = []
    loads = [os.getloadavg()[0]]
    for layout in arguments.layouts.split(","):
        profiles = [measure_profile(out)]
        for repetition in range(arguments.repetitions):
            program = (PROGRAM, "--out", _notes(layout, repetition, arguments))
            train_in_turns(layout, repetition, arguments, store, program)
            profiles.append(measure_profile(out))
            loads.append(os.getloadavg()[0])
        rows += [fidelity_of(layout, preset, arguments, store, profiles) for preset in arguments.presets]
    report(rows, loads, arguments)


def _notes(layout: str, repetition: int, arguments: argparse.Namespace) -> Path:
    directory: Path = arguments.directory
    return directory / layout / "notes" / str(repetition)


def fidelity_of(
    layout: str, preset: str, arguments: argparse.Namespace, store: Path, profiles: Sequence[WorkloadProfile]
) -> Fidelity:
    config = job_config(layout, preset, arguments, store)
    plans = plan_steps(config, arguments.steps + 1)[1:]
    measured_rows(layout, preset, arguments, plans)  # refuses other steps than those planned
    job = arguments.presets.index(preset)
    repetitions = [
        critical_path.read_notes(_notes(layout, n, arguments), processes_of(layout))
        for n in range(arguments.repetitions)
    ]
    steps = [(job, plan.step + 1) for plan in plans]
    measured = [
        critical_path.step_seconds(
            [*map(critical_path.typical, zip(*(notes[step] for notes in repetitions), strict=True))]
        )
        for step in steps
    ]
    workloads = [profile.workload() for profile in profiles]
    works = [sum(float(micro_batch_seconds(plan.ranks, prices).sum()) for plan in plans) for prices in workloads]
    predicted = [predicted_seconds(plans, config, profile) for profile in profiles]
    return Fidelity(
        layout,
        preset,
        measured,
        [median(of_step) for of_step in zip(*predicted, strict=True)],
        work=mean(works),
        in_repetitions=[sum(critical_path.step_seconds(notes[step]) for step in steps) for notes in repetitions],
    )


def report(rows: Sequence[Fidelity], loads: Sequence[float], arguments: argparse.Namespace) -> None:
    here = machine() | versions("torch")
    table = Table(
        title=f"CPU seconds of a step on {PROCESSES} processes with one thread each, {here['cpu']}, "
        f"torch {here['torch']}; {arguments.repetitions} repetitions of {arguments.steps} steps"
    )
    headings = ("measured", "simulated", "median error", "speed measured", "in repetitions", "predicted", "apart")
    for heading in ("= 2", "preset", *headings):
        table.add_column(heading, justify="left" if heading in ("= 2", "preset") else "right")
    bases = {row.layout: row for row in reversed(rows)}
    for row in rows:
        base = bases[row.layout]
        spread = row.speeds_in_repetitions(base)
        table.add_row(
            row.layout,
            row.preset,
            f"{mean(row.measured):.3f}",
            f"{mean(row.predicted):.3f}",
            f"{median(row.errors):+.1%}",
            f"{row.measured_speed(base):.3f}x",
            f"{min(spread):.2f} to {max(spread):.2f}",
            f"{row.predicted_speed(base):.3f}x",
            f"{row.apart(base):+.1%}",
        )
    overall = median(abs(error) for row in rows for error in row.errors)
    furthest = max(abs(row.apart(bases[row.layout])) for row in rows)
    console = Console(width=120)
    console.print(table)
    console.print(f"load average of the machine's {os.cpu_count()} cores: {min(loads):.1f} to {max(loads):.1f}")
    console.print(f"median |error| of a step's seconds: {overall:.1%} (target {TARGET:.0%})")
    console.print(f"predicted from measured speed, at most apart: {furthest:.1%} (target {SPEED_TARGET:.0%})")
    if arguments.out:
        summary = {"machine": here, "load_averages": loads, "median_absolute_error": overall, "target": TARGET}
        summary |= {"most_apart": furthest, "speed_target": SPEED_TARGET}
        results = [asdict(row) | {"errors": row.errors, "apart": row.apart(bases[row.layout])} for row in rows]
        arguments.out.write_text(json.dumps(summary | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
