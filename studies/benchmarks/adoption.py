"""What balancing gains in the stacks of ``examples/``: measured, on two processes of one thread each.

    .venv/bin/python -m studies.benchmarks.adoption [--stacks NAME,..] [--turns N] [--out FILE]

Each stack trains the same documents with the same model as its example does, and as it is without us: in random
micro-batches of as many documents as fill the window on average. Loops of one's own also train them in windows filled
by best fit, as TRL packs, and own_lists in equal numbers of balanced micro-batches, too. All ways attend with the same
attention and pack without padding, so micro-batches differ in nothing but which documents are together. The ways take
turns, after one turn to warm up. Seconds are CPU seconds of the critical path: of every step those of the slowest rank,
forward and backward. Ranks that share a micro-batch begin it together. All ways of own_lists run in ``level_step``,
where FSDP2 keeps gathered weights and ranks wait for all others at the end only; "weights gathered" is what the same
micro-batches cost in a loop that gathers weights in every micro-batch, where ranks begin each together.
A micro-batch counts with the median over turns, of two turns the smaller; "low to high" has the speed in every turn
alone, and "one micro-batch differs" says how far its longest measurement is over its shortest, median and worst.
Speed is at equal work, predicted seconds of work done in a second. Stacks that are not installed are left out.
"""

import argparse
import importlib.util
import os
import runpy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.parts.measurement import (
    chosen,
    command,
    console,
    differences,
    facts,
    lower_median,
    make_parser,
    show,
    spread,
    write,
)
from benchmarks.parts.ranks import on_ranks
from studies.benchmarks.recorder import Recorder, positions_of, recording
from wlb.integrations.packed import FlatteningCollator, PackedBatch
from wlb.workload import make_workload

Turn = list[list[tuple[tuple[int, ...], float]]]  # of one rank: steps of micro-batches, who shares each and its seconds

EXAMPLES = Path("examples")
PROCESSES, MICRO_BATCHES = 2, 2
NEEDS = {
    "torch_loop": "transformers",
    "own_lists": "transformers",
    "hf_trainer": "accelerate",
    "trl_sft": "trl",
    "with_lightning": "lightning",
}
COLUMNS = {
    "example": "{example}",
    "way": "{way}",
    "seconds": "{seconds:.1f}",
    "speed": "{speed:.2f}x",
    "low to high": "{least:.2f} to {most:.2f}",
    "one micro-batch differs": "{median_difference:.0%}, {worst_difference:.0%}",
}


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Train every stack in each of its ways, print a table and write it as JSON."""
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
            rows += rows_of(name, on_ranks(PROCESSES, train_in_turns, name, options))
    results = facts("torch", "transformers", "accelerate", "trl", "lightning")
    console.print(results)
    show(f"measured, {PROCESSES} processes of one thread, CPU seconds of the critical path", rows, COLUMNS)
    write(results | {"rows": rows}, options.out)


def ways_of(example: str) -> dict[str, dict[str, Callable[..., Any]]]:
    """What is put in place of our names in an example, by way; plain micro-batches come first."""
    from wlb.integrations.packed import packed_batches

    def in_equal_numbers(documents: Any, *, own_lists: bool, **settings: Any) -> Any:
        return packed_batches(documents, **settings)

    if example in ("torch_loop", "own_lists", "with_lightning"):
        ways = {"random": random_steps, "best fit": packed_steps}
        equal = {"equal numbers": in_equal_numbers} if example == "own_lists" else {}
        ours: dict[str, Any] = {"balanced" if example != "own_lists" else "own lists": {}}
        return {way: {"packed_batches": steps} for way, steps in (ways | equal).items()} | ours
    return {"random": {"balanced": unbalanced}, "balanced": {}}


def rows_of(example: str, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``ranks``: of every rank, by way, the micro-batches of each turn and the predicted seconds of its work."""
    ways = [*ranks[0]]
    work = {way: sum(rank[way]["work"] for rank in ranks) for way in ways}
    seconds = {way: np.array(turn_seconds([rank[way]["turns"] for rank in ranks])) for way in ways}
    rows = []
    for way in ways:
        speeds = seconds[ways[0]] / seconds[way] * work[way] / work[ways[0]]
        row = {"example": example, "way": way, "seconds": float(seconds[way][0]), "speed": float(speeds[0])}
        measured = np.hstack([[*map(seconds_of, rank[way]["turns"])] for rank in ranks])
        rows.append(row | spread(speeds.tolist()) | differences(measured))
    return rows


