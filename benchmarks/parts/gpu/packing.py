"""Micro-batches that every packer makes, run through a block forward and backward: imbalance measured beside predicted.

Seconds are those of the whole model: a block's times the number of layers, and once embedding, output head and loss.
The first steps are left out, in which outlier queues fill.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.parts.gpu.setting import Comparison, Result, Row, Setting, Workloads, measure
from wlb.documents.synthetic import sample_lengths
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.profiling.accuracy import micro_batch_seconds
from wlb.profiling.timing import Case
from wlb.simulate import simulated_job
from wlb.workload import Costs
from wlb_studies.packing import packer_for

METHODS = (
    "sequential",
    "fixed_greedy",
    "fixed_greedy:8",
    "fixed_solver",
    "variable_length:paper",
    "variable_length",
    "makespan",
    "elastic",
)
MICRO_BATCHES = 4
LONGEST_FACTOR = 1.5  # L_max in windows
SKIPPED_STEPS = 8
SOLVER_SECONDS = 0.5
DOCUMENTS_AT_A_TIME = 64
DOCUMENTS = 20_000
MEASURED = "measured"

Lengths = tuple[int, ...]


def packing(setting: Setting, workloads: Workloads) -> Result:
    """Plans are made with the last of ``workloads``, which is the measured one where there is one."""
    pricing = list(workloads.values())[-1]
    methods = [name for name in METHODS if name != "fixed_solver" or importlib.util.find_spec("scipy")]
    planned = {method: _steps(method, setting, pricing) for method in methods}
    every = {_key(m) for steps in planned.values() for step in steps for m in step.micro_batches}
    seconds = {MEASURED: _measure(every, setting)}
    for name, workload in workloads.items():
        seconds[name] = {lengths: micro_batch_seconds(workload, lengths) for lengths in seconds[MEASURED]}
    rows = [_row(method, steps, seconds) for method, steps in planned.items()]
    measured, *predicted = (list(of_all.values()) for of_all in seconds.values())
    return Result(rows, [Comparison("packed micro-batches", measured, dict(zip(workloads, predicted, strict=True)))])


def _steps(method: str, setting: Setting, pricing: Costs) -> list[StepPlan]:
    job = simulated_job(setting.shape, setting.packed_window, micro_batches=MICRO_BATCHES, packed_by=pricing)
    packer = packer_for(method, job, max_length_factor=LONGEST_FACTOR, solver_seconds=SOLVER_SECONDS)
    lengths = sample_lengths(DOCUMENTS, setting.packed_window, setting.seed)
    steps: list[StepPlan] = []
    for start in range(0, len(lengths), DOCUMENTS_AT_A_TIME):
        if len(steps) >= SKIPPED_STEPS + setting.packed_steps:
            break
        arrivals = enumerate(lengths[start : start + DOCUMENTS_AT_A_TIME].tolist(), start)
        steps += packer.plan(arrivals)
    return steps[SKIPPED_STEPS : SKIPPED_STEPS + setting.packed_steps]


def _key(micro_batch: MicroBatch) -> Lengths:
    return tuple(micro_batch.lengths)


def _measure(micro_batches: set[Lengths], setting: Setting) -> dict[Lengths, float]:
    """Seconds of the whole model, forward and backward."""
    bench = setting.workbench(setting.shape, max(map(sum, micro_batches)))
    cases: dict[Lengths | int, tuple[Case, float]] = {}  # by lengths: a block; by tokens: what surrounds the blocks
    for lengths in micro_batches:
        cases[lengths] = bench.block(lengths), 1.0
        cases[sum(lengths)] = bench.ends(sum(lengths))
    timings = measure({key: case for key, (case, _) in cases.items()}, setting, "packing")
    seconds = {key: timings[key].both / share for key, (_, share) in cases.items()}
    return {lengths: seconds[lengths] * setting.shape.layers + seconds[sum(lengths)] for lengths in micro_batches}


def _row(method: str, steps: Sequence[StepPlan], seconds: Mapping[str, dict[Lengths, float]]) -> Row:
    """Means over steps of the longest over the mean micro-batch, by all ``seconds`` of micro-batches."""
    of_steps = {
        name: [[of_all[_key(m)] for m in step.micro_batches] for step in steps] for name, of_all in seconds.items()
    }
    return {
        "method": method,
        "steps": len(steps),
        "tokens": sum(step.tokens for step in steps),
        "imbalance": {
            name: float(np.mean([max(times) / np.mean(times) for times in made])) for name, made in of_steps.items()
        },
        "measured_seconds": of_steps[MEASURED],
    }
