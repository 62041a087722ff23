"""Sharding: the project's strategies beside torch's context-parallel load balancers, in one run.

    .venv/bin/python -m studies.benchmarks.sharding [--lengths LENGTHS] [--out FILE]

Every method shards the same micro-batches, windows of the documents in a row. Attended area is counted by one function
from nothing but the positions that a rank gets, whoever chose them. torch's per-document balancer refuses documents
that are no multiple of 2 x CP: for it alone each document is padded to the next multiple, and the padding counts, as it
would be computed. torch's all-gather brings every rank all keys and values. Planning is CPU time of the process with
one thread, the median over ``--turns`` turns, without making the block mask that _PTRRLoadBalancer reads. ``wlb-studies
sharding`` has predicted seconds of our strategies.
"""

import sys
from collections.abc import Callable, Sequence
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

from benchmarks.parts.measurement import (
    CpuTimer,
    command,
    console,
    facts,
    freeze_imports,
    in_turns,
    make_parser,
    show,
    write,
)
from wlb.documents.lengths import read_lengths
from wlb.sharding import STRATEGIES, make_shard_plan
from wlb.workload import make_workload
from wlb_studies.sharding import sample_micro_batches

Lengths = NDArray[np.int64]
Positions = list[NDArray[np.int64]]  # of every rank
Row = dict[str, Any]
MASK_BLOCK = 128  # tokens of a block of flex attention's mask, its default
COLUMNS = {
    "method": "{method}",
    "attention imbalance": "{attention_imbalance:.4f}",
    "worst": "{worst_attention_imbalance:.3f}",
    "tokens": "{token_imbalance:.4f}",
    "K/V gathered": "{kv_gather_fraction:.1%}",
    "padding": "{padding:.2%}",
    "planning ms": "{planning_ms:.2f}",
}


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
    parser.add_argument("--lengths", metavar="LENGTHS", help="as for wlb check; default: 20,000 synthetic documents")
    parser.add_argument("--context-window", type=int, default=131_072)
    parser.add_argument("--samples", type=int, default=200, help="micro-batches")
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--turns", type=int, default=3, help="repetitions of every timing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    given = options.lengths or f"synthetic:20000:{options.context_window}:0"
    micro_batches = sample_micro_batches(read_lengths(given), options.context_window, options.samples)
    freeze_imports()
    results: dict[str, Any] = facts("torch") | {"lengths": given, "micro_batches": len(micro_batches), "cp": {}}
    console.print(results)
    for cp_size in options.cp:
        results["cp"][cp_size] = rows = measure(micro_batches, cp_size, options.turns)
        show(f"CP {cp_size}: means over micro-batches", rows, COLUMNS)
    write(results, options.out)


def measure(micro_batches: Sequence[Lengths], cp_size: int, turns: int) -> list[Row]:
    """One row a method: balance on all micro-batches, and planning time."""
    workload = make_workload("7b", "h100", tp=8)
    theirs = balancers(cp_size)

    def ours(name: str, timer: CpuTimer) -> list[tuple[Lengths, Positions, float]]:
        plans = [timer(partial(make_shard_plan, workload=workload), one, cp_size, name) for one in micro_batches]
        ranks = [[plan.positions(rank) for rank in range(cp_size)] for plan in plans]
        return [*zip(micro_batches, ranks, [plan.kv_gather_fraction for plan in plans], strict=True)]

    def torchs(name: str, timer: CpuTimer) -> list[tuple[Lengths, Positions, float]]:
        multiple = 2 * cp_size if "PerDocument" in name else 1
        padded = [-(-lengths // multiple) * multiple for lengths in micro_batches]
        orders: list[Any] = [timer(theirs[name](lengths)) for lengths in padded]
        return [
            (lengths, [*order[0].long().numpy().reshape(cp_size, -1)], 1.0)
            for lengths, order in zip(padded, orders, strict=True)
        ]

    def timed(name: str) -> tuple[float, list[tuple[Lengths, Positions, float]]]:
        timer = CpuTimer()
        sharded = (ours if name in STRATEGIES else torchs)(name, timer)
        return timer.seconds, sharded

    tokens = sum(int(lengths.sum()) for lengths in micro_batches)
    rows = []
    for name, of_turns in in_turns({name: partial(timed, name) for name in (*STRATEGIES, *theirs)}, turns).items():
        seconds = float(np.median([seconds for seconds, _ in of_turns]))
        rows.append(row_of(name, of_turns[-1][1], tokens) | {"planning_ms": 1e3 * seconds / len(micro_batches)})
    return rows


def row_of(name: str, sharded: Sequence[tuple[Lengths, Positions, float]], tokens: int) -> Row:
    """``sharded``: of each micro-batch its documents with their padding, every rank's positions, and K/V gathered."""
    areas = np.array([[attended_area(lengths, rank) for rank in ranks] for lengths, ranks, _ in sharded])
    sizes = np.array([[len(rank) for rank in ranks] for _, ranks, _ in sharded])
    imbalances = areas.max(axis=1) / areas.mean(axis=1)
    return {
        "method": name,
        "attention_imbalance": float(imbalances.mean()),
        "worst_attention_imbalance": float(imbalances.max()),
        "token_imbalance": float((sizes.max(axis=1) / sizes.mean(axis=1)).mean()),
        "padding": sizes.sum() / tokens - 1,
        "kv_gather_fraction": float(np.mean([gathered for *_, gathered in sharded])),
    }


if __name__ == "__main__":
    sys.exit(main())
