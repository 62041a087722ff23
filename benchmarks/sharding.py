"""Benchmark of sharding: the project's strategies beside torch's context-parallel load balancers, in one run.

    .venv/bin/python benchmarks/sharding.py [--lengths FILE] [--out FILE]

Lengths are drawn by ``wlb.documents.synthetic`` unless a file is given. Every method shards the same micro-batches,
windows of the documents in a row. Attended area is counted by one function from nothing but the positions that a rank
gets, whoever chose them. torch's per-document balancer refuses documents that are no multiple of 2 x CP: for it alone
each document is padded to the next multiple, and the padding counts, as it would be computed. Times are CPU time of the
process with one thread, the median over ``--turns`` turns, without making the block mask that _PTRRLoadBalancer reads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.nn.attention.flex_attention import BlockMask

from parts.measurement import CpuTimer, freeze_imports, in_turns, machine, versions
from wlb.documents.lengths import read_lengths
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.sharding import STRATEGIES, ShardPlan, make_shard_plan, shard_latency
from wlb.sharding.compare import sample_micro_batches
from wlb.workload import Workload, make_workload

Lengths = NDArray[np.int64]
Row = dict[str, Any]
MODEL, HARDWARE, TP = "7b", "h100", 8
MASK_BLOCK = 128  # tokens of a block of flex attention's mask, its default

console = Console(width=160)


@dataclass(frozen=True)
class Sharded:
    """The positions of every rank, in a micro-batch of documents of ``lengths`` tokens (padding included)."""

    lengths: Lengths
    ranks: list[NDArray[np.int64]]
    plan: ShardPlan | None = None  # of our own strategies


def attended_area(lengths: Lengths, positions: NDArray[np.int64]) -> int:
    """Query-key pairs of the causal per-document mask whose queries are at ``positions``."""
    starts = np.cumsum(lengths) - lengths
    return int((positions - np.repeat(starts, lengths)[positions] + 1).sum())


def our_method(strategy: str, cp_size: int, workload: Workload) -> Callable[[Lengths], ShardPlan]:
    return lambda lengths: make_shard_plan(lengths, cp_size, strategy, workload=workload)


def torch_methods(cp_size: int) -> dict[str, Callable[[Lengths], _LoadBalancer]]:
    """torch's load balancers, set up for a micro-batch of documents that they accept."""
    return {
        "torch _HeadTail": lambda lengths: _HeadTailLoadBalancer(int(lengths.sum()), cp_size, "cpu"),
        "torch _PerDocumentHeadTail": lambda lengths: _PerDocumentHeadTailLoadBalancer(
            [lengths.tolist()], cp_size, "cpu"
        ),
        "torch _PTRR": lambda lengths: _PTRRLoadBalancer(block_mask(lengths), cp_size),
    }


