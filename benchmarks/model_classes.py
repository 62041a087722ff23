"""What imbalance each class of model leaves, and what balancing gains on it: simulated, on the same GPUs and documents.

    .venv/bin/python benchmarks/model_classes.py [--models a,b,..] [--steps N] [--out FILE]

All models train ``synthetic:60000:131072:0`` on 256 H100, tp 8 cp 2 pp 4 dp 4, 16 windows of 128K a step, interleaved
1F1B of two stages a rank. ``best`` has an L_max of 1.5 windows. Memory is predicted beside it, with full
activation checkpointing, and decides nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from parts.measurement import machine, versions
from wlb.documents.lengths import read_lengths
from wlb.errors import UserError
from wlb.job.memory.fit import predicted_memory
from wlb.job.memory.step import gib
from wlb.simulate import SimulatedJob, simulate, simulated_job
from wlb.workload import make_workload, model_shape
from wlb.workload.weights import parameters

Row = dict[str, Any]
WINDOW = 131_072
CLASSES = {
    "7b": "dense",
    "llama3-8b": "dense, grouped K/V",
    "mixtral-8x7b": "experts",
    "qwen3-30b-a3b": "experts",
    "deepseek-v3": "experts, latent attention",
    "qwen3-next-80b-a3b": "experts, linear 3:1",
    "gpt-oss-20b": "experts, local 1:1",
    "gemma3-27b": "local 5:1",
    "mistral-7b": "local",
}
SYSTEMS: dict[str, Row] = {"plain-4d": {}, "best": {"packing": {"max_length_factor": 1.5}}, "elastic": {}}
WAITING = ("micro-batches", "dp ranks", "cp ranks")


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate the models asked for, print a table and write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(CLASSES), help="which, by name or directory")
    parser.add_argument("--steps", type=int, default=24, help="simulated steps of every system")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args(arguments)
    try:
        rows = [row_of(name, options.steps) for name in options.models.split(",")]
    except UserError as error:
        print(f"model classes benchmark: error: {error}", file=sys.stderr)
        return 2
    Console(width=160).print(table_of(rows))
    if options.out:
        results = {"machine": machine(), "versions": versions(), "steps": options.steps, "models": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def job_of(model: str, system: str) -> SimulatedJob:
    sizes: Row = {"tp": 8, "cp": 2, "pp": 4, "dp": 4, "virtual_pp": 2, "schedule": "interleaved_1f1b"}
    return simulated_job(model, WINDOW, system, micro_batches=4, **sizes, **SYSTEMS[system])


def row_of(model: str, steps: int) -> Row:
    """One model under all systems; speeds are at equal work, over plain-4d."""
    lengths = read_lengths(f"synthetic:60000:{WINDOW}:0")
    plain = simulate(job_of(model, "plain-4d"), lengths, steps)
    others = {
        system: simulate(job_of(model, system), lengths, steps, work_prices=plain.job.work_prices)
        for system in SYSTEMS
        if system != "plain-4d"
    }
    shape, workload = model_shape(model), make_workload(plain.job.shape, tp=8)
    documents = np.minimum(lengths, WINDOW)
    attention = float(workload.attention_seconds(documents).sum() / workload.document_seconds(documents).sum())
    return {
        "model": model,
        "class": CLASSES.get(model, ""),
        "weights": parameters(shape),
        "active": parameters(shape, active=True),
        "attention_share": attention,
        "micro_batch_imbalance": plain.imbalance["micro_batches"],
        "waiting": sum(plain.where[cause] for cause in WAITING) / plain.mean_step_seconds,
        "speed": {system: result.speed_at_equal_work(plain) for system, result in others.items()},
        "memory_bytes": predicted_memory(replace(plain.job, activation_checkpointing="full")).total,
    }


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(
        title="256 H100, tp 8 cp 2 pp 4 dp 4, window 131,072; simulated",
        caption="attention: of a document's predicted seconds; micro-batches: heaviest over mean, plain-4d\n"
        "waiting: of plain-4d's step, for heavier micro-batches and for dp and cp ranks; speeds at equal work\n"
        "GiB: of a GPU under plain-4d with full activation checkpointing; a rank gathers all experts of its stages",
    )
    headings = ("class", "model", "weights (active), B", "attention", "micro-batches", "waiting", "best", "elastic")
    for place, heading in enumerate((*headings, "GiB")):
        table.add_column(heading, justify="left" if place < 2 else "right")
    for row in rows:
        table.add_row(
            row["class"],
            row["model"],
            f"{row['weights'] / 1e9:.1f} ({row['active'] / 1e9:.1f})",
            f"{row['attention_share']:.0%}",
            f"{row['micro_batch_imbalance']:.2f}",
            f"{row['waiting']:.0%}",
            *(f"{speed:.2f}x" for speed in row["speed"].values()),
            gib(row["memory_bytes"]),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
