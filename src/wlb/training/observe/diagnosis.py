"""Where the time of a running job goes: the paper's Figure 1 as a table, what causes it, and which ranks are slow.

A rank is slow for its work if it takes far more than expected: measured over predicted seconds say how fast it gets
through its work, and as the workload model may be wrong by any constant, each rank is held against others.
``StragglerWatch`` names a rank that is slow for several steps in a row once, and again only if it recovered in between.

``diagnose`` looks at the seconds of all ranks over some steps and returns plain data, which rank 0 writes to
``diagnosis.json`` while the job runs; ``render`` is that as text. Factors are given as measured and as predicted from
the plans. Where both agree the plan is uneven, and a setting may help; where only the measured one is large the plan is
even, and a machine is slow or the workload model wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.terminal import number_of
from wlb.training.observe.imbalance import Imbalance, RankSteps, imbalance_of

FILE = "diagnosis.json"  # in metrics.dir
_WORTH_NAMING = 0.02  # of a step; less is noise
_AS_PLANNED = 0.5  # a plan that foresees at least this share of an imbalance is its cause
_RANKS_NAMED = 4
_STEPS_WATCHED = 5  # looked at together: one slow step may be a page fault or a neighbour's burst
_PEERS = 3  # ranks of a pipeline stage that can tell which of them is the odd one out
_WORTH_SAYING = 0.1  # of the time that a slow rank took
_RECOVERED = 0.9  # of the factor; a rank that hovers around it is not reported again and again

# What differs, and what to do where the plan says so too; in the order in which waiting propagates.
_DIMENSIONS = {
    "tp": ("tensor-parallel ranks", "their work is equal by construction"),
    "cp": ("shards of context-parallel ranks", 'try another sharding.strategy ("hybrid", "adaptive")'),
    "pp": ("pipeline stages", "choose parallel.pp and virtual_pp so that layers and output head divide evenly"),
    "dp": ("data-parallel ranks", 'set packing.assignment = "balanced" or raise packing.micro_batches'),
    "micro_batches": (
        "micro-batches of a pipeline",
        'use packing.method = "makespan" or raise packing.max_length_factor',
    ),
}
_OF_POOLS = _DIMENSIONS | {
    "cp": ("shards of the ranks of a pool", "lower packing.pool_micro_batches, so that there is more to level with"),
    "dp": ("pools", "raise parallel.pool"),
    "micro_batches": (
        "micro-batches of a pool",
        "raise parallel.pool, lower packing.pool_micro_batches, or let long documents wait with packing.max_delay",
    ),
}
_OF_LEVEL_STEPS = _DIMENSIONS | {
    "cp": (
        "ranks over a step",
        "raise packing.global_batch, so that a step has more short documents that make ranks even",
    ),
}
_LABELS_OF_POOLS = {"cp": "in a pool", "dp": "pools"}


@dataclass(frozen=True)
class RankName:
    """Where a rank runs."""

    host: str
    process: int
    device: str

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}, {self.device}"


class StragglerWatch:
    """Looks at the seconds of all ranks, step after step; ``names`` are in rank order, pipeline stage after stage."""

    def __init__(self, names: Sequence[RankName], stages: int, factor: float) -> None:
        self._names = names
        self._stages = stages
        self._factor = factor
        self._window: deque[RankSteps] = deque(maxlen=_STEPS_WATCHED)
        self.slow: frozenset[int] = frozenset()

    def observe(self, rows: RankSteps) -> list[str]:
        """Take in a measured step; returns what to report, a line a rank. ``slow`` are the ranks slow at present."""
        self._window.append(rows)
        if len(self._window) < _STEPS_WATCHED:
            return []
        took, foreseen, waited = (
            np.mean([rows[name] for rows in self._window], axis=0)
            for name in ("compute_seconds", "predicted_seconds", "core_wait_seconds")
        )
        expected = expected_seconds(took, foreseen, self._stages)
        over = took / np.maximum(expected, np.finfo(np.float64).tiny)
        stays = over > self._factor * np.where(np.isin(np.arange(len(over)), list(self.slow)), _RECOVERED, 1.0)
        before, self.slow = self.slow, frozenset(np.flatnonzero(stays).tolist())
        return [
            f"rank {rank} ({self._names[rank]}) is slow: {took[rank]:.3g} s of compute a step where "
            f"{expected[rank]:.3g} s is expected of it" + _because(waited[rank], took[rank])
            for rank in sorted(self.slow - before)
        ]


def _because(waited: float, took: float) -> str:
    return f"; {waited:.3g} s of it waiting for a core that others have" if waited > _WORTH_SAYING * took else ""


def expected_seconds(measured: NDArray[np.float64], predicted: NDArray[np.float64], stages: int) -> NDArray[np.float64]:
    """What each rank's compute should take, in the measured clock's seconds: predicted, times the median rank's pace.

    Where a pipeline stage has enough ranks they are compared with each other only, as the workload model may be wrong
    by another factor for another stage. Of two ranks in the middle the faster counts, so that of two one can be slow.
    Arrays have shape (ranks,), stage after stage.
    """
    pace = measured / np.maximum(predicted, np.finfo(np.float64).tiny)
    groups = np.sort(pace.reshape(stages if len(pace) >= _PEERS * stages else 1, -1), axis=1)
    typical = groups[:, (groups.shape[1] - 1) // 2]
    return predicted * np.repeat(typical, groups.shape[1])


def diagnose(
    steps: Sequence[RankSteps],
    names: Sequence[RankName],
    mesh_shape: tuple[int, ...],
    micro_batches: int | None,
    *,
    last_step: int,
    step_seconds: float,
    straggler_factor: float,
    pooled: bool = False,
) -> dict[str, Any]:
    """Look at measured ``steps``, at least one; the last of them is ``last_step``.

    ``names`` are those of the ranks, ``mesh_shape`` is (pp, dp, cp, tp), ``micro_batches`` are those of a data-parallel
    rank, None where steps are level, and ``step_seconds`` the mean wall time of a step. With ``pooled`` the dp groups
    of cp ranks are elastic pools. The result is JSON-serialisable.
    """
    mean = {name: np.mean([rows[name] for rows in steps], axis=0) for name in steps[0].dtype.names or ()}
    compute, predicted = mean["compute_seconds"], mean["predicted_seconds"]
    expected = expected_seconds(compute, predicted, mesh_shape[0])
    coordinates = np.stack(np.unravel_index(np.arange(len(names)), mesh_shape), axis=1)
    ranks = [
        {
            "rank": rank,
            **asdict(name),
            **dict(zip(("pp", "dp", "cp", "tp"), coordinates[rank].tolist(), strict=True)),
            "compute_seconds": float(compute[rank]),
            "normalised": float(compute[rank] / compute.mean()),
            "predicted_normalised": float(predicted[rank] / predicted.mean()),
            "over_expected": float(compute[rank] / expected[rank]),
            "core_wait_seconds": float(mean["core_wait_seconds"][rank]),
            "data_wait_seconds": float(mean["data_wait_seconds"][rank]),
        }
        for rank, name in enumerate(names)
    ]
    imbalance = imbalance_of(steps, mesh_shape, micro_batches)
    slow = [rank for rank in ranks if rank["over_expected"] > straggler_factor]
    dimensions = _OF_LEVEL_STEPS if micro_batches is None else _OF_POOLS if pooled else _DIMENSIONS
    uneven = _uneven(imbalance, mesh_shape[0], micro_batches, dimensions)
    causes = _stragglers(slow) + uneven + _waits(ranks, step_seconds)
    return {
        "last_step": last_step,
        "steps": len(steps),
        "step_seconds": step_seconds,
        "mean_compute_seconds": float(compute.mean()),
        "slowest_over_mean": float(compute.max() / compute.mean()),
        "pool": mesh_shape[2] if pooled else None,
        "imbalance": imbalance,
        "causes": sorted(causes, key=lambda cause: -cause["cost"]),
        "ranks": ranks,
    }


def _stragglers(slow: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    by_cost = sorted(slow, key=lambda rank: -rank["over_expected"])[:_RANKS_NAMED]
    return [
        {
            "what": "straggler",
            "cost": rank["over_expected"] - 1,
            "text": f"{_named(rank)} takes {rank['over_expected']:.2f} times the seconds expected of it: look at its "
            "machine (other processes, clock speed, temperature)",
        }
        for rank in by_cost
    ]


def _uneven(
    imbalance: Imbalance, pp: int, micro_batches: int | None, dimensions: dict[str, tuple[str, str]]
) -> list[dict[str, Any]]:
    causes = []
    for dimension, (what, remedy) in dimensions.items():
        measured, predicted = (imbalance[dimension][kind] for kind in ("measured", "predicted"))
        if measured is None or predicted is None:
            continue
        # A stage waits for the largest micro-batch while the pipeline fills and empties, for all others all the time.
        share = (pp - 1) / micro_batches if micro_batches and dimension == "micro_batches" else 1.0
        cost = (measured - 1) * share
        if cost < _WORTH_NAMING:
            continue
        as_planned = predicted - 1 >= _AS_PLANNED * (measured - 1)
        why = (
            remedy
            if as_planned
            else f"the plan predicts {predicted:.2f}; the rest is machines, or a workload model that does not fit"
        )
        causes.append({"what": dimension, "cost": cost, "text": f"{what} differ ({measured:.2f}): {why}"})
    return causes


def _waits(ranks: Sequence[dict[str, Any]], step_seconds: float) -> list[dict[str, Any]]:
    causes = []
    for what, field, text in (
        ("cores", "core_wait_seconds", "a core that other processes have: give the job cores of its own"),
        ("data", "data_wait_seconds", "data: it is read too slowly"),
    ):
        worst = max(ranks, key=lambda rank: rank[field])
        cost = worst[field] / step_seconds
        if cost >= _WORTH_NAMING:
            text = f"{_named(worst)} waits {worst[field]:.3g} s a step for {text}"
            causes.append({"what": what, "cost": cost, "text": text})
    return causes


def render(diagnosis: dict[str, Any]) -> str:
    """``diagnosis`` as lines of text."""
    ranks = diagnosis["ranks"]
    slowest = max(ranks, key=lambda rank: rank["normalised"])
    fastest = min(ranks, key=lambda rank: rank["normalised"])
    lines = [
        f"compute of {number_of(len(ranks), 'rank')} without collectives, mean of "
        f"{number_of(diagnosis['steps'], 'step')} up to step {diagnosis['last_step']} "
        f"({diagnosis['step_seconds']:.3g} s each)",
        f"  {'':<15}{'s a step':>9}{'normalised':>12}",
        f"  {'slowest':<15}{slowest['compute_seconds']:>9.3g}{slowest['normalised']:>12.3f}  {_named(slowest)}",
        f"  {'mean':<15}{diagnosis['mean_compute_seconds']:>9.3g}{1:>12.3f}",
        f"  {'fastest':<15}{fastest['compute_seconds']:>9.3g}{fastest['normalised']:>12.3f}  {_named(fastest)}",
        f"  {'slowest/mean':<15}{'measured':>9}{'predicted':>12}",
    ]
    labels = _LABELS_OF_POOLS if diagnosis.get("pool") else {}  # an older file does not say
    for dimension in _DIMENSIONS:
        factor = diagnosis["imbalance"][dimension]
        measured, predicted = (
            "" if factor[kind] is None else f"{factor[kind]:.3f}" for kind in ("measured", "predicted")
        )
        label = labels.get(dimension, dimension.replace("_", "-"))
        lines.append(f"  {label:<15}{measured:>9}{predicted:>12}")
    causes = [cause["text"] for cause in diagnosis["causes"]]
    lines.append("causes, costliest first:" if causes else f"no cause costs {_WORTH_NAMING:.0%} of a step")
    return "\n".join(lines + [f"  {number}. {text}" for number, text in enumerate(causes, 1)])


def _named(rank: dict[str, Any]) -> str:
    where = RankName(rank["host"], rank["process"], rank["device"])
    return f"rank {rank['rank']} ({where})"
