"""Benchmark of attention under context parallelism: two real processes, one thread each, on the CPU.

    .venv/bin/python -m benchmarks.context_parallel [--context-window N] [--micro-batches N] [--turns N] [--out FILE]

Forward and backward of attention alone over the same micro-batches: every sharding strategy, torch's all-gather with
its own head-tail order, and one process by itself. A perfect split would take half of what one process takes
(both processes compute that at once, so that each has as little of the machine as under context parallelism); that is
the limit, and "over the limit" is a method's slowest rank over it. Methods take turns on every micro-batch; the medians
over turns are added up. Documents are rounded up to multiples of 2 x CP tokens for all, because torch asks for it.
Every method's output is checked against the single process before anything is timed.

"predicted" is the slowest rank's attended area over the mean: what the method would be over the limit if attention were
all it did and took time in proportion to area. Wall time includes waiting for the other rank, CPU time does not and is
not disturbed by other work on the machine.

torch 2.13's ``context_parallel`` replaces the CUDA attention operators by a ring of partial attentions; on CPU tensors
it stops ("does not have a sharding strategy registered"). The ring itself takes any operator that returns output and
log-sum-exp, so here it gets the same CPU operator that ``wlb.attention`` runs on. Its causal mask is one sequence
that all ranks cut into head and tail chunks, so a packed micro-batch is one call per document, and every document
must be a multiple of 2 x CP tokens.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
    set_rotate_method,
)

from benchmarks.parts.measurement import command, console, facts, in_turns, make_parser, show, write
from benchmarks.parts.ranks import on_ranks
from wlb.attention import context_parallel_attention, segment_attention
from wlb.documents.synthetic import sample_lengths
from wlb.sharding import STRATEGIES, ShardPlan, make_shard_plan
from wlb.workload import Costs, ModelShape, hardware_preset
from wlb.workload.base import Phase, Seconds
from wlb_studies.sharding import pairs_of_ranks, sample_micro_batches

CP_SIZE = 2
HEADS, HEAD_DIM = 4, 64
SHAPE = ModelShape(
    hidden=HEADS * HEAD_DIM, layers=1, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, ffn_hidden=1, vocab_size=1
)
TORCH = "torch, all-gather"
_NO_DROPOUT, _SEQUENCE_DIM = 0.0, 2
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
ALONE = "one process / 2 (the limit)"
DOCUMENTS = 200  # drawn for every micro-batch; several times what fills one
LARGEST_ERROR = 1e-4  # of float32 outputs and gradients of size one
COLUMNS = {
    "Method": "{method}",
    "Seconds": "{seconds:.3f}",
    "Over the limit": "{over_limit:.3f}",
    "CPU seconds": "{cpu_seconds:.3f}",
    "CPU over the limit": "{cpu_over_limit:.3f}",
    "Predicted": "{predicted:.3f}",
}

Pass = Callable[[], tuple[Tensor, ...]]  # forward and backward: output and gradients
Timing = tuple[float, float]  # wall and CPU seconds


def torch_attention(query: Tensor, key: Tensor, value: Tensor, local_lengths: list[int]) -> Tensor:
    """Causal attention over this rank's head and tail chunk of each document, (tokens, heads, head_dim), in its order.

    ``local_lengths`` are this rank's tokens of each document; the rank's tokens are document after document.
    """
    set_rotate_method("allgather")
    documents = (tensor.transpose(0, 1)[None].split(local_lengths, dim=_SEQUENCE_DIM) for tensor in (query, key, value))
    outs = [_Ring.apply(*document) for document in zip(*documents, strict=True)]
    return torch.cat(outs, dim=_SEQUENCE_DIM)[0].transpose(0, 1)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, log_sum_exp = _templated_ring_attention(
            _world(), _SEQUENCE_DIM, _attend, query, key, value, is_causal=True
        )
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, log_sum_exp = ctx.saved_tensors
        grads = _templated_ring_attention_backward(
            _world(),
            _SEQUENCE_DIM,
            _attend_backward,
            grad_out,
            "grad_out",
            query,
            key,
            value,
            out,
            log_sum_exp,
            is_causal=True,
        )
        return grads[0], grads[1], grads[2]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = _forward(query, key, value, _NO_DROPOUT, options["is_causal"])
    return results


def _attend_backward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    grad_out, out, log_sum_exp = options["grad_out"], options["out"], options["logsumexp"]
    grads: tuple[Tensor, ...] = _backward(
        grad_out, query, key, value, out, log_sum_exp, _NO_DROPOUT, options["is_causal"]
    )
    return grads


class AttentionOnly(Costs):
    """Prices without blocks, head and loss, as nothing but attention is run here."""

    def blocks_seconds(self, tokens: ArrayLike, phase: Phase = "both", routed: ArrayLike | None = None) -> Seconds:
        return np.zeros(np.shape(tokens))

    head_seconds = blocks_seconds


@dataclass(frozen=True)
class Method:
    """One way to attend a micro-batch: the plan that says which tokens are this rank's, and the pass over them."""

    plan: ShardPlan
    run: Pass


