"""Steps of pipelines in slices and planned lists, in the paper's eight jobs (simulated), beside its own systems.

    .venv/bin/python -m studies.benchmarks.pipelines [--windows 8] [--draws 2] [--steps 12] [--jobs NAMES]
        [--checkpointing none|keep_attention|full] [--out FILE]

Every job runs in its own layout with two stages on each pipeline rank and, with "stages free", with one, two or four,
whichever is fastest; preset ``balanced`` also without a pipeline. The larger jobs do not fit an H100 without activation
checkpointing, under any system: "fits" says so, and no system packs for less memory, in more and smaller micro-batches.
With checkpointing planned lists do not divide a backward.
``--windows`` are the context windows of a step. Speed is at equal work over plain-4d with two stages a rank. "of ideal"
is the share of the time in which all GPUs would do W_a + W_l (with tensor parallelism's collectives, and nothing
computed again) if nothing made them wait: no bubble, exchange, latency, or uneven stage. "delay" are the steps that the
mean token waits. "in flight" are the most tokens that a pipeline rank holds, over those of ``balanced`` in lock step
with whole documents and the paper's schedule; "over bound" is what planned lists take over the least that any order
could: the busiest rank's work, after the shortest way to it. "planning" is CPU time of a step. Rows are means over
draws of the documents, with the range of the speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice
from statistics import mean
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from benchmarks.parts.measurement import command, console, make_parser, show, write
from wlb.documents.lengths import read_lengths
from wlb.job.job import Job
from wlb.job.memory.fit import fits
from wlb.job.pipeline import PipelineLoads
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.schedules.operations import BACKWARD, FORWARD, WEIGHT
from wlb.schedules.timing import pipeline_times
from wlb.simulate import simulate
from wlb.simulate.job import PAPER_JOBS, NamedJob
from wlb.workload.base import Checkpointing

_STAGES = (1, 2, 4)  # on a pipeline rank
_WARM_UP = 8  # steps of jobs in which documents wait
_ENOUGH = 1e14  # bytes of memory
_HOLDS = {FORWARD: 1, BACKWARD: -1, WEIGHT: -1}
_MEANS = ("speed", "of_ideal", "delay", "in_flight", "over_bound", "planning_ms")
_COLUMNS = {
    "job": "{job}",
    "system": "{system}",
    "stages": "{stages}",
    "micro-batches": "{micro_batches}",
    "speed": "{speed:.3f}x",
    "range": "{least:.2f} to {most:.2f}",
    "of ideal": "{of_ideal:.3f}",
    "delay": "{delay:.2f}",
    "in flight": "{in_flight:.2f}",
    "over bound": "{over_bound:.3f}",
    "planning": "{planning_ms:.0f} ms",
    "fits": "{fits}",
}
Lengths = NDArray[np.int64]
Row = dict[str, Any]


@command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--draws", type=int, default=2, help="synthetic:40000:WINDOW:11 and those after it")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--jobs", default=",".join(PAPER_JOBS))
    parser.add_argument("--checkpointing", choices=get_args(Checkpointing), default="none")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.jobs.split(","):
        draws = [_rows(name, 11 + draw, options) for draw in range(options.draws)]
        rows += [_averaged(list(of_system)) for of_system in zip(*draws, strict=True)]
        console.print(f"{name} is done")
    show(f"{options.windows} windows a step, simulated", rows, _COLUMNS)
    for system in dict.fromkeys(row["system"] for row in rows):
        mine = [row for row in rows if row["system"] == system]
        means = {
            key: mean(row[key] for row in mine) for key in ("speed", "of_ideal", "delay", "in_flight", "over_bound")
        }
        console.print(
            "mean of {system}: {speed:.3f}x, {of_ideal:.3f} of ideal, delay {delay:.2f}, {in_flight:.2f} in flight, "
            "lists {over_bound:.3f} over their bound".format(system=system, **means)
        )
    asked = {name: getattr(options, name) for name in ("windows", "draws", "steps", "checkpointing")}
    write(asked | {"rows": rows}, options.out)


def _rows(name: str, seed: int, options: argparse.Namespace) -> list[Row]:
    """Every system on one draw of the documents."""
    job, dp, windows, steps = PAPER_JOBS[name], PAPER_JOBS[name].layout.dp, options.windows, options.steps
    lengths = np.asarray(read_lengths(f"synthetic:40000:{job.context_window}:{seed}"))
    usual: Row = {"micro_batches": windows // dp, "activation_checkpointing": options.checkpointing}
    base = job.under("plain-4d", virtual_pp=2, **usual)
    rows: dict[str, Row] = {}
    for system in ("plain-4d", "wlb-llm", "balanced"):
        found = [_row(job.under(system, virtual_pp=n, **usual), lengths, steps, base) for n in _STAGES]
        rows[system] = found[_STAGES.index(2)]
        rows[f"{system}, stages free"] = dict(max(found, key=lambda row: float(row["rate"])))
    whole = _in_lock_step(job.under("balanced", virtual_pp=2, **usual))
    rows["whole documents"] = _row(whole, lengths, steps, base)
    rows["pp = 1"] = _row(_without_pipeline(job, windows, options.checkpointing), lengths, steps, base)
    held = rows["whole documents"]["in_flight"]
    for system, row in rows.items():
        row |= {"job": name, "system": system, "speed": row["rate"] / rows["plain-4d"]["rate"]}
        row["in_flight"] /= held
    return [*rows.values()]


def _row(job: Job, lengths: Lengths, steps: int, base: Job) -> Row:
    warm_up, hardware = _WARM_UP * (job.packing.max_delay > 0), job.hardware
    job = replace(job, hardware=replace(hardware, memory_bytes=_ENOUGH))
    found = simulate(job, lengths, steps, warm_up=warm_up, work_prices=base.work_prices)
    job, ideal = found.job, replace(found.job.costs, recomputed="none")
    plans, started = StepPlanner(job, lengths).plans(warm_up), time.process_time()
    planned = [*islice(plans, steps)]
    seconds = time.process_time() - started
    work = sum(float(ideal.document_seconds([one.length for one in plan.segments]).sum()) for plan in planned)
    return {
        "rate": found.work_rate,
        "stages": job.layout.virtual_pp,
        "micro_batches": job.packing.micro_batches // job.layout.dp,
        "of_ideal": work / found.seconds / job.layout.dp_cp / job.layout.pp,
        "delay": found.token_delay,
        "in_flight": max(_in_flight(job, plan) for plan in planned),
        "over_bound": mean(_over_bound(job, plan) for plan in planned),
        "planning_ms": 1e3 * seconds / steps,
        "fits": "yes" if fits(replace(job, hardware=hardware)) else "no",
    }


def _in_lock_step(job: Job) -> Job:
    """Micro-batches of whole documents in the paper's schedule."""
    packing = job.packing.changed(max_length_factor=1.5)
    job = replace(job, packing=packing, layout=replace(job.layout, schedule="interleaved_1f1b"))
    pools = job.pools
    assert pools is not None
    each = pools.global_batch // job.layout.dp
    return job.with_pools(replace(pools, size=job.layout.cp, micro_batches=each, grouping="even"))


