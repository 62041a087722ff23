"""The preset ``balanced``: simulated speed beside the other systems, and planning time.

    .venv/bin/python -m studies.benchmarks.balanced [--sections meshes,paper,planning] [--steps N] [--out FILE]

All systems train the same documents (``synthetic:60000:WINDOW:0``) on the same GPUs with the same global batch. Speeds
are at equal work, simulated, with two stages a rank: interleaved 1F1B, and ``balanced`` in the order that it plans.
Planning and sharding times are CPU time of one thread: a whole step planned, and the micro-batches of one pool sharded.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median
from typing import Any

from benchmarks.parts.measurement import CpuTimer, chosen, command, facts, make_parser, show, write
from wlb.documents.lengths import read_lengths
from wlb.job.job import Job
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.sharding import make_shard_plan
from wlb.simulate import SimulationResult, simulate, simulated_job
from wlb.simulate.decide import decide
from wlb_studies.paper.jobs import ALL_JOBS, PAPER_JOBS

Row = dict[str, Any]
TWO_STAGES: Row = {"virtual_pp": 2}
MESHES = {131_072: (4, 2), 262_144: (4, 4), 524_288: (4, 8)}  # dp and cp by window; tp 8, pp 4
SYSTEMS = ("plain-4d", "wlb-llm", "balanced")
IDLE = ("micro-batches", "dp ranks", "cp ranks", "cp exchange")


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections asked for, print their tables and write them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--sections", default="meshes,paper,planning", help="which to run")
    parser.add_argument("--steps", type=int, default=24, help="simulated steps of every system")
    parser.add_argument("--turns", type=int, default=5, help="repetitions of what is timed")
    options = parser.parse_args(arguments)
    sections: dict[str, Callable[[], list[Row]]] = {
        "meshes": lambda: [row for name in JOBS for row in of_systems(name, options.steps)],
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
    sizes: Row = {"tp": 8, "pp": 4, "dp": dp, "cp": cp, "micro_batches": 4} | TWO_STAGES
    return simulated_job(model, window, system, **(sizes | settings))


JOBS: dict[str, Callable[[str], Job]] = {
    **{f"llama3-8b, {window // 1024}K": partial(mesh_job, window) for window in MESHES},
    "7b, 128K": partial(mesh_job, 131_072, model="7b"),  # whose key and value heads are not grouped
    "405b-128k": partial(ALL_JOBS["405b-128k"].under, **TWO_STAGES),
}


def of_systems(name: str, steps: int) -> list[Row]:
    """Every system on one of ``JOBS``."""
    job = JOBS[name]
    base = _simulated(job("plain-4d"), steps)
    return [{"job": name, "system": system} | _row(_simulated(job(system), steps, base), base) for system in SYSTEMS]


def paper_jobs(steps: int) -> list[Row]:
    """Speeds in the layouts of the paper's jobs; the last row has means."""
    rows: list[Row] = []
    for name, paper in PAPER_JOBS.items():
        base = _simulated(paper.under("plain-4d", **TWO_STAGES), steps)
        results = {system: _simulated(paper.under(system, **TWO_STAGES), steps, base) for system in SYSTEMS[1:]}
        rows.append({"job": name} | {system: one.speed_at_equal_work(base) for system, one in results.items()})
    means = {column: mean(row[column] for row in rows) for column in rows[0] if column != "job"}
    return [*rows, {"job": "mean"} | means]


def planning(turns: int) -> list[Row]:
    """Milliseconds of a step on 256 and on 8,192 GPUs, and their part of the step's simulated seconds."""
    largest = ALL_JOBS["405b-128k"].under("balanced", **TWO_STAGES)
    jobs = {"256 GPUs": mesh_job(131_072, "balanced"), "8,192 GPUs": largest}
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
        make_shard_plan(micro_batch, job.layout.pool_size, "balanced", workload=job.costs)


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
        "pool": result.job.layout.pool_size,
        "micro-batches": result.job.rank_micro_batches,
    }


if __name__ == "__main__":
    sys.exit(main())
