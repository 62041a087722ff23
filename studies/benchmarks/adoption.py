"""What balancing gains in the stacks of ``examples/``: measured, on two processes of one thread each.

    .venv/bin/python -m studies.benchmarks.adoption [--stacks NAME,..] [--turns N] [--out FILE]

Each stack trains the same documents with the same model as its example does, and as it is without us: in random
micro-batches of as many documents as fill the window on average. Both ways attend with the same attention and pack
without padding, so micro-batches differ in nothing but which documents are together. The ways take turns, after one
turn to warm up. Seconds are CPU seconds in lock step: of every step those that the slowest rank computes, forward and
backward. Speed is at equal work, predicted seconds of work done in a second. Stacks that are not installed are left
out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.parts.measurement import chosen, command, console, facts, make_parser, show, write
from benchmarks.parts.ranks import on_ranks
from studies.benchmarks.recorder import Recorder, positions_of, recording
from wlb.integrations.packed import FlatteningCollator, PackedBatch
from wlb.workload import make_workload

EXAMPLES = Path("examples")
PROCESSES, MICRO_BATCHES = 2, 2
NEEDS = {
    "torch_loop": "transformers",
    "hf_trainer": "accelerate",
    "trl_sft": "trl",
    "with_lightning": "lightning",
}
COLUMNS = {
    "example": "{example}",
    "theirs, seconds": "{theirs:.1f}",
    "ours": "{ours:.1f}",
    "speed": "{speed:.2f}x",
    "in turns": "{least:.2f} to {most:.2f}",
}


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Train every stack in both ways, print a table and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--stacks", default=",".join(NEEDS), help="which examples")
    parser.add_argument("--turns", type=int, default=2, help="of each way, after one to warm up")
    parser.add_argument("--documents", type=int, default=128)
    parser.add_argument("--context-window", type=int, default=4096)
    options = parser.parse_args(arguments)
    rows = []
    for name in chosen(options.stacks, [*NEEDS], "stack"):
        if importlib.util.find_spec(NEEDS[name]) is None:
            console.print(f"[yellow]{name} is left out: {NEEDS[name]} is not installed")
        else:
            rows.append(row_of(name, on_ranks(PROCESSES, train_in_turns, name, options)))
    results = facts("torch", "transformers", "accelerate", "trl", "lightning")
    console.print(results)
    show(f"measured, {PROCESSES} processes of one thread, CPU seconds in lock step", rows, COLUMNS)
    write(results | {"rows": rows}, options.out)


def row_of(example: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``ranks``: of every rank, by way, its seconds (turns, steps) and the predicted seconds of what it trained."""
    seconds, work = {}, {}
    for way in ("theirs", "ours"):
        of_ranks = np.array([rank[way]["seconds"] for rank in ranks])
        seconds[way] = of_ranks.max(axis=0).sum(axis=1)
        work[way] = sum(rank[way]["work"] for rank in ranks)
    speeds = seconds["theirs"] / seconds["ours"] * work["ours"] / work["theirs"]
    medians = {way: float(np.median(of_turns)) for way, of_turns in seconds.items()}
    spread = {"speed": float(np.median(speeds)), "least": float(speeds.min()), "most": float(speeds.max())}
    return {"example": example} | medians | spread


def train_in_turns(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One rank of a stack; every way is trained in every turn."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": name}
    sys.path.insert(0, str(EXAMPLES))
    stand_ins: Any = importlib.import_module("stand_ins")
    stand_ins.DOCUMENTS, stand_ins.WINDOW = options.documents, options.context_window
    train = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")["train"]
    replaced = {"packed_batches": random_steps, "balanced": unbalanced}
    alone = {original: other for original, other in replaced.items() if original in train.__globals__}
    seconds: dict[str, list[list[float]]] = {"theirs": [], "ours": []}
    work = {}
    for _ in range(options.turns + 1):
        for way, changed in (("theirs", alone), ("ours", {})):
            with mock.patch.dict(train.__globals__, changed):
                recorder = recorded(train)
            seconds[way].append([sum(one.seconds for one in step) for step in recorder.steps])
            work[way] = work_of(recorder)
    return {way: {"seconds": of_turns[1:], "work": work[way]} for way, of_turns in seconds.items()}


def recorded(train: Callable[[], None]) -> Recorder:
    from transformers import LlamaForCausalLM

    dist.barrier()
    with recording(LlamaForCausalLM, MICRO_BATCHES) as recorder:
        train()
    return recorder


def work_of(recorder: Recorder) -> float:
    model = importlib.import_module("stand_ins").MODEL
    positions = positions_of(recorder.tokens)
    lengths = np.diff([*np.flatnonzero(positions == 0), len(positions)])
    return float(make_workload(model, "cpu").document_seconds(lengths).sum())


def random_steps(documents: Sequence[Any], *, context_window: int, micro_batches: int, **_: Any) -> Iterator[Any]:
    """In place of ``packed_batches``: documents in random order, equally many in every micro-batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    order = np.random.default_rng(0).permutation(len(documents))
    steps = -(-len(documents) // (usual_batch(documents, context_window) * world * micro_batches))
    for step in np.array_split(order, steps):
        loss_tokens = sum(len(documents[i]["input_ids"]) - 1 for i in step)
        own = np.array_split(step, world * micro_batches)[rank::world]
        yield SimpleNamespace(
            batches=[packed([documents[i]["input_ids"] for i in part], loss_tokens, world) for part in own]
        )


def packed(documents: Sequence[list[int]], loss_tokens: int, ranks: int) -> PackedBatch:
    lengths = tuple(map(len, documents))
    tokens = torch.tensor([token for document in documents for token in document])
    labels = torch.tensor([label for document in documents for label in [*document[1:], -100]])
    return PackedBatch(tokens, labels, torch.cat([*map(torch.arange, lengths)]), lengths, loss_tokens, ranks)


def unbalanced(trainer_class: type[Any], *, context_window: int) -> type[Any]:
    """In place of ``balanced``: the Trainer with its own random batches, packed without padding."""

    class Unbalanced(trainer_class):
        def __init__(self, *, args: Any, train_dataset: Any, **more: Any) -> None:
            args.per_device_train_batch_size = usual_batch(train_dataset, context_window)
            args.remove_unused_columns = False
            super().__init__(args=args, train_dataset=train_dataset, **more)
            self.data_collator = FlatteningCollator()  # SFTTrainer makes its own in place of one that it is given

    return Unbalanced


def usual_batch(documents: Sequence[Any], context_window: int) -> int:
    """As many documents as fill the window on average."""
    tokens = sum(len(document["input_ids"]) for document in documents)
    return max(1, round(context_window * len(documents) / tokens))


if __name__ == "__main__":
    sys.exit(main())
