"""Benchmark of ``wlb.balance`` against Karmarkar-Karp differencing, which verl divides its batches with.

    make peers                                   # once: an environment with verl, .venv-peers
    .venv-peers/bin/python benchmarks/balance.py [--repetitions N] [--out FILE]

Where verl is not installed (``.venv/bin/python``), our implementation of the same method stands in for it
(``differenced`` of ``wlb.packing.bins``, which is faster), and the table says so. Both divide the same documents by the
same whole numbers: their tokens, or their predicted seconds of a 7B model on H100 in picoseconds. Lengths are
log-normal, as of web documents, or uniform, as of rollouts. "Over even" is the largest sum over the mean, minus 1;
"less even" counts the cases in which ours is larger. Times are CPU time of the process, the median over the cases.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

import wlb
from parts.measurement import CpuTimer, console, facts, freeze_imports, make_parser, show, versions, write
from wlb.packing.bins import differenced

Divide = Callable[[list[int], int, bool], list[list[int]]]
Lengths = NDArray[np.int64]

SIZES = ((24, 8), (64, 8), (256, 8), (512, 8), (1024, 8), (1024, 32), (2048, 16), (4096, 64))
EQUAL_SIZES = ((512, 8), (1024, 32))
LENGTHS: dict[str, Callable[[np.random.Generator, int], Lengths]] = {
    "log-normal": lambda random, documents: random.lognormal(7, 1.2, documents).astype(np.int64).clip(16, 32_768),
    "uniform": lambda random, documents: random.integers(50, 4000, documents),
}
COLUMNS = {
    "documents": "{documents:,}",
    "parts": "{parts}",
    "equal size": "{equal_size}",
    "lengths": "{lengths}",
    "price": "{price}",
    "over even: peer": "{peer_over_even:.1e}",
    "over even: ours": "{our_over_even:.1e}",
    "less even": "{cases_less_even} of {cases}",
    "ms: peer": "{peer_milliseconds:.2f}",
    "ms: ours": "{our_milliseconds:.2f}",
    "faster": "{times_faster:.1f}x",
}


class Given:
    """Prices that were computed before, so that computing them is not timed."""

    def __init__(self, prices: Lengths) -> None:
        self._prices = prices.astype(np.float64)

    def document_seconds(self, lengths: ArrayLike) -> NDArray[np.float64]:
        return self._prices


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=10, help="cases of each row")
    parser.add_argument("--most-documents", type=int, default=10**9, help="leave larger rows out")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    label, peer = installed_peer()
    freeze_imports()
    rows = [
        compare(documents, parts, equal_size, lengths, price, peer, arguments)
        for sizes, equal_size in ((SIZES, False), (EQUAL_SIZES, True))
        for documents, parts in sizes
        if documents <= arguments.most_documents
        for lengths in LENGTHS
        for price in ("tokens", "seconds")
    ]
    results = facts("verl") | {"peer": label, "seed": arguments.seed, "rows": rows}
    console.print("measured on one thread,", results["machine"], results["versions"])
    show(f"wlb.balance and {label}", rows, COLUMNS)
    write(results, arguments.out)


def installed_peer() -> tuple[str, Divide]:
    """verl's function, or else ours of the same method, and what to call it."""
    if importlib.util.find_spec("verl") is None:
        return "Karmarkar-Karp (ours; verl is not installed)", lambda values, parts, equal_size: differenced(
            values, parts, equal_size=equal_size
        )
    divide: Divide = importlib.import_module("verl.utils.seqlen_balancing").karmarkar_karp
    return f"verl {versions('verl')['verl']}, Karmarkar-Karp", divide


def compare(
    documents: int, parts: int, equal_size: bool, lengths: str, price: str, peer: Divide, arguments: argparse.Namespace
) -> dict[str, Any]:
    """A row of the table; the two methods take turns, case by case."""
    random = np.random.default_rng([arguments.seed, documents, parts])
    workload = wlb.make_workload("7b", "h100")
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    over_even: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(arguments.repetitions):
        tokens = LENGTHS[lengths](random, documents)
        values = tokens if price == "tokens" else (workload.document_seconds(tokens) * 1e12).astype(np.int64)
        prices: Given | Literal["tokens"] = "tokens" if price == "tokens" else Given(values)
        as_list, whole = tokens.tolist(), values.tolist()
        methods: dict[str, Callable[[], list[list[int]]]] = {
            "ours": partial(wlb.balance, as_list, parts, equal_size=equal_size, workload=prices),
            "peer": partial(peer, whole, parts, equal_size),
        }
        for name, method in methods.items():
            timer = CpuTimer()
            divided = timer(method)
            seconds[name].append(timer.seconds)
            over_even[name].append(max(int(values[part].sum()) for part in divided) * parts / int(values.sum()) - 1)
    return {
        "documents": documents,
        "parts": parts,
        "equal_size": equal_size,
        "lengths": lengths,
        "price": price,
        "peer_over_even": mean(over_even["peer"]),
        "our_over_even": mean(over_even["ours"]),
        "cases": arguments.repetitions,
        "cases_less_even": sum(o > p for o, p in zip(over_even["ours"], over_even["peer"], strict=True)),
        "peer_milliseconds": 1000 * median(seconds["peer"]),
        "our_milliseconds": 1000 * median(seconds["ours"]),
        "times_faster": median(seconds["peer"]) / median(seconds["ours"]),
    }


if __name__ == "__main__":
    main()
