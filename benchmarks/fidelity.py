"""Benchmark of the simulator: predicted against measured seconds of real steps on two processes.

    .venv/bin/python benchmarks/fidelity.py [--layouts pp,dp,cp] [--presets NAMES] [--repetitions N] [--steps N]
        [--out FILE]

Trains every preset with pp = 2, dp = 2 and cp = 2 as ``training.py`` does, on the same documents, and simulates the
same plans from profiles measured before and after each repetition. Presets take turns, a step each, in the same
processes; the first step is not counted.

Other programs take the machine's cores away from ranks, so nothing is measured in wall time: a step's measured seconds
are the CPU seconds of its critical path (``examples/side_by_side.py``), with the median over repetitions of what
each rank computes between two messages. Its predicted seconds are the median over profiles. Programs that share caches
with ranks still lengthen CPU seconds, most of what reads much memory; the spread between repetitions says how much.

Speed is at equal work, over the first preset in the same layout: predicted seconds of work done in a second. "apart" is
predicted over measured speed, less one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean, median

from parts.measurement import chosen, command, console, facts, show, write
from parts.training.turns import (
    NAMES,
    PROCESSES,
    Trained,
    in_cpu_seconds,
    measure_profile,
    parser_of_turns,
    prepare,
    train_in_turns,
    trained,
)

TARGET = 0.05  # median absolute error that the simulator is held to
SPEED_TARGET = 0.03  # distance of predicted from measured speed


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of_turns(__doc__, "runs/benchmark-fidelity").parse_args(arguments)
    options.presets = chosen(options.presets, NAMES, "preset")
    options.directory.mkdir(parents=True, exist_ok=True)
    store = prepare(options.directory)
    rows: list[Trained] = []
    loads = [os.getloadavg()[0]]
    for layout in options.layouts.split(","):
        profiles = [measure_profile(options.directory)]
        for repetition in range(options.repetitions):
            train_in_turns(layout, repetition, options, store)
            profiles.append(measure_profile(options.directory))
            loads.append(os.getloadavg()[0])
        of_layout = [trained(layout, preset, options, store, profiles) for preset in options.presets]
        rows += [in_cpu_seconds(row, options) for row in of_layout]
    report(rows, loads, options)


def report(rows: Sequence[Trained], loads: Sequence[float], options: argparse.Namespace) -> None:
    bases = {row.layout: row for row in reversed(rows)}
    shown = []
    for row in rows:
        base = bases[row.layout]
        spread = row.speeds_in_repetitions(base)
        shown.append(
            {
                "= 2": row.layout,
                "preset": row.preset,
                "measured": f"{mean(row.measured):.3f}",
                "simulated": f"{mean(row.predicted):.3f}",
                "median error": f"{median(row.errors):+.1%}",
                "speed measured": f"{row.measured_speed(base):.3f}x",
                "in repetitions": f"{min(spread):.2f} to {max(spread):.2f}",
                "predicted": f"{row.predicted_speed(base):.3f}x",
                "apart": f"{row.apart(base):+.1%}",
            }
        )
    overall = median(abs(error) for row in rows for error in row.errors)
    furthest = max(abs(row.apart(bases[row.layout])) for row in rows)
    results = facts("torch")
    title = f"CPU seconds of a step on {PROCESSES} processes with one thread each; {options.repetitions} repetitions of"
    show(f"{title} {options.steps} steps", shown)
    console.print(results, f"\nload average: {min(loads):.1f} to {max(loads):.1f}")
    console.print(f"median |error| of a step's seconds: {overall:.1%} (target {TARGET:.0%})")
    console.print(f"predicted from measured speed, at most apart: {furthest:.1%} (target {SPEED_TARGET:.0%})")
    results |= {"load_averages": loads, "median_absolute_error": overall, "target": TARGET}
    results |= {"most_apart": furthest, "speed_target": SPEED_TARGET}
    results["results"] = [asdict(row) | {"errors": row.errors, "apart": row.apart(bases[row.layout])} for row in rows]
    write(results, options.out)


if __name__ == "__main__":
    sys.exit(main())
