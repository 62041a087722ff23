"""Benchmark of packing: the project's packers beside those of verl, TRL and Megatron-Core, in one run.

    make peers                                   # once: an environment with the peers, .venv-peers
    .venv-peers/bin/python benchmarks/packing.py [--lengths FILE] [--out FILE]

Without the peers' environment (``.venv/bin/python``) their rows are left out. Lengths are drawn by
``wlb.documents.synthetic`` unless a file is given. Every method packs the same documents, and all are priced as a 7B
model on H100 with tp 8 and cp 2. Times are CPU time of the process, the median over ``--turns`` turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from parts.documents import Lengths, add_length_options, chosen_lengths, described
from parts.measurement import command, console, facts, freeze_imports, make_parser, show, write
from parts.packing import Row, Task, against_optimum, balance, memory, our_methods, ours, scaling, theirs
from parts.peers import installed_peers, karmarkar_karp
from wlb.packing.registry import make_packer
from wlb.workload import make_workload
from wlb_studies.filling import documents_filling
from wlb_studies.thresholds import search

SECTIONS = ("balance", "scaling", "oracle", "memory")
MODEL, HARDWARE, TP, CP = "7b", "h100", 8, 2
BALANCE = {
    "method": "{method}",
    "imbalance": "{imbalance_degree:.4f}",
    "token delay": "{mean_token_delay:.3f}",
    "longest": "{longest_delay}",
    "tokens/step CV": "{tokens_per_step_cv:.3f}",
    "longest m.-b.": "{longest_micro_batch_tokens:,}",
    "m.-b./step": "{micro_batches_per_step:.2f}",
    "ms/step": "{planning_ms_per_step:.3f}",
    "steps": "{steps}",
    "documents in": "{documents_in:,}",
    "out": "{documents_out:,}",
    "whole": "{every_document_whole}",
}


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections asked for, print their tables and write them as JSON."""
    options = _parse(arguments)
    lengths = np.minimum(chosen_lengths(options), options.context_window)
    task = Task(options.micro_batches, options.context_window, make_workload(MODEL, HARDWARE, tp=TP, cp=CP))
    peers, missing = installed_peers()
    freeze_imports()
    for name in missing:
        console.print(f"[yellow]{name} is not installed here and has no row; `make peers` makes an environment with it")
    results: dict[str, Any] = facts("scipy", "verl", "trl", "datasets", "pyarrow", "torch")
    results["setting"] = described(options, lengths) | {
        "micro_batches": options.micro_batches,
        "workload": f"{MODEL} on {HARDWARE}, tp {TP}, cp {CP}",
        "turns": options.turns,
        "time": "CPU time of the process, median over turns, garbage collector on",
    }
    console.print(results)
    if "balance" in options.sections:
        methods = our_methods(options.context_window) | {peer.label: theirs(peer) for peer in peers}
        results["balance"] = balance(methods, lengths, task, options.turns)
        results["balance"] += _solver_rows(options, lengths, task) + _tuned_rows(options, lengths, task)
        show("Balance, delay and planning time", results["balance"], BALANCE)
    if "scaling" in options.sections:
        results["scaling"] = scaling(options.scaling, lengths, task, karmarkar_karp(peers), min(3, options.turns))
        show("Planning time of variable_length (2 queues) and of verl's Karmarkar-Karp", results["scaling"])
    if "oracle" in options.sections:
        results["oracle"] = _oracle(options, lengths, task)
        show("Greedy placement against the integer program (Equation 2), same documents", [results["oracle"]])
    if "memory" in options.sections:
        results["memory"] = memory(lengths, task, options.memory_steps, options.seed)
        show("Memory of variable_length over a stream (tracemalloc)", results["memory"])
    write(results, options.out)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_length_options(parser, documents=100_000)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--turns", type=int, default=3, help="repetitions of every timing")
    parser.add_argument("--scaling", type=int, nargs="+", default=[4, 16, 64, 256, 512], metavar="N")
    parser.add_argument("--solver-steps", type=int, default=40, help="steps that fixed_solver packs")
    parser.add_argument("--oracle-steps", type=int, default=40)
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds for one integer program")
    parser.add_argument("--memory-steps", type=int, nargs="+", default=[500, 2000, 8000], metavar="STEPS")
    return parser.parse_args(arguments)


def _solver_rows(options: argparse.Namespace, lengths: Lengths, task: Task) -> list[Row]:
    """fixed_solver on the first steps only, with a limit on the seconds of each."""
    first = lengths[: documents_filling(lengths, options.solver_steps * task.micro_batches * task.context_window)]
    label = f"fixed_solver, window 1, {options.time_limit:g} s, first {options.solver_steps} steps"
    solver = ours("fixed_solver", time_limit=options.time_limit)
    return balance({"fixed_greedy, window 1, same steps": ours("fixed_greedy"), label: solver}, first, task, 1)


def _tuned_rows(options: argparse.Namespace, lengths: Lengths, task: Task) -> list[Row]:
    """The best setting of ``search`` with L_max up to 2 windows: on the lengths searched, and on others."""
    half = len(lengths) // 2
    rows: list[Row] = []
    for label, searched, packed in (
        ("tuned on these lengths", lengths, lengths),
        ("tuned on the first half, packing the second", lengths[:half], lengths[half:]),
    ):
        best = search(searched, *task)[0]
        found: dict[str, Any] = {
            "outlier_thresholds": best.outlier_thresholds,
            "max_length_factor": best.max_length_factor,
        }
        tuned = ours("variable_length", **found)
        rows += [row | found for row in balance({f"variable_length, {label}": tuned}, packed, task, options.turns)]
    return rows


def _oracle(options: argparse.Namespace, lengths: Lengths, task: Task) -> Row:
    """The greedy placement of steps from the whole stream."""
    packer = make_packer("variable_length", **task._asdict())
    plans = packer.plan(lengths.tolist())
    some = [plans[index] for index in np.unique(np.linspace(0, len(plans) - 1, options.oracle_steps).astype(int))]
    return against_optimum(some, task.workload, task.micro_batches, packer.capacity, options.time_limit)


if __name__ == "__main__":
    sys.exit(main())
