"""Whole training steps of the paper's systems and ours, on two real processes, and as they are simulated.

    .venv/bin/python -m benchmarks.training [--layouts pp,dp,cp] [--presets NAMES] [--repetitions N] [--steps N]
        [--out FILE]

The documents are the source code of Python's standard library. Every preset trains them with pp = 2, dp = 2 and cp = 2
(or two of these at once on four processes: ``--layouts dp+cp,dp+pp``) at hidden size 128 and a 4,096-token window,
about the ratio of attention to everything else of a 7B model at 128K. ``--presets
plain-4d,balanced:even,balanced:level`` compares pools in lock step with level steps. In a repetition the presets
take turns, a step each, in the same processes; the first step is not counted.

Wall time says little on a machine that others use, so a step's seconds are the CPU seconds of its critical path: those
of the slowest rank, and of others while it waits for them (``parts/training/side_by_side.py``), with the median over
repetitions (of two the smaller) of what each rank computes between two messages. Programs that share caches with ranks
still lengthen them: "low to high" has the speed of every repetition alone, and "one micro-batch differs" says how far
its longest measurement is over its shortest, median and worst. "busy" is the mean rank's share, and "of ideal" the
speed over that of plain-4d if its ranks shared its CPU seconds evenly.

Speed is at equal work, over plain-4d in the same layout: predicted seconds of work done in a second. Sequential packing
cuts documents and leaves out part of their attention, so "in tokens", the speed of tokens/s, favours it; both of these,
and "clock", are by wall time. "predicted" is the speed of the same plans by the simulator, from profiles measured
before and after each repetition (``wlb profile``), "apart" what it is over the measured speed, less one, and "error"
the median of what it predicts for a step over its CPU seconds, less one. "exchanged" counts tokens whose keys and
values go to another rank, once for each, over all tokens.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.parts.measurement import chosen, command, console, facts, make_parser, show, write
from benchmarks.parts.training.turns import measure_profile, prepare, train_in_turns, trained
from wlb.job.config import PRESETS

NAMES = [*PRESETS, *(f"balanced:{grouping}" for grouping in ("even", "level", "slices"))]
COLUMNS = {
    "= 2": "{layout}",
    "preset": "{preset}",
    "speed\nlow to high": "{speed:.3f}x\n{least:.2f} to {most:.2f}",
    "one micro-batch\ndiffers": "{median_difference:.0%}\n{worst_difference:.0%}",
    "predicted\napart": "{predicted_speed:.3f}x\n{apart:+.1%}",
    "CPU s\nerror": "{cpu_seconds:.3f}\n{prediction_error:+.1%}",
    "busy\nof ideal": "{busy:.0%}\n{of_ideal:.0%}",
    "exchanged": "{exchanged:.0%}",
    "imbalance": "{imbalance_degree:.3f}",
    "clock\nlow to high": "{clock_speed:.3f}x\n{clock_least:.2f} to {clock_most:.2f}",
    "tokens/s\nin tokens": "{tokens_per_second:,.0f}\n{clock_speed_in_tokens:.3f}x",
}


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layouts", default="pp,dp,cp", help="which of pp, dp and cp are 2, as in dp,dp+cp")
    parser.add_argument("--presets", default=",".join(PRESETS), help="which to train, as in plain-4d,balanced:even")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="counted steps of every preset in a repetition")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a step, over all ranks")
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-training"), help="working files")
    options = parser.parse_args(arguments)
    options.presets = chosen(options.presets, NAMES, "preset")
    options.directory.mkdir(parents=True, exist_ok=True)
    store = prepare(options.directory)
    rows: list[dict[str, Any]] = []
    errors: list[float] = []
    for layout in options.layouts.split(","):
        profiles = [measure_profile(options.directory)]
        for repetition in range(options.repetitions):
            train_in_turns(layout, repetition, options, store)
            profiles.append(measure_profile(options.directory))
        jobs = {preset: trained(layout, preset, options, store, profiles) for preset in options.presets}
        base = jobs.get("plain-4d", jobs[options.presets[0]])
        rows += [job.row(base) for job in jobs.values()]
        errors += [abs(error) for job in jobs.values() for error in job.errors]
    results = facts("torch") | {"steps": options.steps, "repetitions": options.repetitions}
    results |= {"median_absolute_error": median(errors), "most_apart": max(abs(row["apart"]) for row in rows)}
    show(f"measured, one thread a process; {options.repetitions} repetitions of {options.steps} steps", rows, COLUMNS)
    console.print(results)
    write(results | {"results": rows}, options.out)


if __name__ == "__main__":
    sys.exit(main())
