"""Benchmark of packing: the project's packers beside those of verl, TRL and Megatron-Core, in one run.

    make peers                                   # once: an environment with the peers, .venv-peers
    .venv-peers/bin/python benchmarks/packing.py [--lengths FILE] [--out FILE]

Without the peers' environment (``.venv/bin/python``) their rows are left out. Lengths are drawn by
``wlb.documents.synthetic`` unless a file is given. Every method packs the same documents, and all are priced as a 7B
model on H100 with tp 8 and cp 2. Times are CPU time of the process, the median over ``--turns`` turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from parts.measurement import freeze_imports, machine, versions
from parts.packing.methods import (
    Method,
    OurMethod,
    PeerMethod,
    Setting,
    our_methods,
    tuned_method,
    variable_length_methods,
)
from parts.packing.peers import installed_peers, karmarkar_karp
from parts.packing.sections import Row, balance, memory, oracle, scaling
from wlb.documents.filling import documents_filling
from wlb.documents.lengths import read_lengths
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.packing.packer import PackingTask
from wlb.packing.tuning import search
from wlb.workload import make_workload

SECTIONS = ("balance", "scaling", "oracle", "memory")
MODEL, HARDWARE, TP, CP = "7b", "h100", 8, 2

console = Console(width=160)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections asked for, print their tables and write them as JSON."""
    options = _parser().parse_args(arguments)
    try:
        lengths = _lengths(options)
        results = _run(options, lengths)
    except UserError as error:
        print(f"packing benchmark: error: {error}", file=sys.stderr)
        return 2
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", metavar="FILE", help="document lengths (.json, .txt, .npy, .parquet, .idx)")
    parser.add_argument("--documents", type=int, default=100_000, help="synthetic documents, without --lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context-window", type=int, default=131_072)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--turns", type=int, default=3, help="repetitions of every timing")
    parser.add_argument("--scaling", type=int, nargs="+", default=[4, 16, 64, 256, 512], metavar="N")
    parser.add_argument("--solver-steps", type=int, default=40, help="steps that fixed_solver packs")
    parser.add_argument("--oracle-steps", type=int, default=40)
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds for one integer program")
    parser.add_argument("--memory-steps", type=int, nargs="+", default=[500, 2000, 8000], metavar="STEPS")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    return parser


def _lengths(options: argparse.Namespace) -> NDArray[np.int64]:
    if options.lengths is None:
        return sample_lengths(options.documents, options.context_window, options.seed)
    lengths: NDArray[np.int64] = np.minimum(read_lengths(options.lengths), options.context_window)
    return lengths


def _run(options: argparse.Namespace, lengths: NDArray[np.int64]) -> dict[str, Any]:
    workload = make_workload(MODEL, HARDWARE, tp=TP, cp=CP)
    setting = Setting(options.micro_batches, options.context_window, workload)
    peers, missing = installed_peers()
    freeze_imports()
    for name in missing:
        console.print(f"[yellow]{name} is not installed here and has no row; `make peers` makes an environment with it")
    results: dict[str, Any] = {
        "machine": machine(),
        "versions": versions("wlb-llm", "numpy", "scipy", "verl", "trl", "datasets", "pyarrow", "torch"),
        "setting": {
            "lengths": f"synthetic, seed {options.seed}" if options.lengths is None else "given with --lengths",
            "documents": len(lengths),
            "tokens": int(lengths.sum()),
            "context_window": options.context_window,
            "micro_batches": options.micro_batches,
            "workload": f"{MODEL} on {HARDWARE}, tp {TP}, cp {CP}",
            "turns": options.turns,
            "seed": options.seed,
            "time": "CPU time of the process, median over turns, garbage collector on",
        },
    }
    _print_facts(results)
    if "balance" in options.sections:
        methods: dict[str, Method] = {**our_methods(), **variable_length_methods(options.context_window)}
        methods |= {peer.label: PeerMethod(peer) for peer in peers}
        rows = balance(methods, lengths, setting, options.turns)
        rows += _solver_rows(options, lengths, setting)
        rows += _tuned_rows(options, lengths, setting)
        results["balance"] = rows
        _print_balance(rows)
    if "scaling" in options.sections:
        results["scaling"] = scaling(options.scaling, lengths, setting, karmarkar_karp(peers), min(3, options.turns))
        _print_rows("Planning time of variable_length (2 queues) and of verl's Karmarkar-Karp", results["scaling"])
    if "oracle" in options.sections:
        results["oracle"] = oracle(lengths, setting, options.oracle_steps, options.time_limit)
        _print_rows("Greedy placement against the integer program (Equation 2), same documents", [results["oracle"]])
    if "memory" in options.sections:
        results["memory"] = memory(lengths, setting, options.memory_steps, options.seed)
        _print_rows("Memory of variable_length over a stream (tracemalloc)", results["memory"])
    return results


def _solver_rows(options: argparse.Namespace, lengths: NDArray[np.int64], setting: Setting) -> list[Row]:
    """fixed_solver on the first steps only, with a limit on the seconds of each."""
    tokens = options.solver_steps * setting.global_batch_tokens
    first = lengths[: documents_filling(lengths, tokens)]
    method = OurMethod("fixed_solver", {"solver_seconds": options.time_limit})
    greedy = OurMethod("fixed_greedy")
    label = f"fixed_solver, window 1, {options.time_limit:g} s, first {options.solver_steps} steps"
    return balance({"fixed_greedy, window 1, same steps": greedy, label: method}, first, setting, 1)


def _tuned_rows(options: argparse.Namespace, lengths: NDArray[np.int64], setting: Setting) -> list[Row]:
    """The best setting of ``search`` with L_max up to 2 windows: on the lengths searched, and on others."""
    half = len(lengths) // 2
    rows: list[Row] = []
    for label, searched, packed in (
        ("tuned on these lengths", lengths, lengths),
        ("tuned on the first half, packing the second", lengths[:half], lengths[half:]),
    ):
        task = PackingTask(setting.micro_batches, setting.context_window, setting.workload)
        best = search(searched, task)[0]
        row = balance({f"variable_length, {label}": tuned_method(best)}, packed, setting, options.turns)[0]
        row["outlier_thresholds"] = list(best.outlier_thresholds)
        row["max_length_factor"] = best.max_length_factor
        rows.append(row)
    return rows


def _print_facts(results: dict[str, Any]) -> None:
    for part in ("machine", "versions", "setting"):
        console.print(f"[bold]{part}[/bold] " + ", ".join(f"{name} {value}" for name, value in results[part].items()))


def _print_balance(rows: Sequence[Row]) -> None:
    table = Table(title="Balance, delay and planning time")
    table.add_column("method")
    for heading in (
        "imbalance",
        "token delay",
        "longest",
        "tokens/step CV",
        "longest m.-b.",
        "m.-b./step",
        "ms/step",
        "steps",
        "documents in = out",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['imbalance_degree']:.4f}",
            f"{row['mean_token_delay']:.3f}",
            f"{row['longest_delay']}",
            f"{row['tokens_per_step_cv']:.3f}",
            f"{row['longest_micro_batch_tokens']:,}",
            f"{row['micro_batches_per_step']:.2f}",
            f"{row['planning_ms_per_step']:.3f}",
            f"{row['steps']}",
            f"{row['documents_in']:,}" if row["every_document_whole"] else f"[red]{row['documents_out']:,}",
        )
    console.print(table)


def _print_rows(title: str, rows: Sequence[Row]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    console.print(table)


def _text(value: Any) -> str:
    if value is None:
        return "not tried"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


if __name__ == "__main__":
    sys.exit(main())