def _without_pipeline(job: NamedJob, windows: int, checkpointing: str) -> Job:
    layout = replace(job.layout, pp=1, dp=job.layout.dp * job.layout.pp)
    packing = {"global_batch": windows, "micro_batches": layout.dp}
    settings: Row = {"micro_batches": 1, "packing": packing, "activation_checkpointing": checkpointing}
    return job._replace(layout=layout).under("balanced", **settings)


def _in_flight(job: Job, plan: StepPlan) -> float:
    """The most tokens that a pipeline rank holds, each as the share of the model that it has of them."""
    if job.layout.pp == 1:
        return max(one.tokens for one in plan.micro_batches)
    shares, most = job.stage_shares * job.layout.pp, 0.0
    for dp, column in enumerate(plan.ranks):
        for of_rank in plan.operations[dp] if plan.operations else job.layout.operations(len(column)):
            changes = (_HOLDS.get(one.kind, 0) * shares[one.stage] * column[one.micro_batch].tokens for one in of_rank)
            most = max(most, *accumulate(changes))
    return float(most)


def _over_bound(job: Job, plan: StepPlan) -> float:
    """What planned lists take over the least that any could; 1 without any."""
    over, place = 1.0, 0
    loads = PipelineLoads(job, plan.micro_batches) if plan.operations else None
    for lists, column in zip(plan.operations, plan.ranks, strict=False):
        assert loads is not None
        load = loads.of(range(place, place + len(column)))
        place += len(column)
        times = pipeline_times(lists, load.forward * 1.0, load.backward * 1.0, load.weight, transfer=load.transfer)
        least = max(
            int((load.forward[rank :: job.layout.pp] + load.backward[rank :: job.layout.pp]).sum())
            + int(load.forward[:rank].sum(axis=0).min() + rank * load.transfer.min())
            for rank in range(job.layout.pp)
        )
        over = max(over, float(times.rank_ends.max()) / least)
    return over


def _averaged(rows: list[Row]) -> Row:
    """One row for all draws."""
    first = rows[0]
    speeds = [row["speed"] for row in rows]
    varying = {
        key: "/".join(dict.fromkeys(str(row[key]) for row in rows)) for key in ("stages", "micro_batches", "fits")
    }
    means = {key: mean(row[key] for row in rows) for key in _MEANS}
    return {"job": first["job"], "system": first["system"], "least": min(speeds), "most": max(speeds)} | varying | means


if __name__ == "__main__":
    raise SystemExit(main())
