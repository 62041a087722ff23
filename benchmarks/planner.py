"""Benchmark of makespan packing: what its balance costs in delay, beside the other packers, on easy and hard corpora.

    .venv/bin/python benchmarks/planner.py [--lengths FILE] [--json FILE] [--png FILE]

Every corpus is packed by ``makespan`` with many settings, by ``variable_length`` with all thresholds on the trade-off
curve of its own search, and by ``sequential``; both packers may hold a document for 8 steps. Where one of the others
has less cost at no more delay than any setting of ``makespan`` with the same L_max, that is printed. Costs are
simulated: imbalance degree and pipeline cost, of a 7B model on H100 with tp 8 and cp 2. Ends with the integer
program's placement of the same steps, and with planning times on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from math import gcd
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parts.measurement import freeze_imports, machine, versions
from parts.planner.corpora import Lengths, corpora, given_corpus
from parts.planner.curves import (
    LENGTH_FACTORS,
    Corpus,
    Point,
    Violation,
    draw_curves,
    front,
    makespan_points,
    other_points,
    violations,
)
from parts.planner.sections import fixed_solver, placement, planning_times, targets
from parts.streams import first_steps
from wlb.errors import UserError
from wlb.simulate import SimulatedJob, simulated_job

MODEL, HARDWARE, TP, CP = "7b", "h100", 8, 2
LAYOUTS = {"small": (4, 1, 4), "large": (32, 4, 4)}  # micro-batches, dp, pp
TIMED_PP = 4

console = Console(width=150)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, print tables, and write JSON and a picture."""
    options = _parser().parse_args(arguments)
    freeze_imports()
    try:
        results, curves = _run(options)
    except UserError as error:
        print(f"planner benchmark: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if options.png:
        draw_curves(curves, options.png)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", metavar="FILE", help="document lengths, packed instead of the corpora")
    parser.add_argument("--corpora", nargs="+", metavar="NAME", help="only these corpora")
    parser.add_argument("--context-window", type=int, default=131_072)
    parser.add_argument("--length-factors", type=float, nargs="+", default=LENGTH_FACTORS, metavar="F")
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=["small"], help="4 micro-batches, or 32 on dp 4"
    )
    parser.add_argument("--steps", type=int, help="global batches packed (default: 160, and 40 in the large layout)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--solver-steps", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds for one integer program")
    parser.add_argument("--timed", type=int, nargs="+", default=[4, 64, 512], metavar="N", help="micro-batches")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the curves of the first layout and L_max")
    return parser


def _run(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, list[Point]]]:
    window = options.context_window
    results: dict[str, Any] = {"machine": machine(), "versions": versions("wlb-llm", "numpy", "scipy"), "corpora": []}
    found: list[Violation] = []
    curves: dict[str, list[Point]] = {}
    first: Lengths | None = None
    for layout in options.layouts:
        micro_batches, dp, pp = LAYOUTS[layout]
        job = _job(micro_batches, window, dp, pp)
        for name, lengths in _corpora(options, job, layout).items():
            title = f"{name}, {micro_batches} micro-batches"
            corpus = Corpus(lengths, job)
            points, worse = _compared(title, corpus, lengths, options.length_factors)
            curves.setdefault(title, [p for p in points if p.length_factor in (1.0, options.length_factors[0])])
            found += worse
            first = lengths if first is None else first
            results["corpora"].append({"corpus": title, "points": [point.to_json() for point in points]})
            if options.lengths and layout == "small":
                results["targets"] = targets(points)
                _print_rows("Targets", results["targets"])
    results["violations"] = [violation.to_json() for violation in found]
    _print_violations(found)
    assert first is not None
    results |= _sections(options, first)
    return results, curves


def _job(micro_batches: int, context_window: int, dp: int = 1, pp: int = 4) -> SimulatedJob:
    return simulated_job(
        MODEL, context_window, hardware=HARDWARE, micro_batches=micro_batches // dp, tp=TP, cp=CP, pp=pp, dp=dp
    )


