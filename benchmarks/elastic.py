"""Benchmark of elastic pools: simulated speed beside the other systems, what each ingredient adds, and planning time.

    .venv/bin/python benchmarks/elastic.py [--sections meshes,ingredients,paper,planning] [--steps N] [--out FILE]

All systems train the same documents (``synthetic:60000:WINDOW:0``) on the same GPUs with the same global batch. Speeds
are at equal work, simulated; interleaved 1F1B of two stages a rank throughout. Planning and sharding times are CPU time
of one thread: a whole step planned, and the micro-batches of one pool sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import mean, median
from typing import Any
from unittest import mock

import numpy as np

from parts.measurement import CpuTimer, chosen, command, facts, make_parser, show, write
from wlb.documents.lengths import read_lengths
from wlb.job.job import Job
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.sharding import _known, make_shard_plan
from wlb.sharding.pieces import Locality, locality
from wlb.simulate import SimulationResult, simulate, simulated_job
from wlb.simulate.decide import decide
from wlb.simulate.job import NAMED_JOBS, PAPER_JOBS

Row = dict[str, Any]
INTERLEAVED: Row = {"virtual_pp": 2, "schedule": "interleaved_1f1b"}
MESHES = {131_072: (4, 2), 262_144: (4, 4), 524_288: (4, 8)}  # dp and cp by window; tp 8, pp 4
SYSTEMS = ("plain-4d", "wlb-llm", "best", "elastic")
WAITING = {"max_delay": 8, "lookahead": 0.5}  # elastic, where documents may wait
_MANY = 8192  # tokens, at which the seconds of one are taken
IDLE = ("micro-batches", "dp ranks", "cp ranks", "cp exchange")


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections asked for, print their tables and write them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--sections", default="meshes,ingredients,paper,planning", help="which to run")
    parser.add_argument("--steps", type=int, default=24, help="simulated steps of every system")
    parser.add_argument("--turns", type=int, default=5, help="repetitions of what is timed")
    options = parser.parse_args(arguments)
    sections: dict[str, Callable[[], list[Row]]] = {
        "meshes": lambda: [row for name in JOBS for row in of_systems(name, options.steps)],
        "ingredients": lambda: [row for window in MESHES for row in ingredients(window, options.steps)],
        "paper": lambda: paper_jobs(options.steps),
        "planning": lambda: planning(options.turns),
    }
    results: dict[str, Any] = facts() | {"steps": options.steps}
    for name in chosen(options.sections, [*sections], "section"):
        results[name] = sections[name]()
        show(name, results[name])
    write(results, options.out)


def mesh_job(window: int, system: str, model: str = "llama3-8b", **settings: Any) -> Job:
    """A model on tp 8, pp 4 and the dp x cp of the window, 4 micro-batches a rank."""
    dp, cp = MESHES[window]
    sizes: Row = {"tp": 8, "pp": 4, "dp": dp, "cp": cp, "micro_batches": 4} | INTERLEAVED
    return simulated_job(model, window, system, **(sizes | settings))


JOBS: dict[str, Callable[[str], Job]] = {
    **{f"llama3-8b, {window // 1024}K": partial(mesh_job, window) for window in MESHES},
    "7b, 128K": partial(mesh_job, 131_072, model="7b"),  # whose key and value heads are not grouped
    "405b-128k": partial(NAMED_JOBS["405b-128k"].under, **INTERLEAVED),
}


def of_systems(name: str, steps: int) -> list[Row]:
    """Every system on one of ``JOBS``."""
    job = JOBS[name]
    base = _simulated(job("plain-4d"), steps)
    return [{"job": name, "system": system} | _row(_simulated(job(system), steps, base), base) for system in SYSTEMS]


def ingredients(window: int, steps: int) -> list[Row]:
    """Elastic with one of its ingredients left out at a time; its pools stay, where they are not what is left out."""
    base = _simulated(mesh_job(window, "plain-4d"), steps)
    whole = _simulated(mesh_job(window, "elastic"), steps, base).job
    pool, count = whole.layout.cp, whole.micro_batches_per_rank
    hybrid = mesh_job(window, "elastic", sharding="hybrid", pool=pool, packing={"pool_micro_batches": count})
    variants: dict[str, tuple[Job, AbstractContextManager[Any]]] = {
        "elastic": (whole, nullcontext()),
        "hybrid in place of uneven slices": (hybrid, nullcontext()),
        "slices of equal seconds, forward and backward uneven": (
            whole,
            mock.patch("wlb.sharding.elastic._Slicing._take", _of_equal_seconds),
        ),
        "every rank waits for the busiest": (whole, mock.patch("wlb.sharding.locality", _one_collective)),
        "keys and values in one part": (whole, mock.patch("wlb.sharding.plan.MOST_PARTS", 1)),
        "nothing sent again in the backward": (whole, mock.patch("wlb.sharding.pieces.keeps_received", _all_kept)),
        "as few micro-batches as best": (
            mesh_job(window, "elastic", packing={"pool_micro_batches": 4}),
            nullcontext(),
        ),
        "half the pool": (mesh_job(window, "elastic", pool=pool // 2), nullcontext()),
        "best with the pool for a cp group, documents wait": (
            mesh_job(window, "best", dp=whole.layout.dp, cp=pool, micro_batches=whole.global_batch // whole.layout.dp),
            nullcontext(),
        ),
    }
    rows = []
    for name, (job, left_out) in variants.items():
        _known.cache_clear()  # what another variant sharded is not kept
        with left_out:
            rows.append({"window": window, "variant": name} | _row(_simulated(job, steps, base), base))
    return rows


def _of_equal_seconds(
    slicing: Any, row: Any, first: int, last: int, tokens: float, attention: float
) -> tuple[int, int]:
    """In place of ``_Slicing._take``: one contiguous slice, level in the sum of attention and all else alone."""
    per_token = float(slicing._workload.linear_seconds(_MANY)) / _MANY
    seconds = row.tokens * per_token + row.attention
    wanted = seconds[last] - (tokens * per_token + attention)
    return first, max(first, int(np.searchsorted(seconds[: last + 1], wanted)))


def _all_kept(received: Any, *_: Any) -> Any:
    """In place of ``keeps_received``: as if memory allowed that."""
    return np.ones(np.shape(received), np.bool_)


def _one_collective(*arguments: Any) -> Locality:
    """In place of ``locality``: nobody has its keys before the busiest rank of the group has moved all of its own."""
    where = locality(*arguments)
    busiest = where.waits_for.max(axis=1, keepdims=True)
    return where._replace(waits_for=np.broadcast_to(busiest, where.waits_for.shape))


def paper_jobs(steps: int) -> list[Row]:
    """Speeds in the layouts of the paper's jobs, elastic's also where documents may wait; the last row has means."""
    rows: list[Row] = []
    for name, paper in PAPER_JOBS.items():
        base = _simulated(paper.under("plain-4d", **INTERLEAVED), steps)
        jobs = {system: paper.under(system, **INTERLEAVED) for system in SYSTEMS[1:]}
        jobs["elastic, waiting"] = paper.under("elastic", packing=WAITING, **INTERLEAVED)
        results = {system: _simulated(job, steps, base) for system, job in jobs.items()}
        speeds = {system: result.speed_at_equal_work(base) for system, result in results.items()}
        rows.append({"job": name} | speeds | {"its delay": results["elastic, waiting"].token_delay})
    means = {column: mean(row[column] for row in rows) for column in rows[0] if column != "job"}
    return [*rows, {"job": "mean"} | means]


def planning(turns: int) -> list[Row]:
    """Milliseconds of a step on 256 and on 8,192 GPUs, and their part of the step's simulated seconds."""
    largest = NAMED_JOBS["405b-128k"].under("elastic", **INTERLEAVED)
    jobs = {"256 GPUs": mesh_job(131_072, "elastic"), "8,192 GPUs": largest}
    rows = []
    for name, undecided in jobs.items():
        lengths = read_lengths(f"synthetic:60000:{undecided.context_window}:0")
        job = decide(undecided, lengths)
        plans = StepPlanner(job, lengths).plans()
        timed_plan, timed_shards = CpuTimer(), CpuTimer()
        for _ in range(turns):
            plan = timed_plan(next, plans)
            timed_shards(_shard_all, plan, job)
        planned, sharded = median(timed_plan.calls), median(timed_shards.calls)
        step = _simulated(job, turns).mean_step_seconds
        row = {
            "job": name,
            "planning ms": 1e3 * planned,
            "sharding ms": 1e3 * sharded,
            "of the step": (planned + sharded) / step,
        }
        rows.append(row | job.sizes)
    return rows


def _shard_all(plan: StepPlan, job: Job) -> None:
    """The micro-batches of one pool."""
    for micro_batch in filter(len, (held.lengths for held in plan.ranks[0])):
        make_shard_plan(micro_batch, job.layout.cp, "elastic", workload=job.costs)


def _simulated(job: Job, steps: int, base: SimulationResult | None = None) -> SimulationResult:
    lengths = read_lengths(f"synthetic:60000:{job.context_window}:0")
    run = partial(simulate, job, lengths, steps)
    return run() if base is None else run(work_prices=base.job.work_prices)


def _row(result: SimulationResult, base: SimulationResult) -> Row:
    idle = sum(result.where[cause] for cause in IDLE) / result.mean_step_seconds
    return {
        "speed": result.speed_at_equal_work(base),
        "waiting and exchange": idle,
        "bubbles": result.where["bubbles"] / result.mean_step_seconds,
        "token delay": result.token_delay,
        "tokens CV": result.tokens_cv,
        "pool": result.job.layout.cp,
        "micro-batches": result.job.micro_batches_per_rank,
    }


if __name__ == "__main__":
    sys.exit(main())
