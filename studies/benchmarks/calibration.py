"""What wrong prices and slow GPUs cost level steps, and what calibration leaves of that.

    .venv/bin/python -m studies.benchmarks.calibration [--draws N] [--steps N] [--noise SHARE] [--out FILE]

Simulated: llama3-8b on H200s, a window of 128K, one context window a GPU and step, no tensor parallelism. A job plans
by the preset while its attention really takes other times, or some of its GPUs are slower. The simulator prices every
plan by what is true. ``calibrated`` jobs are given the seconds of the micro-batches that a rank runs alone, off by
``--noise``, and evaluate them as ``wlb train`` does with ``training.calibrate = 4``; ``known`` jobs are told what is
true. Losses are seconds of the last half of the steps, over those of a job that plans by the true prices, or of one
without slow GPUs; medians and the range over draws of documents and of which GPUs are slow. The least possible is the
number of GPUs over the sum of their speeds.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.parts.measurement import command, facts, make_parser, show, write
from wlb.documents.lengths import read_lengths
from wlb.job.job import Job
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.runtime.calibration import Calibration
from wlb.runtime.own_lists import own_batches
from wlb.simulate import simulated_job
from wlb.simulate.decide import decide
from wlb.simulate.rate import simulate_steps

Row = dict[str, Any]
_WINDOW, _DOCUMENTS = 131_072, 20_000
_EVERY = 4  # steps between calibrations
_ATTENTION = {"attention x0.6": 0.6, "attention x1.25": 1.25, "attention x1.6": 1.6}  # seconds, over the preset's
_SLOW = {  # how many GPUs, their speed, and in what steps they follow each other, or at random
    "1 of 32 GPUs 10% slow": (1, 0.9, None),
    "1 of 32 GPUs 30% slow": (1, 0.7, None),
    "8 of 32 GPUs 15% slow, at random": (8, 0.85, None),
    "two of each node 15% slow": (8, 0.85, 4),
    "one node of four 15% slow": (8, 0.85, 1),
}
_COLUMNS = {
    "what is not as assumed": "{case}",
    "loss without calibration": "{without:.1%}",
    "range": "{without_range}",
    "calibrated": "{calibrated:.1%}",
    "its range": "{calibrated_range}",
    "known": "{known:.1%}",
    "known range": "{known_range}",
    "least possible": "{least:.1%}",
    "plans changed": "{updates:.0f}",
}


def assumed_job(gpus: int, lengths: NDArray[np.int64]) -> Job:
    """The job as it is planned before anything is measured."""
    settings: Row = {"hardware": "h200", "dp": gpus, "micro_batches": 1, "packing": {"grouping": "level"}}
    return decide(simulated_job("llama3-8b", _WINDOW, "balanced", **settings), lengths)


def with_attention(job: Job, factor: float) -> Job:
    """The same job on a device whose attention takes ``factor`` times as long."""
    return replace(job, hardware=replace(job.hardware, attention=job.hardware.attention.times(1 / factor)))


def with_slow_gpus(job: Job, count: int, speed: float, step: int | None, rng: np.random.Generator) -> Job:
    speeds = np.ones(job.layout.pool_size)
    slow = rng.choice(job.layout.pool_size, count, replace=False) if step is None else np.arange(count) * step
    speeds[slow] = speed
    return replace(job, speeds=tuple(speeds.tolist()))


def measured(plans: Sequence[StepPlan], true: Job, noise: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """What ``Calibration.update`` takes of some steps: all but the first and last of every rank's own list."""
    of_ranks: list[list[tuple[float, float, float]]] = [[] for _ in range(true.layout.pool_size)]
    for plan in map(true.priced_as_run, plans):
        for rank, rows in enumerate(of_ranks):
            for one in own_batches(plan, 0, rank, lambda part: part)[1:-1]:
                if len(one.ranks) == 1:
                    d = np.array(one.lengths, np.float64)
                    rows.append((float((d**2).sum()), float(d.sum()), one.workload * np.exp(noise * rng.normal())))
    table = np.zeros((len(of_ranks), max(1, *map(len, of_ranks)), 3))
    for rank, rows in enumerate(of_ranks):
        table[rank, : len(rows)] = np.array(rows).reshape(-1, 3)
    return table


