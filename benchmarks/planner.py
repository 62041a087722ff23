"""Benchmark of makespan packing: what its balance costs in delay, beside the other packers, on easy and hard corpora.

    .venv/bin/python benchmarks/planner.py [--lengths FILE] [--out FILE]

Every corpus is packed by ``makespan`` with many settings, by ``variable_length`` with all thresholds on the trade-off
curve of its own search, and by ``sequential``; both packers may hold a document for 8 steps. Where one of the others
has less cost at no more delay than any setting of ``makespan`` with the same L_max, that is printed. Costs are
simulated: imbalance degree and pipeline cost, of a 7B model on H100 with tp 8 and cp 2. Ends with the integer
program's placement of the same steps, and with planning times on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import gcd
from statistics import median
from typing import Any

from parts.curves import LENGTH_FACTORS, Point, Violation, front, makespan_points, other_points, point, violations
from parts.documents import Lengths, batched, corpora, first_steps, split
from parts.measurement import CpuTimer, command, console, facts, freeze_imports, make_parser, show, write
from parts.packing import Row, against_optimum
from wlb.documents.lengths import read_lengths
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.packing.arrange import arrange
from wlb.packing.plan import StepPlan
from wlb.simulate import simulate_steps, simulated_job
from wlb_studies.packing import packer_for

MODEL, HARDWARE, TP, CP = "7b", "h100", 8, 2
LAYOUTS = {"small": (4, 1), "large": (32, 4)}  # micro-batches, dp
FACTOR = 1.5  # L_max in windows, of what follows the curves


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run what was asked for, print tables, and write them as JSON."""
    options = _parse(arguments)
    freeze_imports()
    results: dict[str, Any] = facts("scipy") | {"corpora": []}
    found: list[Violation] = []
    packed: list[Lengths] = []
    for layout in options.layouts:
        micro_batches, dp = LAYOUTS[layout]
        job = _job(micro_batches, options.context_window, dp)
        for name, lengths in _corpora(options, job, layout).items():
            title = f"{name}, {micro_batches} micro-batches"
            points, worse = _compared(title, lengths, job, options.length_factors)
            found += worse
            packed.append(lengths)
            results["corpora"].append({"corpus": title, "points": [asdict(one) for one in points]})
    results["violations"] = [asdict(violation) for violation in found]
    _show_violations(found)
    write(results | _sections(options, packed[0]), options.out)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", metavar="FILE", help="document lengths, packed instead of the corpora")
    parser.add_argument("--corpora", nargs="+", metavar="NAME", help="only these corpora")
    parser.add_argument("--context-window", type=int, default=131_072)
    parser.add_argument("--length-factors", type=float, nargs="+", default=LENGTH_FACTORS, metavar="F")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["small"], help="4 micro-batches, 32 on dp 4")
    parser.add_argument("--steps", type=int, help="global batches packed (default: 160, and 40 in the large layout)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--solver-steps", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds for one integer program")
    parser.add_argument("--timed", type=int, nargs="+", default=[4, 64, 512], metavar="N", help="micro-batches")
    return parser.parse_args(arguments)


def _job(micro_batches: int, context_window: int, dp: int = 1) -> Job:
    sizes: Row = {"micro_batches": micro_batches // dp, "tp": TP, "cp": CP, "pp": 4, "dp": dp}
    return simulated_job(MODEL, context_window, hardware=HARDWARE, **sizes)


def _corpora(options: argparse.Namespace, job: Job, layout: str) -> dict[str, Lengths]:
    steps = options.steps or {"small": 160, "large": 40}[layout]
    if options.lengths:
        lengths = split(read_lengths(options.lengths), job.context_window)
        return {"given lengths": lengths if options.steps is None else _steps(lengths, job, steps)}
    every = corpora(job.context_window, job.packing.micro_batches, steps, options.seed)
    unknown = sorted(set(options.corpora or ()) - set(every))
    if unknown:
        raise UserError(f"unknown corpus {unknown[0]!r}; choose from {', '.join(every)}")
    return {name: every[name]() for name in options.corpora or every}


def _steps(lengths: Lengths, job: Job, steps: int) -> Lengths:
    return first_steps(lengths, steps * job.global_batch * job.context_window)


def _compared(title: str, lengths: Lengths, job: Job, factors: Sequence[float]) -> tuple[list[Point], list[Violation]]:
    """All points of one corpus, printed, and those of the others that ``makespan`` does not cover."""
    points: list[Point] = []
    worse: list[Violation] = []
    for factor in factors:
        ours = makespan_points(lengths, job, factor)
        others = other_points(lengths, job, factor, few=_job(4, job.context_window))
        worse += violations(f"{title}, L_max {factor:g}", ours, others)
        points += ours + others
        show(f"{title}, L_max {factor:g} windows", [one.row() for one in (*front(ours), *front(others))])
    return points, worse


def _show_violations(found: Sequence[Violation]) -> None:
    real = [violation for violation in found if not violation.why]
    console.print(
        f"[bold]makespan is worse at the same delay in {len(real)} points[/bold], and in {len(found)} counting"
    )
    console.print("sequential's, which cuts documents, and those within 0.3% of perfectly balanced micro-batches")
    show("Not covered", [violation.row() for violation in found])


def _sections(options: argparse.Namespace, lengths: Lengths) -> dict[str, Any]:
    """The other questions: against the optimum, beside fixed-length packing, and planning time."""
    job = _job(4, options.context_window)
    plans = _packer(job).plan(lengths.tolist())[: options.solver_steps]
    longest = int(FACTOR * job.context_window)
    placed = against_optimum(plans, job.packing_prices, job.packing.micro_batches, longest, options.time_limit)
    show("Placement against the integer program, same documents", [placed])
    few = _steps(lengths, job, options.solver_steps)
    solved = [point(few, job, "fixed_solver", solver_seconds=options.time_limit), point(few, job, "makespan", FACTOR)]
    rows = [one.row() for one in solved]
    show("Beside fixed-length packing by integer programming", rows)
    times = [_planning(lengths, _job(n, options.context_window, max(1, gcd(n, 16) // 4))) for n in options.timed]
    show("Planning, CPU ms, beside simulated seconds of the step (7B, H100, tp 8, cp 2)", times)
    return {"placement": placed, "fixed_solver": rows, "planning": times}


def _planning(lengths: Lengths, job: Job) -> Row:
    """Median CPU time of planning one step, beside the simulated seconds of the step that hides it."""
    steps = max(5, 256 // job.packing.micro_batches)
    stream = _steps(lengths, job, steps + 1)
    packer, timer = _packer(job), CpuTimer()
    of_steps: list[float] = []
    plans: list[StepPlan] = []
    for documents in batched(stream):
        if planned := timer(packer.plan, documents):
            of_steps.append(timer.seconds)
            timer.calls.clear()
            plans += planned
    seconds = median(of_steps)
    step_seconds = float(simulate_steps([arrange(plan, job.layout.dp) for plan in plans], job).seconds.mean())
    return {
        "micro_batches": job.packing.micro_batches,
        "documents_per_step": len(stream) / (steps + 1),
        "planning_ms": 1e3 * seconds,
        "step_seconds": step_seconds,
        "planning_share": seconds / step_seconds,
    }


def _packer(job: Job) -> Any:
    return packer_for("makespan", job, max_length_factor=FACTOR)


if __name__ == "__main__":
    sys.exit(main())
