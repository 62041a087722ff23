"""Benchmark of sharding: the project's strategies beside torch's context-parallel load balancers, in one run.

    .venv/bin/python benchmarks/sharding.py [--lengths FILE] [--out FILE]

Lengths are drawn by ``wlb.documents.synthetic`` unless a file is given. Every method shards the same micro-batches,
windows of the documents in a row. Attended area is counted by one function from nothing but the positions that a rank
gets, whoever chose them. torch's per-document balancer refuses documents that are no multiple of 2 x CP: for it alone
each document is padded to the next multiple, and the padding counts, as it would be computed. Times are CPU time of the
process with one thread, the median over ``--turns`` turns, without making the block mask that _PTRRLoadBalancer reads.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.nn.attention.flex_attention import BlockMask

from parts.documents import Lengths, add_length_options, chosen_lengths, described
from parts.measurement import CpuTimer, command, console, facts, freeze_imports, in_turns, make_parser, show, write
from wlb.sharding import STRATEGIES, ShardPlan, make_shard_plan, shard_latency
from wlb.workload import Costs, make_workload
from wlb_studies.sharding import sample_micro_batches

Row = dict[str, Any]
MODEL, HARDWARE, TP = "7b", "h100", 8
MASK_BLOCK = 128  # tokens of a block of flex attention's mask, its default
COLUMNS = {
    "method": "{method}",
    "attention imbalance": "{attention_imbalance:.4f}",
    "worst": "{worst_attention_imbalance:.3f}",
    "latency imbalance": "{latency_imbalance:.4f}",
    "slowest rank, s": "{slowest_seconds:.4f}",
    "tokens": "{token_imbalance:.4f}",
    "K/V gathered": "{kv_gather_fraction:.1%}",
    "padding": "{padding:.2%}",
    "planning ms": "{planning_ms:.2f}",
}


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


def balancers(cp_size: int) -> dict[str, Callable[[Lengths], Callable[[], Tensor | None]]]:
    """What makes the order of a micro-batch of documents that torch's load balancers accept."""

    def prepared(balancer: Callable[..., _LoadBalancer], *arguments: Any) -> Callable[[], Tensor | None]:
        return lambda: balancer(*arguments)._generate_indices()

    return {
        "torch _HeadTail": lambda lengths: prepared(_HeadTailLoadBalancer, int(lengths.sum()), cp_size, "cpu"),
        "torch _PerDocumentHeadTail": lambda lengths: prepared(
            _PerDocumentHeadTailLoadBalancer, [lengths.tolist()], cp_size, "cpu"
        ),
        "torch _PTRR": lambda lengths: prepared(_PTRRLoadBalancer, block_mask(lengths), cp_size),
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


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run every method, print the table of each CP size and write the results as JSON."""
    parser = make_parser(__doc__)
    add_length_options(parser, documents=20_000)
    parser.add_argument("--samples", type=int, default=200, help="micro-batches")
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--turns", type=int, default=3, help="repetitions of every timing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lengths = chosen_lengths(options)
    micro_batches = sample_micro_batches(lengths, options.context_window, options.samples, options.seed)
    workload = make_workload(MODEL, HARDWARE, tp=TP)
    freeze_imports()
    results: dict[str, Any] = facts("torch") | {"cp": {}}
    results["setting"] = described(options, lengths) | {
        "micro_batches": len(micro_batches),
        "documents_per_micro_batch": float(np.mean([len(micro_batch) for micro_batch in micro_batches])),
        "workload": f"{MODEL} on {HARDWARE}, tp {TP}",
        "turns": options.turns,
        "time": "CPU time of the process, one thread, median over turns",
    }
    console.print(results)
    for cp_size in options.cp:
        results["cp"][cp_size] = rows = measure(micro_batches, cp_size, workload, options.turns)
        show(f"CP {cp_size}: means over micro-batches; latency and slowest rank are predicted", rows, COLUMNS)
    write(results, options.out)


def measure(micro_batches: Sequence[Lengths], cp_size: int, workload: Costs, turns: int) -> list[Row]:
    """One row a method: balance on all micro-batches, and planning time."""
    theirs = balancers(cp_size)

    def accepted(name: str, lengths: Lengths) -> Lengths:
        multiple = 2 * cp_size if "PerDocument" in name else 1
        return -(-lengths // multiple) * multiple

    def shard_all(name: str, timer: CpuTimer) -> Iterator[Sharded]:
        for lengths in micro_batches:
            if name in STRATEGIES:
                plan = timer(partial(make_shard_plan, workload=workload), lengths, cp_size, name)
                yield Sharded(lengths, [plan.positions(rank) for rank in range(cp_size)], plan)
                continue
            padded = accepted(name, lengths)
            order = timer(theirs[name](padded))
            assert order is not None
            yield Sharded(padded, list(order[0].long().numpy().reshape(cp_size, -1)))

    def planning_seconds(name: str) -> float:
        timer = CpuTimer()
        deque(shard_all(name, timer), maxlen=0)
        return timer.seconds

    methods = [*STRATEGIES, *theirs]
    seconds = in_turns({name: partial(planning_seconds, name) for name in methods}, turns)
    return [
        _balance(name, shard_all(name, CpuTimer()), micro_batches, workload)
        | {"planning_ms": 1e3 * float(np.median(seconds[name])) / len(micro_batches)}
        for name in methods
    ]


def _balance(name: str, sharded: Iterable[Sharded], micro_batches: Sequence[Lengths], workload: Costs) -> Row:
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


if __name__ == "__main__":
    sys.exit(main())