def _corpora(options: argparse.Namespace, job: SimulatedJob, layout: str) -> dict[str, Lengths]:
    steps = options.steps or {"small": 160, "large": 40}[layout]
    if options.lengths:
        lengths = given_corpus(options.lengths, job.context_window)
        return {"given lengths": lengths if options.steps is None else _steps(lengths, job, steps)}
    every = corpora(job.context_window, job.packing.micro_batches, steps, options.seed)
    unknown = sorted(set(options.corpora or ()) - set(every))
    if unknown:
        raise UserError(f"unknown corpus {unknown[0]!r}; choose from {', '.join(every)}")
    return {name: every[name]() for name in options.corpora or every}


def _steps(lengths: Lengths, job: SimulatedJob, steps: int) -> Lengths:
    return first_steps(lengths, steps * job.global_batch * job.context_window)


def _compared(
    title: str, corpus: Corpus, lengths: Lengths, factors: Iterable[float]
) -> tuple[list[Point], list[Violation]]:
    """All points of one corpus, printed, and those of the others that ``makespan`` does not cover."""
    points: list[Point] = []
    worse: list[Violation] = []
    few = Corpus(lengths, _job(4, corpus.job.context_window))  # thresholds hold for any number
    for factor in factors:
        ours = makespan_points(corpus, factor)
        others = other_points(corpus, factor, few.tuned(factor))
        worse += violations(f"{title}, L_max {factor:g}", ours, others)
        points += ours + others
        _print_curve(f"{title}, L_max {factor:g} windows", ours, others)
    return points, worse


def _sections(options: argparse.Namespace, lengths: Lengths) -> dict[str, Any]:
    job = _job(4, options.context_window)
    placed = placement(lengths, job, options.solver_steps, options.time_limit)
    _print_rows("Placement against the integer program, same documents", [placed])
    few = Corpus(_steps(lengths, job, options.solver_steps), job)
    solved = [_row(point) for point in fixed_solver(few, options.time_limit)]
    _print_rows("Beside fixed-length packing by integer programming", solved)
    jobs = [_job(n, options.context_window, max(1, gcd(n, 16) // 4), TIMED_PP) for n in options.timed]
    times = planning_times(lengths, jobs)
    _print_rows("Planning, CPU ms, beside simulated seconds of the step (7B, H100, tp 8, cp 2)", times)
    return {"placement": placed, "fixed_solver": solved, "planning": times}


def _print_curve(title: str, ours: Sequence[Point], others: Sequence[Point]) -> None:
    chosen = {"makespan": front(ours, "imbalance"), "others": front(others, "imbalance")}
    rows = [_row(point) for points in chosen.values() for point in points]
    _print_rows(title, rows)


def _row(point: Point) -> dict[str, Any]:
    setting = point.setting
    words = [f"{name} {value}" for name, value in setting.items() if name != "max_delay" or not value]
    return {
        "packer": point.packer,
        "setting": ", ".join(words),
        "token_delay": point.delay,
        "longest": point.longest_delay,
        "imbalance": point.imbalance,
        "pipeline_cost": point.pipeline_cost,
        "tokens_per_step_cv": point.tokens_per_step_cv,
    }


def _print_violations(found: Sequence[Violation]) -> None:
    real = [violation for violation in found if not violation.why]
    console.print(
        f"[bold]makespan is worse at the same delay in {len(real)} points[/bold], and in {len(found)} counting"
    )
    console.print("sequential's, which cuts documents, and those within 0.3% of perfectly balanced micro-batches")
    rows = [
        {
            "corpus": violation.corpus,
            "cost": violation.cost,
            "other": violation.point.packer,
            "token_delay": violation.point.delay,
            "its": getattr(violation.point, violation.cost),
            "makespan's": violation.reached,
            "but": violation.why,
        }
        for violation in found
    ]
    if rows:
        _print_rows("Not covered", rows)


def _print_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
