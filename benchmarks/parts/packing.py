"""The packing methods under comparison, ours and others', and the questions that the packing benchmark asks of them.

A method is one function: documents in, measured step plans out. Ours take documents from a stream and decide themselves
which step trains which. The peers partition the documents of one global batch, so they are given the stream cut into
global batches, each the longest run of arrivals that holds at most N context windows; what they return is one step. All
results are priced with the same workload.

``balance``: how even are the micro-batches, at what delay and planning time, method by method. ``scaling``: how does
planning time grow with the number of micro-batches. ``against_optimum``: how far is a placement from the best one for
the same documents. ``memory``: does the packer's memory grow with the stream.
"""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parts.documents import Lengths, batched, first_steps, segments
from parts.measurement import CpuTimer, in_turns
from parts.peers import Peer
from wlb.documents.segments import Segment
from wlb.packing.exact import FixedSolverPacker, solve
from wlb.packing.options import default_thresholds
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.packing.registry import make_packer
from wlb.workload.base import DocumentPrices
from wlb_studies.packing import PackingStatistics

Row = dict[str, Any]


class Task(NamedTuple):
    """What every method is asked for: micro-batches of a step, tokens of each, and prices of documents."""

    micro_batches: int
    context_window: int
    workload: DocumentPrices


_KARMARKAR_KARP_BUDGET = 2.0  # seconds for a step; larger steps are not tried once one took longer
_SCALING_STEPS = 6  # at least; more where they are small
_PROVEN = 1e-4  # the solver's relative gap; a smaller one counts as optimal


class Outcome:
    """Running account of one method on one stream of documents; plans are not kept, as in training.

    ``planning_seconds`` is the CPU time of the complete steps. ``trained_tokens`` counts the tokens of every document
    in any step, the drained tail included.
    """

    def __init__(self, documents: int) -> None:
        self.statistics = PackingStatistics()
        self.planning_seconds = 0.0
        self.micro_batches = 0
        self.longest_micro_batch = 0
        self.trained_tokens = np.zeros(documents, np.int64)

    @property
    def planning_ms_per_step(self) -> float:
        return 1000 * self.planning_seconds / max(1, self.statistics.steps)

    def add(self, steps: Sequence[StepPlan]) -> None:
        """Take in complete steps."""
        self.statistics.add(steps)
        for step in steps:
            self.micro_batches += len(step.micro_batches)
            self.longest_micro_batch = max(self.longest_micro_batch, *(m.tokens for m in step.micro_batches))
        self.add_tail(steps)

    def add_tail(self, steps: Sequence[StepPlan]) -> None:
        """Take in the last steps of the stream, which are not full and count for nothing but completeness."""
        for step in steps:
            documents, _, lengths = np.array(list(step.segments)).T
            np.add.at(self.trained_tokens, documents, lengths)

    def row(self, lengths: Lengths) -> Row:
        return {
            "steps": self.statistics.steps,
            "imbalance_degree": self.statistics.imbalance_degree,
            "mean_token_delay": self.statistics.mean_token_delay,
            "longest_delay": self.statistics.longest_delay,
            "tokens_per_step_cv": self.statistics.tokens_per_step_cv,
            "longest_micro_batch_tokens": self.longest_micro_batch,
            "micro_batches_per_step": self.micro_batches / max(1, self.statistics.steps),
            "documents_in": len(lengths),
            "documents_out": int(np.count_nonzero(self.trained_tokens)),
            "tokens_in": int(lengths.sum()),
            "tokens_out": int(self.trained_tokens.sum()),
            "every_document_whole": bool((self.trained_tokens == lengths).all()),
        }


Method = Callable[[Lengths, Task], Outcome]


def ours(packer: str, *, time_limit: float | None = None, **options: Any) -> Method:
    """One of the project's packers with its options; ``time_limit`` is in seconds, of a solve."""

    def pack(lengths: Lengths, task: Task) -> Outcome:
        planner = make_packer(packer, **task._asdict(), **options)
        if isinstance(planner, FixedSolverPacker):
            planner.time_limit = time_limit
        outcome, timer = Outcome(len(lengths)), CpuTimer()
        for documents in batched(lengths):
            outcome.add(timer(planner.plan, documents))
        outcome.planning_seconds = timer.seconds
        outcome.add_tail(planner.drain())
        return outcome

    return pack


def theirs(peer: Peer) -> Method:
    """A peer, called once for each global batch; converting to and from its data types is not timed."""

    def step(number: int, documents: list[Segment], task: Task, timer: CpuTimer) -> list[StepPlan]:
        lengths = [document.length for document in documents]
        seconds = np.asarray(task.workload.document_seconds(lengths)).tolist()
        prepared = peer.prepare(lengths, seconds, task.micro_batches, task.context_window)
        micro_batches = (
            MicroBatch(tuple(documents[index] for index in group), sum(seconds[index] for index in group))
            for group in peer.read(timer(peer.partition, prepared))
        )
        return [StepPlan(number, (tuple(micro_batches),))]

    def pack(lengths: Lengths, task: Task) -> Outcome:
        outcome, timer = Outcome(len(lengths)), CpuTimer()
        *whole, last = global_batches(lengths, task.micro_batches * task.context_window)
        for number, documents in enumerate(whole):
            outcome.add(step(number, documents, task, timer))
        outcome.planning_seconds = timer.seconds  # without the last global batch, which is not full
        outcome.add_tail(step(len(whole), last, task, timer))
        return outcome

    return pack


