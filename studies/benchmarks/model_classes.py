"""What imbalance each class of model leaves, and what balancing gains on it: simulated, on the same GPUs and documents.

    .venv/bin/python -m studies.benchmarks.model_classes [--models a,b,..] [--steps N] [--out FILE]

All models train ``synthetic:60000:131072:0`` on 256 H100, tp 8 cp 2 pp 4 dp 4, 16 windows of 128K a step, two stages
a rank: interleaved 1F1B, and ``balanced`` in the order that it plans. Memory is predicted beside it, with full
activation checkpointing, and decides nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.parts.measurement import command, facts, make_parser, show, write
from wlb.documents.lengths import read_lengths
from wlb.job.job import Job
from wlb.job.memory.fit import predicted_memory
from wlb.simulate import simulate, simulated_job
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
    "gpt-oss-20b": "experts, local 1:1",
    "gemma3-27b": "local 5:1",
    "mistral-7b": "local",
}
SYSTEMS = ("plain-4d", "wlb-llm", "balanced")
CAPTION = """attention: of a document's predicted seconds; micro-batches: heaviest over mean, plain-4d
waiting: of plain-4d's step, for heavier micro-batches and for dp and cp ranks; speeds at equal work
GiB: of a GPU under plain-4d with full activation checkpointing; a rank gathers all experts of its stages"""
COLUMNS = {
    "model": "{model}",
    "class": "{class}",
    "weights (active), B": "{weights:.1f} ({active:.1f})",
    "attention": "{attention_share:.0%}",
    "micro-batches": "{micro_batch_imbalance:.2f}",
    "waiting": "{waiting:.0%}",
    "wlb-llm": "{speed[wlb-llm]:.2f}x",
    "balanced": "{speed[balanced]:.2f}x",
    "GiB": "{memory_gib:.3g}",
}
WAITING = ("micro-batches", "dp ranks", "cp ranks")


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate the models asked for, print a table and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", default=",".join(CLASSES), help="which, by name or directory")
    parser.add_argument("--steps", type=int, default=24, help="simulated steps of every system")
    options = parser.parse_args(arguments)
    rows = [row_of(name, options.steps) for name in options.models.split(",")]
    show("256 H100, tp 8 cp 2 pp 4 dp 4, window 131,072; simulated", rows, COLUMNS, CAPTION)
    write(facts() | {"steps": options.steps, "models": rows}, options.out)


def job_of(model: str, system: str) -> Job:
    sizes: Row = {"tp": 8, "cp": 2, "pp": 4, "dp": 4, "virtual_pp": 2}
    return simulated_job(model, WINDOW, system, micro_batches=4, **sizes)


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
        "weights": parameters(shape) / 1e9,
        "active": parameters(shape, active=True) / 1e9,
        "attention_share": attention,
        "micro_batch_imbalance": plain.imbalance["micro_batches"],
        "waiting": sum(plain.where[cause] for cause in WAITING) / plain.mean_step_seconds,
        "speed": {system: result.speed_at_equal_work(plain) for system, result in others.items()},
        "memory_gib": predicted_memory(replace(plain.job, activation_checkpointing="full")).total / 2**30,
    }


if __name__ == "__main__":
    sys.exit(main())
