"""Benchmark of the simulator: predicted against measured seconds of real steps on two processes.

    .venv/bin/python benchmarks/fidelity.py [--layouts pp,dp,cp] [--presets NAMES] [--repetitions N] [--steps N]
        [--out FILE]

Trains every preset with pp = 2, dp = 2 and cp = 2 as ``training.py`` does, on the same documents, and simulates the
same plans from profiles measured before and after each repetition, as the speed of a shared machine drifts; a step's
predicted seconds are the mean of the two. Its error is predicted over measured less one; what is reported is the
median error and the median absolute error over all repetitions. Presets take turns, a step each, in the same processes;
the first step is not counted. Every process needs a core of its own.

The simulator's ranks compute as evenly as the profile says. How much longer ranks take on this machine because they
are interrupted at different moments is measured beside (``parts/training/jitter.py``): errors are no smaller than that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from parts.measurement import machine, versions
from parts.training.turns import (
    PROCESSES,
    ROOT,
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
from wlb.workload.profile import WorkloadProfile

TARGET = 0.05  # median absolute error that the simulator is held to


@dataclass(frozen=True)
class Fidelity:
    """One preset in one layout; seconds of each counted step of every repetition."""

    layout: str
    preset: str
    measured: list[float]
    predicted: list[float]

    @property
    def errors(self) -> list[float]:
        return [p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True)]


def main() -> None:
    arguments = make_parser(__doc__, "runs/benchmark-fidelity").parse_args()
    out: Path = arguments.directory
    out.mkdir(parents=True, exist_ok=True)
    store = prepare(out)
    jitter = measure_jitter(out)
    rows: list[Fidelity] = []
    for layout in arguments.layouts.split(","):
        profiles = [measure_profile(out)]
        for repetition in range(arguments.repetitions):
            train_in_turns(layout, repetition, arguments, store)
            profiles.append(measure_profile(out))
        rows += [fidelity_of(layout, preset, arguments, store, profiles) for preset in arguments.presets]
    report(rows, jitter, arguments)


def measure_jitter(directory: Path) -> dict[str, float]:
    """How many times as long two ranks take if they synchronise, by the milliseconds after which they do."""
    path = directory / "jitter.json"
    run(ROOT / "benchmarks" / "parts" / "training" / "jitter.py", "--out", path, processes=PROCESSES)
    measured: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return measured


def fidelity_of(
    layout: str, preset: str, arguments: argparse.Namespace, store: Path, profiles: Sequence[WorkloadProfile]
) -> Fidelity:
    config = job_config(layout, preset, arguments, store)
    plans = plan_steps(config, arguments.steps + 1)[1:]
    repetitions = measured_rows(layout, preset, arguments, plans)
    measured = [row["step_seconds"] for rows in repetitions for row in rows]
    at_profile = [predicted_seconds(plans, config, profile) for profile in profiles]
    predicted = [(before + after) / 2 for pair in pairwise(at_profile) for before, after in zip(*pair, strict=True)]
    return Fidelity(layout, preset, measured, predicted)


def report(rows: Sequence[Fidelity], jitter: dict[str, float], arguments: argparse.Namespace) -> None:
    here = machine() | versions("torch")
    table = Table(
        title=f"seconds of a step on {PROCESSES} processes with one thread each, {here['cpu']}, torch {here['torch']}; "
        f"{arguments.repetitions} repetitions of {arguments.steps} steps"
    )
    for heading in ("= 2", "preset", "measured", "simulated", "median error", "median |error|"):
        table.add_column(heading, justify="left" if heading in ("= 2", "preset") else "right")
    for row in rows:
        table.add_row(
            row.layout,
            row.preset,
            f"{median(row.measured):.3f}",
            f"{median(row.predicted):.3f}",
            f"{median(row.errors):+.1%}",
            f"{median(map(abs, row.errors)):.1%}",
        )
    overall = median(abs(error) for row in rows for error in row.errors)
    console = Console(width=110)
    console.print(table)
    costs = ", ".join(f"{ratio:.2f} ({apart} ms)" for apart, ratio in jitter.items())
    console.print(f"two ranks that synchronise every so often take this many times as long as two that do not: {costs}")
    console.print(f"median |error| over all steps: {overall:.1%} (target {TARGET:.0%})")
    if arguments.out:
        summary = {"machine": here, "jitter": jitter, "median_absolute_error": overall, "target": TARGET}
        results = [asdict(row) | {"errors": row.errors} for row in rows]
        arguments.out.write_text(json.dumps(summary | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