def block_mask(lengths: Lengths) -> BlockMask:
    """Flex attention's mask of ``lengths``, by blocks: those from the first query's document start to the diagonal."""
    tokens = int(lengths.sum())
    blocks = -(-tokens // MASK_BLOCK)
    rows = np.arange(blocks)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    first = starts[rows * MASK_BLOCK] // MASK_BLOCK
    indices = np.minimum(first[:, None] + rows, blocks - 1)
    count, columns = torch.from_numpy(rows - first + 1), torch.from_numpy(indices)
    return BlockMask.from_kv_blocks(
        count.int()[None, None], columns.int()[None, None], BLOCK_SIZE=MASK_BLOCK, compute_q_blocks=False
    )


def padded(lengths: Lengths, multiple: int) -> Lengths:
    return -(-lengths // multiple) * multiple


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every method, print the table of each CP size and write the results as JSON."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        lengths = (
            sample_lengths(options.documents, options.context_window, options.seed)
            if options.lengths is None
            else read_lengths(options.lengths)
        )
        micro_batches = sample_micro_batches(lengths, options.context_window, options.samples, options.seed)
    except UserError as error:
        print(f"sharding benchmark: error: {error}", file=sys.stderr)
        return 2
    workload = make_workload(MODEL, HARDWARE, tp=TP)
    freeze_imports()
    results: dict[str, Any] = {
        "machine": machine(),
        "versions": versions("wlb-llm", "numpy", "torch"),
        "setting": {
            "lengths": f"synthetic, seed {options.seed}" if options.lengths is None else "given with --lengths",
            "documents": len(lengths),
            "context_window": options.context_window,
            "micro_batches": len(micro_batches),
            "documents_per_micro_batch": float(np.mean([len(micro_batch) for micro_batch in micro_batches])),
            "workload": f"{MODEL} on {HARDWARE}, tp {TP}",
            "turns": options.turns,
            "seed": options.seed,
            "time": "CPU time of the process, one thread, median over turns",
        },
        "cp": {},
    }
    console.print({**results["machine"], **results["versions"], **results["setting"]})
    for cp_size in options.cp:
        results["cp"][cp_size] = rows = measure(micro_batches, cp_size, workload, options.turns)
        _print(rows, cp_size)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(micro_batches: Sequence[Lengths], cp_size: int, workload: Workload, turns: int) -> list[Row]:
    """One row a method: balance on all micro-batches, and planning time."""
    ours = {name: our_method(name, cp_size, workload) for name in STRATEGIES}
    theirs = torch_methods(cp_size)

    def shard_all(name: str, timer: CpuTimer) -> Iterator[Sharded]:
        for lengths in micro_batches:
            if name in ours:
                plan = timer(ours[name], lengths)
                yield Sharded(lengths, [plan.positions(rank) for rank in range(cp_size)], plan)
            else:
                accepted = padded(lengths, 2 * cp_size) if "PerDocument" in name else lengths
                order = timer(lambda balancer: balancer._generate_indices(), theirs[name](accepted))
                assert order is not None
                yield Sharded(accepted, list(order[0].long().numpy().reshape(cp_size, -1)))

    def planning_seconds(name: str) -> float:
        timer = CpuTimer()
        deque(shard_all(name, timer), maxlen=0)
        return timer.seconds

    methods = [*ours, *theirs]
    seconds = in_turns({name: partial(planning_seconds, name) for name in methods}, turns)
    return [
        _balance(name, shard_all(name, CpuTimer()), micro_batches, workload)
        | {"planning_ms": 1e3 * float(np.median(seconds[name])) / len(micro_batches)}
        for name in methods
    ]


def _balance(name: str, sharded: Iterable[Sharded], micro_batches: Sequence[Lengths], workload: Workload) -> Row:
    imbalances, token_imbalances, gathered, latencies = [], [], [], []
    tokens = 0
    for one in sharded:
        area = [attended_area(one.lengths, rank) for rank in one.ranks]
        sizes = [len(rank) for rank in one.ranks]
        imbalances.append(max(area) / np.mean(area))
        token_imbalances.append(max(sizes) / np.mean(sizes))
        # torch's all-gather brings every rank all keys and values.
        gathered.append(one.plan.kv_gather_fraction if one.plan else 1.0)
        tokens += sum(sizes)
        if one.plan:
            latencies.append(shard_latency(one.plan, workload))
    return {
        "method": name,
        "attention_imbalance": float(np.mean(imbalances)),
        "worst_attention_imbalance": float(np.max(imbalances)),
        "token_imbalance": float(np.mean(token_imbalances)),
        "padding": tokens / sum(int(lengths.sum()) for lengths in micro_batches) - 1,
        "kv_gather_fraction": float(np.mean(gathered)),
        "latency_imbalance": float(np.mean([latency.imbalance for latency in latencies])) if latencies else None,
        "slowest_seconds": float(np.mean([latency.slowest for latency in latencies])) if latencies else None,
    }


def _print(rows: Sequence[Row], cp_size: int) -> None:
    table = Table(
        title=f"CP {cp_size}: means over micro-batches; latency and slowest rank are predicted", pad_edge=False
    )
    table.add_column("method", no_wrap=True)
    for heading in ("attention imbalance", "worst", "latency imbalance", "slowest rank, s", "tokens", "K/V gathered"):
        table.add_column(heading, justify="right")
    table.add_column("padding", justify="right")
    table.add_column("planning ms", justify="right")
    for row in rows:
        ours = row["latency_imbalance"] is not None
        table.add_row(
            row["method"],
            f"{row['attention_imbalance']:.4f}",
            f"{row['worst_attention_imbalance']:.3f}",
            f"{row['latency_imbalance']:.4f}" if ours else "",
            f"{row['slowest_seconds']:.4f}" if ours else "",
            f"{row['token_imbalance']:.4f}",
            f"{row['kv_gather_fraction']:.1%}",
            f"{row['padding']:.2%}",
            f"{row['planning_ms']:.2f}",
        )
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", metavar="FILE", help="document lengths (.json, .txt, .npy, .parquet, .idx)")
    parser.add_argument("--documents", type=int, default=20_000, help="synthetic documents, without --lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context-window", type=int, default=131_072)
    parser.add_argument("--samples", type=int, default=200, help="micro-batches")
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--turns", type=int, default=3, help="repetitions of every timing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