def turn_seconds(ranks: Sequence[list[Turn]]) -> list[float]:
    """Seconds of the critical path: with the lower median of every micro-batch over turns, then in each turn."""
    turns = zip(*([typical(turns), *turns] for turns in ranks), strict=True)
    return [sum(map(critical_path, zip(*turn, strict=True))) for turn in turns]


def typical(turns: Sequence[Turn]) -> Turn:
    """Of one rank's turns, which trained the same, the lower median of the seconds of every micro-batch."""
    seconds = iter(lower_median([*map(seconds_of, turns)]).tolist())
    return [[(members, next(seconds)) for members, _ in step] for step in turns[0]]


def seconds_of(turn: Turn) -> list[float]:
    return [seconds for step in turn for _, seconds in step]


def critical_path(lists: Sequence[Sequence[tuple[tuple[int, ...], float]]]) -> float:
    """When the last rank of a step is done, if nothing but other ranks holds it up.

    ``lists`` are the micro-batches of each rank, in order: the ranks that share one (none: it is alone), and its
    seconds. Ranks begin a shared one together, and it takes as long as the slowest of them.
    """
    free, coming = [0.0] * len(lists), [deque(micro_batches) for micro_batches in lists]
    while any(coming):
        for rank, micro_batches in enumerate(coming):
            members = micro_batches[0][0] or (rank,) if micro_batches else ()
            if members and all(coming[member] and (coming[member][0][0] or (member,)) == members for member in members):
                begin = max(free[member] for member in members)
                end = begin + max(coming[member].popleft()[1] for member in members)
                for member in members:
                    free[member] = end
                break
        else:
            raise AssertionError("ranks wait for each other in a circle")
    return max(free)


