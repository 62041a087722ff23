"""Attention of every context-parallel rank under every sharding strategy, measured beside its price.

One device takes the part of each rank in turn: the rank's own tokens, segment by segment, then its pieces over the keys
that other ranks would have sent, forward and backward. Not measured: the exchange, and merging the two results. Ranks
that do the same work are measured once.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.parts.gpu.setting import Comparison, Result, Row, Setting, Workloads, measure
from wlb.attention.shard_layout import shard_layout
from wlb.attention.variable_length import VariableLengthBatch
from wlb.documents.synthetic import sample_lengths
from wlb.profiling.timing import Case
from wlb.profiling.workbench import Workbench
from wlb.sharding import STRATEGIES, ShardPlan, make_shard_plan
from wlb_studies.sharding import sample_micro_batches, shard_latency

DOCUMENTS = 4000
BASELINE = "per_sequence"
MEASURED = "measured"
Sharded = dict[str, NDArray[np.float64]]  # seconds of the ranks of one micro-batch under one strategy
Work = tuple[VariableLengthBatch, ...]  # of one rank, done one after another


def sharding(setting: Setting, workloads: Workloads) -> Result:
    """Plans are made with the last of ``workloads``, which is the measured one where there is one."""
    pricing = list(workloads.values())[-1]
    lengths = sample_lengths(DOCUMENTS, setting.sharded_window, setting.seed)
    micro_batches = sample_micro_batches(lengths, setting.sharded_window, setting.sharded_micro_batches, setting.seed)
    plans = {
        (cp_size, strategy): [make_shard_plan(m, cp_size, strategy, workload=pricing) for m in micro_batches]
        for cp_size in setting.cp_sizes
        for strategy in STRATEGIES
    }
    seconds = _measure([plan for made in plans.values() for plan in made], setting)
    sharded = {key: [_seconds(plan, seconds, workloads) for plan in made] for key, made in plans.items()}
    rows = [_row(*key, made, sharded[key[0], BASELINE]) for key, made in sharded.items()]
    return Result(rows, [_compare(cp_size, sharded) for cp_size in setting.cp_sizes])


def _measure(plans: Sequence[ShardPlan], setting: Setting) -> dict[Work, float]:
    """Seconds of all layers of every work that there is, forward and backward."""
    works = {work for plan in plans for rank in range(plan.cp_size) if (work := _work(plan, rank))}
    longest = max(max(sum(batch.query_lengths), sum(batch.key_lengths)) for work in works for batch in work)
    bench = setting.workbench(setting.shape, longest)
    timings = measure({work: _case(work, bench) for work in works}, setting)
    return {work: float(timing.sum()) * setting.shape.layers for work, timing in timings.items()}


def _work(plan: ShardPlan, rank: int) -> Work:
    layout = shard_layout(plan, rank, torch.device("cpu"))  # of which only the lengths are needed
    received = [part.attended.batch for part in layout.parts if part.attended is not None]
    return tuple(received if layout.own_batch is None else [layout.own_batch, *received])


def _case(work: Work, bench: Workbench) -> Case:
    parts = [bench.attention(batch) for batch in work]

    def backward(results: list[object]) -> None:
        for part, result in zip(parts, results, strict=True):
            part.backward(result)

    return Case(lambda: [part.forward() for part in parts], backward)


def _seconds(plan: ShardPlan, measured: dict[Work, float], workloads: Workloads) -> Sharded:
    """Of each rank's attention, of shape (cp_size,): as measured, and as every workload predicts it."""
    ranks = np.array([measured.get(_work(plan, rank), 0.0) for rank in range(plan.cp_size)])
    return {MEASURED: ranks} | {name: shard_latency(plan, w).attention for name, w in workloads.items()}


def _row(cp_size: int, strategy: str, sharded: Sequence[Sharded], baseline: Sequence[Sharded]) -> Row:
    """Means over micro-batches of slowest over mean rank; sums over them of the slowest, over the baseline's."""
    slowest, of_baseline = (
        {name: sum(s[name].max() for s in some) for name in some[0]} for some in (sharded, baseline)
    )
    return {
        "cp": cp_size,
        "strategy": strategy,
        "imbalance": {name: float(np.mean([s[name].max() / s[name].mean() for s in sharded])) for name in slowest},
        "over per_sequence": {name: float(slowest[name] / of_baseline[name]) for name in slowest},
        "measured_seconds": [s[MEASURED].tolist() for s in sharded],
    }


def _compare(cp_size: int, sharded: dict[tuple[int, str], list[Sharded]]) -> Comparison:
    """All ranks that have tokens, under all strategies."""
    mine = [s for key, made in sharded.items() if key[0] == cp_size for s in made]
    seconds = {name: np.concatenate([s[name][s[MEASURED] > 0] for s in mine]).tolist() for name in mine[0]}
    return Comparison(f"attention of ranks, cp {cp_size}", seconds.pop(MEASURED), seconds)