def global_batches(lengths: Lengths, tokens: int) -> list[list[Segment]]:
    """Runs of consecutive documents that hold at most ``tokens`` tokens, each as long as can be."""
    batches: list[list[Segment]] = []
    room = 0
    for document in segments(lengths):
        if document.length > room or not batches:
            batches.append([])
            room = tokens
        batches[-1].append(document)
        room -= document.length
    return batches


def our_methods(context_window: int) -> dict[str, Method]:
    """Every packer that plans fast, by the label of its row.

    ``variable_length`` is at L_max 1.5 windows with 0 to 3 queues, as in the paper and with early release.
    """
    methods = {"sequential (plain-4D)": ours("sequential")}
    methods |= {f"fixed_greedy, window {window}": ours("fixed_greedy", window=window) for window in (1, 2, 4, 8)}
    methods["variable_length, 0 queues"] = ours("variable_length", outlier_thresholds=())
    for queues in (1, 2, 3):
        thresholds = default_thresholds(context_window, queues)
        for early_release, suffix in ((False, "Algorithm 1"), (True, "early release")):
            label = f"variable_length, {queues} queue{'s' * (queues > 1)}, {suffix}"
            methods[label] = ours("variable_length", outlier_thresholds=thresholds, early_release=early_release)
    methods["variable_length, auto (searches included)"] = ours("variable_length", outlier_thresholds="auto")
    return methods


def balance(methods: Mapping[str, Method], lengths: Lengths, task: Task, turns: int) -> list[Row]:
    """Every method on the same documents; planning time is the median over ``turns``."""
    measured = in_turns({name: partial(method, lengths, task) for name, method in methods.items()}, turns)
    return [
        {"method": name, **outcomes[-1].row(lengths), "planning_ms_per_step": _planning_ms(outcomes)}
        for name, outcomes in measured.items()
    ]


def _planning_ms(outcomes: Sequence[Outcome]) -> float:
    return median(outcome.planning_ms_per_step for outcome in outcomes)


def scaling(
    micro_batch_counts: Sequence[int], lengths: Lengths, task: Task, peer: Peer | None, turns: int
) -> list[Row]:
    """variable_length, and Karmarkar-Karp while it stays feasible, for growing N."""
    rows: list[Row] = []
    for micro_batches in micro_batch_counts:
        larger = task._replace(micro_batches=micro_batches)
        steps = max(_SCALING_STEPS, 256 // micro_batches)
        stream = first_steps(lengths, steps * micro_batches * task.context_window)
        per_step = len(stream) / steps
        pack = partial(ours("variable_length"), stream, larger)
        milliseconds = _planning_ms(in_turns({"ours": pack}, turns)["ours"])
        theirs_ms = None
        if peer is not None:
            one_step_and_more = stream[: math.ceil(1.25 * per_step)]  # an incomplete step is not counted
            theirs_ms = theirs(peer)(one_step_and_more, larger).planning_ms_per_step
            peer = peer if theirs_ms < 1000 * _KARMARKAR_KARP_BUDGET else None
        rows.append(
            {
                "micro_batches": micro_batches,
                "documents_per_step": per_step,
                "planning_ms_per_step": milliseconds,
                "microseconds_per_document": 1000 * milliseconds / per_step,
                "nanoseconds_per_n_log2_n": 1e6 * milliseconds / (per_step * math.log2(per_step)),
                "karmarkar_karp_ms_per_step": theirs_ms,
            }
        )
    return rows


def against_optimum(
    plans: Sequence[StepPlan], prices: DocumentPrices, micro_batches: int, longest: int, time_limit: float
) -> Row:
    """How far steps are from the integer program's placement of the same documents (Equation 2).

    The program starts from the steps' own placement, under the same L_max of ``longest`` tokens, and runs at most
    ``time_limit`` seconds of wall time a step.
    """
    over_best, over_bound, gaps = [], [], []
    for plan in plans:
        placed = [(segment.length, number) for number, m in enumerate(plan.micro_batches) for segment in m.segments]
        lengths, start = map(list, zip(*placed, strict=True))
        seconds: NDArray[np.float64] = prices.document_seconds(lengths)
        best = solve(lengths, seconds.tolist(), micro_batches, longest, start=start, time_limit=time_limit)
        largest = max(micro_batch.workload for micro_batch in plan.micro_batches)
        over_best.append(largest / best.largest_seconds - 1)
        over_bound.append(largest / best.bound_seconds - 1)
        gaps.append(best.optimality_gap)
    return {
        "steps": len(plans),
        "time_limit_seconds": time_limit,
        "proven_optimal_steps": sum(gap <= _PROVEN for gap in gaps),
        "gap_left_mean": mean(gaps),
        "gap_left_largest": max(gaps),
        "within_0.01%_of_bound": sum(excess <= _PROVEN for excess in over_bound),
        "over_best_mean": mean(over_best),
        "over_best_largest": max(over_best),
        "over_bound_mean": mean(over_bound),
        "over_bound_largest": max(over_bound),
    }


def memory(lengths: Lengths, task: Task, step_counts: Sequence[int], seed: int) -> list[Row]:
    """Memory of Python objects while streams of growing length pass through, at its peak and kept at the end."""
    rows: list[Row] = []
    for steps in step_counts:
        random = np.random.default_rng(seed)
        packer = make_packer("variable_length", **task._asdict())
        planned = documents = most_held = 0
        tracemalloc.start()
        try:
            while planned < steps:
                chunk = random.choice(lengths, 256).tolist()
                documents += len(chunk)
                planned += len(packer.plan(chunk))
                most_held = max(most_held, len(packer.pending))
            peak = tracemalloc.get_traced_memory()[1]
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        row = {"steps": planned, "documents": documents, "most_documents_held": most_held}
        rows.append(row | {"peak_kib": peak / 1024, "kept_kib": kept / 1024})
    return rows