def plans_of(job: Job, lengths: NDArray[np.int64], steps: int) -> list[StepPlan]:
    return [*islice(StepPlanner(job, lengths).plans(), steps)]


def calibrated_plans(
    job: Job, true: Job, lengths: NDArray[np.int64], steps: int, noise: float, rng: np.random.Generator
) -> tuple[list[StepPlan], int]:
    """The plans of a job that calibrates itself on what is ``true``, and how often they changed."""
    found, planner = Calibration(_EVERY, job.layout.pool_size, torch.device("cpu")), StepPlanner(job, lengths)
    plans: list[StepPlan] = []
    updates = 0
    while len(plans) < steps:
        planned = [next(planner) for _ in range(_EVERY)]
        plans += [one.plan for one in planned]
        if found.update(measured(plans[-_EVERY:], true, noise, rng)):
            updates += 1
            planner = StepPlanner(job.measured(found.prices, found.speeds), lengths)
            planner.load_state_dict(planned[-1].state)
    return plans, updates


def losses(job: Job, true: Job, ideal: Job, lengths: NDArray[np.int64], options: argparse.Namespace, draw: int) -> Row:
    """Of jobs that do not know what is ``true``, calibrate themselves, or know it, over the ``ideal`` job."""
    steps, rng = options.steps, np.random.default_rng(draw)
    calibrated, updates = calibrated_plans(job, true, lengths, steps, options.noise, rng)
    base = _seconds(plans_of(ideal, lengths, steps), ideal)
    without = _seconds(plans_of(job, lengths, steps), true) / base - 1
    known = _seconds(plans_of(true, lengths, steps), true) / base - 1
    least = true.layout.pool_size / sum(true.speeds) - 1 if true.speeds else 0.0
    found = _seconds(calibrated, true) / base - 1
    return {"without": without, "calibrated": found, "known": known, "least": least, "updates": updates}


def _seconds(plans: Sequence[StepPlan], true: Job) -> float:
    """Of the last half, in which calibrated plans have settled."""
    return float(simulate_steps(plans[len(plans) // 2 :], true).seconds.sum())


def over_draws(case: str, rows: Sequence[Row]) -> Row:
    """Medians, and the range of losses."""
    row: Row = {"case": case} | {name: float(np.median([one[name] for one in rows])) for name in rows[0]}
    for name in ("without", "calibrated", "known"):
        values = [one[name] for one in rows]
        row[f"{name}_range"] = f"{min(values):.1%} to {max(values):.1%}"
    return row


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, and write them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--draws", type=int, default=5, help="of documents, and of which GPUs are slow")
    parser.add_argument("--steps", type=int, default=24, help=f"a multiple of {_EVERY}")
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of measured seconds")
    parser.add_argument("--gpus", type=int, default=64, help="of the jobs with other prices")
    options = parser.parse_args(arguments)
    found: dict[str, list[Row]] = {case: [] for case in (*_ATTENTION, *_SLOW)}
    for draw in range(options.draws):
        lengths = read_lengths(f"synthetic:{_DOCUMENTS}:{_WINDOW}:{draw}")
        job = assumed_job(options.gpus, lengths)
        for case, factor in _ATTENTION.items():
            true = with_attention(job, factor)
            found[case].append(losses(job, true, true, lengths, options, draw))
        job = assumed_job(32, lengths)
        for case, (count, speed, step) in _SLOW.items():
            true = with_slow_gpus(job, count, speed, step, np.random.default_rng(draw))
            found[case].append(losses(job, true, job, lengths, options, draw))
    rows = [over_draws(case, of_draws) for case, of_draws in found.items()]
    prices, slow = rows[: len(_ATTENTION)], rows[len(_ATTENTION) :]
    show(f"{options.gpus} GPUs, over a job that plans by the true prices", prices, _COLUMNS)
    show("32 GPUs, over 32 GPUs at full speed", slow, _COLUMNS)
    write(facts("torch") | {"rows": rows}, options.out)


if __name__ == "__main__":
    sys.exit(main())
