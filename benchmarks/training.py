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

Wall time says little on a machine that others use. "CPU s" are the CPU seconds of a step's critical path: those of the
slowest rank, and of others while it waits for them (``examples/side_by_side.py``). "busy" is the mean rank's
share of them. "of ideal" is the speed at equal work over that of plain-4d if its ranks shared its CPU seconds evenly.
"exchanged" counts tokens whose keys and values go to another rank, once for each, over all tokens. ``--presets
plain-4d,best,elastic:even,elastic:level`` compares pools in lock step with level steps.

``--peer`` adds a Hugging Face Trainer with padding-free packing for dp = 2, on the same documents with the same model.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from parts.measurement import chosen, command, facts, show, write
from parts.training.turns import (
    NAMES,
    PROCESSES,
    Trained,
    counted_rows,
    folder,
    in_cpu_seconds,
    measure_profile,
    median_seconds,
    parser_of_turns,
    prepare,
    run,
    train_in_turns,
    trained,
)

PEER = "hf-trainer"
TRAINER = Path(__file__).parent / "parts" / "training" / "hf_trainer.py"
COLUMNS = {
    "= 2": "{layout}",
    "preset": "{preset}",
    "equal work": "{measured_speed_at_equal_work:.3f}x",
    "predicted": "{predicted_speed_at_equal_work:.3f}x",
    "imbalance": "{imbalance_degree:.3f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "in tokens": "{measured_speed:.3f}x",
    "in tokens, predicted": "{predicted_speed:.3f}x",
    "error": "{prediction_error:+.0%}",
    "CPU s": "{cpu_seconds:.3f}",
    "equal work, CPU": "{cpu_speed_at_equal_work:.3f}x",
    "busy": "{share_of_busy_ranks:.0%}",
    "of ideal": "{share_of_ideal:.0%}",
    "exchanged": "{exchanged:.0%}",
}


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of_turns(__doc__, "runs/benchmark-training")
    parser.add_argument(
        "--peer", action="store_true", help="also run a Hugging Face Trainer (needs transformers and accelerate)"
    )
    options = parser.parse_args(arguments)
    options.presets = chosen(options.presets, NAMES, "preset")
    options.directory.mkdir(parents=True, exist_ok=True)
    store = prepare(options.directory)
    profile = measure_profile(options.directory)
    rows: list[dict[str, Any]] = []
    for layout in options.layouts.split(","):
        for repetition in range(options.repetitions):
            train_in_turns(layout, repetition, options, store)
            if options.peer and layout == "dp":
                train_peer(repetition, options, store)
        jobs = {preset: trained(layout, preset, options, store, [profile]) for preset in options.presets}
        base = jobs.get("plain-4d", jobs[options.presets[0]])
        cpu_base = in_cpu_seconds(base, options)
        rows += [row_of(job, base) | cpu_row(in_cpu_seconds(job, options), cpu_base) for job in jobs.values()]
        if options.peer and layout == "dp":
            rows.append(peer_row(base, options) | dict.fromkeys(cpu_row(cpu_base, cpu_base)))
    results = facts("torch", "transformers") | {"steps": options.steps, "repetitions": options.repetitions}
    title = (
        f"measured, a thread for each process; medians of {options.repetitions} repetitions of {options.steps} steps"
    )
    show(title, rows, COLUMNS, str(results))
    write(results | {"results": rows}, options.out)


def row_of(job: Trained, base: Trained) -> dict[str, Any]:
    """Speeds are over ``base``, plain-4d in the same layout; the prediction's error is a step's median."""
    return {
        "layout": job.layout,
        "preset": job.preset,
        "tokens_per_second": job.tokens_per_second,
        "step_seconds": median(job.measured),
        "imbalance_degree": job.imbalance_degree,
        "measured_speed": job.tokens_per_second / base.tokens_per_second,
        "predicted_speed": job.predicted_speed_in_tokens(base),
        "measured_speed_at_equal_work": job.measured_speed(base),
        "predicted_speed_at_equal_work": job.predicted_speed(base),
        "prediction_error": median(job.errors),
    }


def cpu_row(job: Trained, base: Trained) -> dict[str, Any]:
    """The same in CPU seconds; see the top of this file."""
    return {
        "cpu_seconds": mean(job.measured),
        "cpu_speed_at_equal_work": job.measured_speed(base),
        "share_of_busy_ranks": job.busy,
        "share_of_ideal": job.measured_speed(base) * base.busy,
        "exchanged": job.exchanged,
    }


def train_peer(repetition: int, options: argparse.Namespace, store: Path) -> None:
    directory = folder(options, "dp", PEER, repetition)
    shutil.rmtree(directory, ignore_errors=True)
    sizes = ["--micro-batches", options.micro_batches, "--steps", options.steps + 1]
    run(TRAINER, "--store", store, "--out", directory, *sizes, processes=PROCESSES)


def peer_row(base: Trained, options: argparse.Namespace) -> dict[str, Any]:
    """What was measured of the peer; nothing is predicted of it."""
    rows = counted_rows("dp", PEER, options)
    seconds, tokens = median_seconds(rows), [row["tokens"] for row in rows[0]]
    peer = Trained("dp", PEER, seconds, predicted=seconds, work=1.0, tokens=tokens)
    unknown = dict.fromkeys(name for name in row_of(peer, base) if "predict" in name or "work" in name)
    return row_of(peer, base) | unknown


if __name__ == "__main__":
    sys.exit(main())
