"""The four questions that the packing benchmark asks; each function returns the rows of one table.

``balance``: how even are the micro-batches, at what delay and planning time, method by method. ``scaling``: how does
planning time grow with the number of micro-batches. ``oracle``: how far is the greedy placement from the best one for
the same documents. ``memory``: does the packer's memory grow with the stream.
"""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parts.measurement import in_turns
from parts.packing.methods import Method, OurMethod, Outcome, PeerMethod, Setting
from parts.packing.peers import Peer
from parts.streams import first_steps
from wlb.packing import make_packer
from wlb.packing.exact import solve
from wlb.packing.packer import Packer
from wlb.packing.variable_length import VariableLengthOptions

Row = dict[str, Any]

_KARMARKAR_KARP_BUDGET = 2.0  # seconds for a step; larger steps are not tried once one took longer
_SCALING_STEPS = 6  # at least; more where they are small
_PROVEN = 1e-4  # the solver's relative gap; a smaller one counts as optimal


def balance(methods: Mapping[str, Method], lengths: NDArray[np.int64], setting: Setting, turns: int) -> list[Row]:
    """Every method on the same documents; planning time is the median over ``turns``."""
    measured = in_turns({name: partial(method, lengths, setting) for name, method in methods.items()}, turns)
    return [
        {
            "method": name,
            **_balance_row(outcomes[-1], lengths),
            "planning_ms_per_step": median(outcome.planning_ms_per_step for outcome in outcomes),
        }
        for name, outcomes in measured.items()
    ]


def _balance_row(outcome: Outcome, lengths: NDArray[np.int64]) -> Row:
    statistics = outcome.statistics
    return {
        "steps": statistics.steps,
        "imbalance_degree": statistics.imbalance_degree,
        "mean_token_delay": statistics.mean_token_delay,
        "longest_delay": statistics.longest_delay,
        "tokens_per_step_cv": statistics.tokens_per_step_cv,
        "longest_micro_batch_tokens": outcome.longest_micro_batch,
        "micro_batches_per_step": outcome.micro_batches / max(1, statistics.steps),
        "documents_in": len(lengths),
        "documents_out": int(np.count_nonzero(outcome.trained_tokens)),
        "tokens_in": int(lengths.sum()),
        "tokens_out": int(outcome.trained_tokens.sum()),
        "every_document_whole": bool((outcome.trained_tokens == lengths).all()),
    }


def scaling(
    micro_batch_counts: Sequence[int],
    lengths: NDArray[np.int64],
    setting: Setting,
    peer: Peer | None,
    turns: int,
) -> list[Row]:
    """variable_length, and Karmarkar-Karp while it stays feasible, for growing N."""
    rows: list[Row] = []
    peer_is_feasible = peer is not None
    for micro_batches in micro_batch_counts:
        larger = Setting(micro_batches, setting.context_window, setting.workload)
        steps = max(_SCALING_STEPS, 256 // micro_batches)
        stream = first_steps(lengths, steps * larger.global_batch_tokens)
        measured = in_turns({"ours": partial(OurMethod("variable_length"), stream, larger)}, turns)["ours"]
        per_step = len(stream) / steps
        milliseconds = median(outcome.planning_ms_per_step for outcome in measured)
        row: Row = {
            "micro_batches": micro_batches,
            "documents_per_step": per_step,
            "planning_ms_per_step": milliseconds,
            "microseconds_per_document": 1000 * milliseconds / per_step,
            "nanoseconds_per_n_log2_n": 1e6 * milliseconds / (per_step * math.log2(per_step)),
            "karmarkar_karp_ms_per_step": None,
        }
        if peer is not None and peer_is_feasible:
            one_step_and_more = stream[: math.ceil(1.25 * per_step)]  # an incomplete step is not counted
            row["karmarkar_karp_ms_per_step"] = PeerMethod(peer)(one_step_and_more, larger).planning_ms_per_step
            peer_is_feasible = row["karmarkar_karp_ms_per_step"] < 1000 * _KARMARKAR_KARP_BUDGET
        rows.append(row)
    return rows


def oracle(lengths: NDArray[np.int64], setting: Setting, steps: int, time_limit: float) -> Row:
    """The greedy placement of ``steps`` steps against the integer program for the same documents (Equation 2).

    The program starts from the greedy placement and runs at most ``time_limit`` seconds of wall time a step.
    """
    plans = _packer(setting).plan(lengths.tolist())
    capacity = VariableLengthOptions().most_tokens(setting.context_window, setting.micro_batches)
    chosen = np.unique(np.linspace(0, len(plans) - 1, steps).astype(int))
    over_best, over_bound, gaps = [], [], []
    for index in chosen:
        step = plans[index]
        placed = [(s.length, number) for number, m in enumerate(step.micro_batches) for s in m.segments]
        step_lengths = [length for length, _ in placed]
        greedy = max(micro_batch.workload for micro_batch in step.micro_batches)
        best = solve(
            step_lengths,
            setting.workload.document_seconds(step_lengths).tolist(),
            setting.micro_batches,
            capacity,
            start=[number for _, number in placed],
            time_limit=time_limit,
        )
        over_best.append(greedy / best.largest_seconds - 1)
        over_bound.append(greedy / best.bound_seconds - 1)
        gaps.append(best.optimality_gap)
    return {
        "steps": len(gaps),
        "time_limit_seconds": time_limit,
        "proven_optimal_steps": sum(gap <= _PROVEN for gap in gaps),
        "mean_gap_left": float(np.mean(gaps)),
        "largest_gap_left": max(gaps),
        "greedy_optimal_steps": sum(excess <= _PROVEN for excess in over_bound),
        "greedy_over_best_mean": float(np.mean(over_best)),
        "greedy_over_best_largest": max(over_best),
        "greedy_over_bound_mean": float(np.mean(over_bound)),
        "greedy_over_bound_largest": max(over_bound),
    }


def memory(lengths: NDArray[np.int64], setting: Setting, step_counts: Sequence[int], seed: int) -> list[Row]:
    """Memory of Python objects while streams of growing length pass through, at its peak and kept at the end."""
    rows: list[Row] = []
    for steps in step_counts:
        random = np.random.default_rng(seed)
        packer = _packer(setting)
        planned = documents = most_held = 0
        tracemalloc.start()
        try:
            while planned < steps:
                chunk = random.choice(lengths, 256).tolist()
                documents += len(chunk)
                planned += len(packer.plan(chunk))
                most_held = max(most_held, packer.pending_documents)
            peak = tracemalloc.get_traced_memory()[1]
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        rows.append(
            {
                "steps": planned,
                "documents": documents,
                "most_documents_held": most_held,
                "peak_kib": peak / 1024,
                "kept_kib": kept / 1024,
            }
        )
    return rows


def _packer(setting: Setting) -> Packer[Any]:
    return make_packer(
        "variable_length",
        micro_batches=setting.micro_batches,
        context_window=setting.context_window,
        workload=setting.workload,
    )
