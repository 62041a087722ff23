"""Sharding strategies compared on micro-batches sampled from a corpus's lengths.

Micro-batches are consecutive windows of the documents, cut where the window ends, as in sequential packing. Every
strategy shards the same micro-batches.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.report.html.diagrams import areas_by_document
from wlb.sharding import ShardPlan, make_shard_plan
from wlb.sharding.latency import Priced
from wlb.sharding.pieces import Pieces, in_order, locality
from wlb.sharding.plan import owners
from wlb.workload import Costs
from wlb.workload.flops import attended_pairs
from wlb_studies.plots import pyplot_without_display, save

_CHOICES = ("per_document", "per_sequence")


@dataclass(frozen=True)
class StrategyResult:
    """Means over micro-batches; an imbalance is the largest over the mean rank."""

    strategy: str
    attention_imbalance: float  # of attended query-key pairs
    latency_imbalance: float  # of predicted seconds
    token_imbalance: float
    kv_gather_fraction: float  # share of tokens whose keys and values another rank attends
    slowest_seconds: float  # predicted, of the slowest rank, forward and backward over all layers
    planning_ms: float  # CPU time
    micro_batches: int
    chosen: dict[str, float] | None  # of adaptive: shares of micro-batches by strategy

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sample_micro_batches(
    lengths: NDArray[np.int64], context_window: int, samples: int, seed: int = 0
) -> list[NDArray[np.int64]]:
    """Segment lengths of up to ``samples`` micro-batches of exactly ``context_window`` tokens, without repetition.

    Raises ``UserError`` if the documents do not fill one.
    """
    ends = np.cumsum(lengths)
    windows = int(ends[-1]) // context_window
    if windows == 0:
        raise UserError(
            f"the documents hold {ends[-1]} tokens, which is less than one context window of {context_window}; "
            "give more documents or a smaller context window"
        )
    drawn = np.random.default_rng(seed).choice(windows, min(samples, windows), replace=False)
    micro_batches = []
    for start in np.sort(drawn) * context_window:
        stop = start + context_window
        inside = ends[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, stop)]
        micro_batches.append(np.diff(np.concatenate([[start], inside, [stop]])))
    return micro_batches


def compare_strategy(
    strategy: str,
    micro_batches: Sequence[NDArray[np.int64]],
    cp_size: int,
    workload: Costs,
    on_progress: Callable[[], None] = lambda: None,
) -> StrategyResult:
    """Shard every micro-batch; ``workload`` (of one GPU, without context parallelism) prices the plans.

    ``on_progress`` is called after each. Raises as ``make_shard_plan`` does.
    """
    rows: list[tuple[float, float, float, float, float, float]] = []
    chosen: Counter[str] = Counter()
    for lengths in micro_batches:
        began = time.process_time()
        plan = make_shard_plan(lengths, cp_size, strategy, workload=workload)
        planning_ms = 1e3 * (time.process_time() - began)
        latency = shard_latency(plan, workload)
        balance = (_imbalance(pairs_of_ranks(plan)), latency.imbalance, _imbalance(plan.tokens_per_rank))
        rows.append((*balance, plan.kv_gather_fraction, latency.slowest, planning_ms))
        if strategy == "adaptive":
            chosen[_choice(plan, lengths)] += 1
        on_progress()
    attention, seconds, tokens, gathered, slowest, planning = np.mean(rows, axis=0).tolist()
    shares = {name: chosen[name] / len(rows) for name in _CHOICES} if chosen else None
    return StrategyResult(strategy, attention, seconds, tokens, gathered, slowest, planning, len(rows), shares)


@dataclass(frozen=True)
class ShardLatency:
    """Seconds, forward and backward over all layers; arrays are of ranks, shape (cp_size,)."""

    attention: NDArray[np.float64]
    linear: NDArray[np.float64]
    gather: float
    slowest: float  # of the group, whose ranks synchronise in every layer

    @property
    def imbalance(self) -> float:
        """Slowest over mean rank, as if nothing hid the exchange."""
        ranks = self.attention + self.linear + self.gather
        return float(ranks.max() / ranks.mean())


def shard_latency(plan: ShardPlan, costs: Costs) -> ShardLatency:
    """Price ``plan``, which has no slice, with the ``costs`` of one GPU."""
    pieces = in_order(Pieces(owners(plan.pieces), *np.concatenate(plan.pieces).T))
    shards = locality(pieces, len(plan.segment_lengths), 1, plan.cp_size).attending(pieces, costs)
    tokens, exchange = shards.tokens[0], costs.exchange_seconds(shards.waits_for[0].max(), plan.cp_size)
    return ShardLatency(
        attention=shards.attention_forward[0] + shards.attention_backward[0],
        linear=costs.blocks_seconds(tokens) + costs.head_seconds(tokens) + 2 * costs.tp_seconds(tokens),
        gather=2 * float(exchange),
        slowest=float(Priced.of(shards, costs).whole.both[0]),
    )


def pairs_of_ranks(plan: ShardPlan) -> NDArray[np.int64]:
    """Query-key pairs that each rank computes; shape (cp_size,)."""
    before = [(table[:, :1] == 0) * (plan.earlier or 0) for table in plan.pieces]
    pairs = [attended_pairs(table[:, 1:] + more) for table, more in zip(plan.pieces, before, strict=True)]
    return np.array([int((stop - start).sum()) for start, stop in map(np.transpose, pairs)])


def _choice(plan: ShardPlan, lengths: NDArray[np.int64]) -> str:
    """Which of its two strategies an adaptive plan chose."""
    per_document = make_shard_plan(lengths, plan.cp_size, "per_document")
    same = all(np.array_equal(mine, its) for mine, its in zip(plan.pieces, per_document.pieces, strict=True))
    return _CHOICES[not same]


def _imbalance(values: NDArray[np.int64]) -> float:
    return float(values.max() / values.mean())


def plot_shards(plans: Sequence[ShardPlan], path: Path) -> None:
    """Draw one panel per plan of the same micro-batch: each rank's attended area over the mean, by document."""
    pyplot = pyplot_without_display()
    documents, areas = areas_by_document(plans)
    colours = [*pyplot.get_cmap("viridis")(np.linspace(0.05, 0.9, len(documents) - 1)), "#c9ced4"]
    figure, axes = pyplot.subplots(
        1, len(plans), figsize=(1.5 + 3.0 * len(plans), 3.8), sharey=True, squeeze=False, constrained_layout=True
    )
    for axis, plan, area in zip(axes[0], plans, areas, strict=True):
        ranks, tops = np.arange(plan.cp_size), area.cumsum(axis=1)
        bars = [
            axis.bar(ranks, area[:, n], bottom=tops[:, n] - area[:, n], color=colour, width=0.85)
            for n, colour in enumerate(colours)
        ]
        axis.axhline(1.0, color="black", linewidth=1)
        largest = f"largest {tops[:, -1].max():.3f}, K/V gathered {plan.kv_gather_fraction:.0%}"
        axis.set_title(f"{plan.strategy}\n{largest}", fontsize=9)
        axis.set_xlabel("rank")
        axis.set_xticks(ranks if plan.cp_size <= 16 else ranks[:: plan.cp_size // 8])
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("attended area over the mean rank")
    figure.legend(bars, documents, title="document", loc="outside right upper", frameon=False, fontsize=8)
    save(figure, path)
