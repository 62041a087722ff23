"""A level step of two processes: does a rank wait for the other before the end?

    .venv/bin/python -m benchmarks.level_step [--seconds S] [--turns N] [--out FILE]

Measured, wall time, on CPUs with gloo. Ranks run different numbers of micro-batches with the same work in all. The work
of a layer is a sleep, so a busy machine changes little. ``level_step`` runs them under DDP and FSDP2, and a plain loop
runs them under FSDP2 that reduces gradients inside the last backward. Ways take turns; a figure is the median of the
slower rank over the work of a rank, which is 1 if ranks wait only at the end.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.parts.measurement import command, facts, in_turns, make_parser, show, write
from benchmarks.parts.ranks import on_ranks
from wlb.runtime import level_step

LAYERS, FORWARD = 8, 1 / 3  # share of the forward in the work of a layer
LISTS = {
    "[1], [0.9, 0.1]": [[1.0], [0.9, 0.1]],
    "[1], [0.1, 0.9]": [[1.0], [0.1, 0.9]],
    "[0.3, 0.7], [0.25] x 4": [[0.3, 0.7], [0.25] * 4],
    "[0.5, 0.5], [0.5, 0.5]": [[0.5, 0.5], [0.5, 0.5]],
}
COLUMNS = {
    "work of the micro-batches": "{lists}",
    "way": "{way}",
    "seconds over work": "{over:.2f}",
    "in single turns": "{least:.2f} to {most:.2f}",
}


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(FORWARD * seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep((1 - FORWARD) * ctx.seconds)
        return gradient, None


class Layer(nn.Linear):
    def forward(self, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        return super().forward(Work.apply(x, seconds))


class Layers(nn.Module):
    """Takes ``seconds`` for a forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Layer(8, 8) for _ in range(LAYERS))

    def forward(self, seconds: float) -> Tensor:
        x: Tensor = self.first(torch.ones(1, 8))
        for layer in self.layers:
            x = layer(x, seconds / LAYERS)
        return x.sum()


def sharded() -> Any:
    model = Layers()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=False)
    return fully_shard(model, reshard_after_forward=False)


def plain_step(model: Any, batches: Sequence[float], loss_fn: Callable[[float], Tensor]) -> None:
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        model.set_requires_gradient_sync(last)
        loss_fn(batch).backward()


def step_seconds(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of this rank's steps, by lists and way."""
    torch.manual_seed(0)
    ways: dict[str, tuple[Any, Callable[..., Any]]] = {
        "DDP": (DistributedDataParallel(Layers()), level_step),
        "FSDP2": (sharded(), level_step),
        "FSDP2, reduced in the last backward": (sharded(), plain_step),
    }

    def seconds(model: Any, step: Callable[..., Any], batches: Sequence[float]) -> float:
        dist.barrier()
        began = time.perf_counter()
        step(model, batches, model)
        model.zero_grad()
        return time.perf_counter() - began

    for way in ways.values():
        seconds(*way, [0.0])  # to warm up
    found = {}
    for name, lists in LISTS.items():
        mine = [options.seconds * share for share in lists[dist.get_rank()]]
        found[name] = in_turns({name: partial(seconds, *way, mine) for name, way in ways.items()}, options.turns)
    return found


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.2, help="work of a rank in a step")
    parser.add_argument("--turns", type=int, default=3, help="steps of each way")
    options = parser.parse_args(arguments)
    rows = []
    first, second = on_ranks(2, step_seconds, options)
    for lists, ways in first.items():
        for way, seconds in ways.items():
            over = [max(pair) / options.seconds for pair in zip(seconds, second[lists][way], strict=True)]
            row = {"lists": lists, "way": way, "over": statistics.median(over)}
            rows.append(row | {"least": min(over), "most": max(over)})
    results = facts("torch")
    show("measured, two processes, seconds of a step over its work", rows, COLUMNS)
    write(results | {"rows": rows}, options.out)


if __name__ == "__main__":
    sys.exit(main())
