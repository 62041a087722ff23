"""Loops of fixed groups under expert parallelism: what ``wlb.balance`` gains where ranks meet in every micro-batch.

    .venv/bin/python -m studies.benchmarks.slots [--model NAME] [--gpus N] [--ep N] [--lengths LENGTHS] [--out FILE]

All ranks run the same number of micro-batches, as ranks that share experts must: they exchange tokens in every layer of
every micro-batch. ``balance`` divides the documents of a step into such slots, by tokens alone or by work. Simulated:
tp 1, cp 1, one document never on two ranks, micro-batches of up to two windows, and the least recomputation that fits.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any, get_args

import numpy as np

from benchmarks.parts.measurement import command, facts, make_parser, show, write
from wlb import balance
from wlb.documents.lengths import read_lengths
from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.job.memory.fit import fits
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.simulate import simulate_steps, simulated_job
from wlb.simulate.filling import global_batches
from wlb.workload.base import Checkpointing

_WINDOWS = 2  # of a micro-batch, at most
COLUMNS = {
    "balanced by": "{by}",
    "speed over tokens": "{speed:.2f}x",
    "least to most": "{least:.2f} to {most:.2f}",
    "micro-batches of a rank": "{micro_batches:.0f}",
    "waiting": "{waiting:.0%}",
}


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate steps of both divisions, print a table and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--ep", type=int, default=8)
    parser.add_argument("--context-window", type=int, default=32_768)
    parser.add_argument("--batch-tokens", type=int, default=2**22)
    parser.add_argument("--lengths", help="document lengths; default: synthetic")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)
    window = options.context_window
    lengths = np.minimum(read_lengths(options.lengths or f"synthetic:60000:{window}:0"), window)
    job = job_of(options.model, window, options.gpus, options.ep)
    steps = [*islice(global_batches(lengths, job.data, options.batch_tokens), options.steps)]
    seconds: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    for by in ("tokens", "work"):
        found = [step_of(job, documents, by) for documents in steps]
        seconds[by] = [one for one, _, _ in found]
        speeds = [base / one for base, one in zip(seconds["tokens"], seconds[by], strict=True)]
        spread = {"speed": median(speeds), "least": min(speeds), "most": max(speeds)}
        more = {"micro_batches": found[0][1], "waiting": median(waiting for *_, waiting in found)}
        rows.append({"by": by} | spread | more)
    shown = f"{options.model}, {options.gpus} H100, ep {options.ep}, documents up to {window:,} tokens; simulated"
    show(shown, rows, COLUMNS, f"{options.steps} steps of {options.batch_tokens:,} tokens")
    write(facts() | {"options": vars(options) | {"out": None}, "rows": rows}, options.out)


def job_of(model: str, window: int, gpus: int, ep: int) -> Job:
    """The job with the least recomputation that fits. Raises ``UserError`` if none does."""
    packing = {"micro_batch_windows": _WINDOWS, "global_batch": _WINDOWS * gpus}
    job = simulated_job(model, window, "plain-4d", dp=gpus, ep=ep, weights="kept", packing=packing)
    jobs = (replace(job, activation_checkpointing=kind) for kind in get_args(Checkpointing))
    for one in jobs:
        if fits(one):
            return one
    raise UserError(
        f"{model} with micro-batches of {_WINDOWS * window} tokens does not fit {gpus} GPUs with ep {ep}; raise ep"
    )


def step_of(job: Job, documents: np.ndarray, by: str) -> tuple[float, int, float]:
    """Seconds of a step of ``documents``, micro-batches of a rank, and the share of the step spent waiting."""
    costs = documents if by == "tokens" else job.workload.document_seconds(documents)
    divided = balance(documents, ranks=job.layout.dp, max_tokens=job.max_tokens, costs=costs)
    ranks = tuple(
        tuple(MicroBatch(tuple(Segment(one, 0, int(documents[one])) for one in part), 0.0) for part in mine)
        for mine in divided
    )
    count = len(ranks[0])
    packing = job.packing.changed(global_batch=_WINDOWS * job.layout.dp * count)
    step = simulate_steps([StepPlan(0, ranks)], replace(job, packing=packing))
    return float(step.seconds[0]), count, float(step.where["dp ranks"][0] / step.seconds[0])


if __name__ == "__main__":
    sys.exit(main())