def train_in_turns(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One rank of a stack; every way is trained in every turn."""
    train = example(name, options)
    ways = ways_of(name)
    found: dict[str, dict[str, Any]] = {way: {"turns": []} for way in ways}
    for _ in range(options.turns + 1):
        for way, replaced in ways.items():
            add_turn(found[way], name, train, replaced)
    measured = {way: {"turns": of_way["turns"][1:], "work": of_way["work"]} for way, of_way in found.items()}
    if name != "own_lists":
        return measured
    waiting = {way: one | {"turns": [*map(begun_together, one["turns"])]} for way, one in measured.items()}
    return {f"{way}, weights gathered": one for way, one in waiting.items() if way != "own lists"} | measured


def begun_together(turn: Turn) -> Turn:
    """``turn`` in a loop in which ranks begin every micro-batch together."""
    return [[(tuple(range(PROCESSES)), seconds) for _, seconds in step] for step in turn]


def example(name: str, options: argparse.Namespace) -> Callable[[], None]:
    """The function ``train`` of an example, on this rank."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": name}
    sys.path.insert(0, str(EXAMPLES))
    stand_ins: Any = importlib.import_module("stand_ins")
    stand_ins.DOCUMENTS, stand_ins.WINDOW = options.documents, options.context_window
    return cast(Callable[[], None], runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")["train"])


def add_turn(found: dict[str, Any], name: str, train: Callable[[], None], replaced: dict[str, Any]) -> None:
    """Train once with ``replaced`` for names of the example, and add its micro-batches to ``found``."""
    with mock.patch.dict(train.__globals__, replaced):
        recorder = recorded(train, None if "lists" in name else MICRO_BATCHES)
    found["turns"].append([[(one.ranks, one.seconds) for one in step] for step in recorder.steps])
    trained = [[one.tokens.tobytes() for one in step] for step in recorder.steps]
    if found.setdefault("trained", trained) != trained:
        raise AssertionError(f"{name}: turns trained different micro-batches")
    found["work"] = work_of(recorder)


def recorded(train: Callable[[], None], per_step: int | None) -> Recorder:
    from transformers import LlamaForCausalLM

    dist.barrier()
    with recording(LlamaForCausalLM, per_step) as recorder:
        train()
    return recorder


def work_of(recorder: Recorder) -> float:
    """Predicted seconds of the documents that this rank trained, by their rows where it shares them."""
    model = importlib.import_module("stand_ins").MODEL
    costs = make_workload(model, "cpu")
    positions = positions_of(recorder.tokens).astype(np.float64)
    # A document's price is a sum d^2 + b sum d: of a row at position p it is 2 a p + a + b.
    one, two = costs.document_seconds(np.array([1024, 2048]))
    square = (two - 2 * one) / (2048**2 - 2 * 1024**2)
    return float((2 * square * positions + square + one / 1024 - 1024 * square).sum())


def random_steps(documents: Sequence[Any], *, context_window: int, micro_batches: int, **_: Any) -> Iterator[Any]:
    """In place of ``packed_batches``: documents in random order, equally many in every micro-batch."""
    count = -(-len(documents) // usual_batch(documents, context_window))
    order = np.random.default_rng(0).permutation(len(documents))
    return steps_of_bins(documents, [part.tolist() for part in np.array_split(order, count)], micro_batches)


def packed_steps(documents: Sequence[Any], *, context_window: int, micro_batches: int, **_: Any) -> Iterator[Any]:
    """In place of ``packed_batches``: windows filled by best fit, longest first, as TRL packs; in random order."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(documents)), key=lambda index: -len(documents[index]["input_ids"])):
        length = len(documents[index]["input_ids"])
        fits = [number for number, room in enumerate(rooms) if room >= length]
        best = min(fits, key=rooms.__getitem__, default=len(bins))
        if best == len(bins):
            bins.append([])
            rooms.append(context_window)
        bins[best].append(index)
        rooms[best] -= length
    order = np.random.default_rng(0).permutation(len(bins))
    return steps_of_bins(documents, [bins[number] for number in order], micro_batches)


def steps_of_bins(documents: Sequence[Any], bins: Sequence[list[int]], micro_batches: int) -> Iterator[Any]:
    """A micro-batch for each bin, dealt to the ranks in turn; the last step has those that are left, or none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    bins = [*bins, *([[]] * (-len(bins) % world))]
    for begin in range(0, len(bins), world * micro_batches):
        step = bins[begin : begin + world * micro_batches]
        loss_tokens = sum(len(documents[i]["input_ids"]) - 1 for part in step for i in part)
        own = [
            packed([documents[i]["input_ids"] for i in part] or [[0]], loss_tokens, world) for part in step[rank::world]
        ]
        yield SimpleNamespace(batches=own)


def packed(documents: Sequence[list[int]], loss_tokens: int, ranks: int) -> PackedBatch:
    lengths = tuple(map(len, documents))
    tokens = torch.tensor([token for document in documents for token in document])
    labels = torch.tensor([label for document in documents for label in [*document[1:], -100]])
    positions = torch.cat([*map(torch.arange, lengths)])
    return PackedBatch(tokens, labels, positions, lengths, loss_tokens=loss_tokens, ranks=ranks)


def unbalanced(trainer_class: type[Any], *, context_window: int) -> type[Any]:
    """In place of ``balanced``: the Trainer with its own random batches, packed without padding."""
    from wlb.integrations.huggingface import register_attention

    class Unbalanced(trainer_class):
        def __init__(self, *, model: Any, args: Any, train_dataset: Any, **more: Any) -> None:
            register_attention(model)  # that of the balanced Trainer
            args.per_device_train_batch_size = usual_batch(train_dataset, context_window)
            args.remove_unused_columns = False
            super().__init__(model=model, args=args, train_dataset=train_dataset, **more)
            self.data_collator = FlatteningCollator()  # SFTTrainer makes its own in place of one that it is given

    return Unbalanced


def usual_batch(documents: Sequence[Any], context_window: int) -> int:
    """As many documents as fill the window on average."""
    tokens = sum(len(document["input_ids"]) for document in documents)
    return max(1, round(context_window * len(documents) / tokens))


if __name__ == "__main__":
    sys.exit(main())
