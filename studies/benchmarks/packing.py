"""Packing: the project's packers beside those of verl, TRL and Megatron-Core, in one run.

    make peers                                   # once: an environment with the peers, .venv-peers
    .venv-peers/bin/python -m studies.benchmarks.packing [--lengths FILE] [--out FILE]

Without the peers' environment (``.venv/bin/python``) their rows are left out. Every method packs the same documents, by
the prices of a 7B model on H100 with tp 8 and cp 2; L_max is 1.5 windows where a method has one. Ours take documents
from a stream and decide themselves which step trains which. The peers divide the documents of one global batch, so they
are given the stream cut into global batches, each the longest run of arrivals that holds at most N context windows, and
what they return is one step. Times are CPU time of the process, the median over ``--turns`` turns. Converting to and
from a peer's data types is not timed.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from studies.benchmarks.peers import Peer, installed_peers
from wlb.documents.lengths import read_lengths
from wlb.documents.segments import Segment
from wlb.job.job import Job
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.simulate import simulated_job
from wlb_studies.packing import PackingStatistics, packer_for

Row = dict[str, Any]
AT_ONCE = 64  # documents, as the training loop feeds its packer
FACTOR = 1.5  # L_max in windows
OURS: dict[str, tuple[str, Row]] = {
    "balanced": ("balanced", {}),
    "variable_length, 2 queues": ("variable_length", {}),
    "sequential (plain-4D)": ("sequential", {}),
    "fixed_greedy, 1 global batch": ("fixed_greedy", {}),
    "fixed_greedy, 8 global batches": ("fixed_greedy:8", {}),
}
COLUMNS = {
    "method": "{method}",
    "imbalance": "{imbalance_degree:.3f}",
    "token delay": "{mean_token_delay:.2f}",
    "longest": "{longest_delay}",
    "tokens/step CV": "{tokens_per_step_cv:.3f}",
    "longest m.-b.": "{longest_micro_batch_tokens:,}",
    "ms/step": "{planning_ms_per_step:.3g}",
    "steps": "{steps}",
    "whole": "{every_document_whole}",
}


class Packed(NamedTuple):
    """What a method made of some documents, and how long that took; ``last`` is the tail, which is no whole step."""

    steps: list[StepPlan]
    last: list[StepPlan]
    seconds: float


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run every method, print the table and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", metavar="LENGTHS", help="as for wlb check; default: 100,000 synthetic documents")
    parser.add_argument("--context-window", type=int, default=131_072)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3, help="repetitions of every timing")
    options = parser.parse_args(arguments)
    given = options.lengths or f"synthetic:100000:{options.context_window}:0"
    lengths = np.minimum(read_lengths(given), options.context_window)
    job = simulated_job("7b", options.context_window, micro_batches=options.micro_batches, tp=8, cp=2, pp=4)
    peers, missing = installed_peers()
    for name in missing:
        console.print(f"[yellow]{name} is not installed here and has no row; `make peers` makes an environment with it")
    freeze_imports()
    documents = [Segment(document, 0, length) for document, length in enumerate(lengths.tolist())]
    methods: dict[str, Callable[[], Packed]] = {
        label: partial(packed_by_ours, documents, job, method, options_of)
        for label, (method, options_of) in OURS.items()
    }
    methods |= {peer.label: partial(packed_by_peer, documents, job, peer) for peer in peers}
    packed = in_turns(methods, options.turns)
    rows = [row_of(name, turns, lengths) for name, turns in packed.items() if turns[-1].steps]
    for name in sorted({*packed} - {row["method"] for row in rows}):
        console.print(
            f"[yellow]{name} has no row: the documents fill none of its steps; give more, or fewer micro-batches"
        )
    results = facts("verl", "trl", "datasets", "pyarrow") | {"lengths": given, "turns": options.turns}
    console.print(results)
    show(f"{len(lengths):,} documents, {options.micro_batches} micro-batches a step", rows, COLUMNS)
    write(results | {"methods": rows}, options.out)


def packed_by_ours(documents: Sequence[Segment], job: Job, method: str, options: Row) -> Packed:
    packer, timer = packer_for(method, job, max_length_factor=FACTOR, **options), CpuTimer()
    starts = range(0, len(documents), AT_ONCE)
    steps = [step for start in starts for step in timer(packer.plan, documents[start : start + AT_ONCE])]
    return Packed(steps, packer.drain(), timer.seconds)


def packed_by_peer(documents: Sequence[Segment], job: Job, peer: Peer) -> Packed:
    micro_batches, window = job.step_micro_batches, job.context_window
    timer = CpuTimer()

    def step(number: int, batch: Sequence[Segment]) -> StepPlan:
        lengths = [document.length for document in batch]
        seconds = np.asarray(job.packing_prices.document_seconds(lengths)).tolist()
        prepared = peer.prepare(lengths, seconds, micro_batches, window)
        groups = peer.read(timer(peer.partition, prepared))
        made = (MicroBatch(tuple(batch[i] for i in group), sum(seconds[i] for i in group)) for group in groups)
        return StepPlan(number, (tuple(made),))

    *whole, last = global_batches(documents, micro_batches * window)
    steps = [step(number, batch) for number, batch in enumerate(whole)]
    seconds = timer.seconds  # without the last global batch, which is not full
    return Packed(steps, [step(len(whole), last)], seconds)


def global_batches(documents: Sequence[Segment], tokens: int) -> Iterator[list[Segment]]:
    """Runs of consecutive documents that hold at most ``tokens`` tokens, each as long as can be."""
    batch: list[Segment] = []
    room = tokens
    for document in documents:
        if document.length > room:
            yield batch
            batch, room = [], tokens
        batch.append(document)
        room -= document.length
    yield batch


def row_of(method: str, turns: Sequence[Packed], lengths: NDArray[np.int64]) -> Row:
    steps, last, _ = turns[-1]
    statistics = PackingStatistics()
    statistics.add(steps)
    trained = np.zeros(len(lengths), np.int64)
    for step in [*steps, *last]:
        documents, _, pieces = step.table.T
        np.add.at(trained, documents, pieces)
    return {
        "method": method,
        "imbalance_degree": statistics.imbalance_degree,
        "mean_token_delay": statistics.mean_token_delay,
        "longest_delay": statistics.longest_delay,
        "tokens_per_step_cv": statistics.tokens_per_step_cv,
        "longest_micro_batch_tokens": max(one.tokens for step in steps for one in step.micro_batches),
        "planning_ms_per_step": 1e3 * median(turn.seconds for turn in turns) / len(steps),
        "steps": len(steps),
        "every_document_whole": bool((trained == lengths).all()),
    }


if __name__ == "__main__":
    sys.exit(main())