def methods(lengths: NDArray[np.int64], rank: int, seed: int) -> dict[str, Method]:
    """Every method on the same random inputs."""
    plans = {
        name: make_shard_plan(lengths, CP_SIZE, name, workload=AttentionOnly(SHAPE, hardware_preset("cpu")))
        for name in STRATEGIES
    }
    alone = make_shard_plan(lengths, 1, "per_sequence")
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(int(lengths.sum()), HEADS, HEAD_DIM, generator=generator) for _ in range(4)]

    def method(plan: ShardPlan, rank: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Method:
        *tensors, grad_out = (tensor[torch.from_numpy(plan.positions(rank))] for tensor in whole)
        query, key, value = (tensor.requires_grad_() for tensor in tensors)

        def run() -> tuple[Tensor, ...]:
            out = attend(query, key, value)
            return out.detach(), *torch.autograd.grad(out, (query, key, value), grad_out)

        return Method(plan, run)

    def ours(plan: ShardPlan) -> Method:
        return method(plan, rank, lambda q, k, v: context_parallel_attention(q, k, v, plan, None))

    # Of documents that are multiples of 2 x CP, our per_document shards are torch's head and tail chunks.
    local_lengths = (lengths // CP_SIZE).tolist()
    return {
        ALONE: method(alone, 0, lambda q, k, v: segment_attention(q, k, v, lengths.tolist())),
        **{name: ours(plan) for name, plan in plans.items()},
        TORCH: method(plans["per_document"], rank, lambda q, k, v: torch_attention(q, k, v, local_lengths)),
    }


def check(chosen: dict[str, Method], rank: int) -> float:
    """The largest difference between any method and the single process; raises ``AssertionError`` if it is large."""
    exact = chosen[ALONE].run()
    worst = 0.0
    for name, method in chosen.items():
        mine = torch.from_numpy(method.plan.positions(0 if name == ALONE else rank))
        for actual, expected in zip(method.run(), exact, strict=True):
            worst = float(np.maximum(worst, (actual - expected[mine]).abs().max()))  # NaN where any is
        assert worst < LARGEST_ERROR, f"{name} is wrong by {worst}"
    return worst


def timed(method: Method) -> Timing:
    """This rank's seconds of one pass that all ranks begin together."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    method.run()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All methods on all micro-batches; the same result on every rank."""
    documents = sample_lengths(DOCUMENTS * options.micro_batches, options.context_window, options.seed)
    micro_batches = [
        -(-lengths // (2 * CP_SIZE)) * 2 * CP_SIZE
        for lengths in sample_micro_batches(documents, options.context_window, options.micro_batches, options.seed)
    ]
    rank = dist.get_rank()
    totals: dict[str, NDArray[np.float64]] = {}
    areas: dict[str, NDArray[np.float64]] = {}
    worst = 0.0
    for seed, lengths in enumerate(micro_batches):
        chosen = methods(lengths, rank, seed)
        worst = max(worst, check(chosen, rank))
        alternatives = {name: lambda method=method: timed(method) for name, method in chosen.items()}
        for name, timings in in_turns(alternatives, options.turns).items():
            everyone: list[list[Timing]] = [[] for _ in range(CP_SIZE)]
            dist.all_gather_object(everyone, timings)
            slowest = np.array(everyone).max(axis=0)  # (turns, 2)
            totals[name] = totals.get(name, np.zeros(2)) + np.median(slowest, axis=0)
            areas[name] = areas.get(name, np.zeros(2)) + _slowest_and_mean(chosen[name].plan)
    totals[ALONE] /= CP_SIZE
    return {
        "micro_batches": [lengths.tolist() for lengths in micro_batches],
        "largest_error": worst,
        "methods": [
            {
                "method": name,
                "seconds": wall,
                "over_limit": wall / totals[ALONE][0],
                "cpu_seconds": cpu,
                "cpu_over_limit": cpu / totals[ALONE][1],
                "predicted": float(areas[name][0] / areas[name][1]),
            }
            for name, (wall, cpu) in totals.items()
        ],
    }


def _slowest_and_mean(plan: ShardPlan) -> NDArray[np.float64]:
    pairs = pairs_of_ranks(plan)
    return np.array([pairs.max(), pairs.mean()])


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Start the processes and wait for them."""
    parser = make_parser(__doc__)
    parser.add_argument("--context-window", type=int, default=16384, help="tokens of a micro-batch; default 16384")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches to measure; default 4")
    parser.add_argument("--turns", type=int, default=5, help="times every method runs each micro-batch; default 5")
    parser.add_argument("--seed", type=int, default=0, help="of the documents; default 0")
    options = parser.parse_args(arguments)
    measured = on_ranks(CP_SIZE, measure, options)[0]
    results = facts("torch") | measured
    results["setting"] = {
        "lengths": f"synthetic, seed {options.seed}, rounded up to multiples of {2 * CP_SIZE}",
        "context_window": options.context_window,
        "documents": [len(lengths) for lengths in measured["micro_batches"]],
        "processes": f"{CP_SIZE}, one thread each",
        "attention": f"{HEADS} heads x {HEAD_DIM}, float32, forward and backward",
        "turns": options.turns,
    }
    console.print({name: results[name] for name in ("machine", "versions", "setting")})
    title = f"Measured: sum over {len(measured['micro_batches'])} micro-batches, slowest rank"
    show(title, measured["methods"], COLUMNS)
    write(results, options.out)


if __name__ == "__main__":
    sys.exit(main())
