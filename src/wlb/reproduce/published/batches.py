"""Steps measured batch by batch, of which the length of every document is published, under three systems.

DistCA's artifact (hao-ai-lab/DistCA, branch ``ae-ckpt``) has steps of a Llama of 8B parameters, cut to a few layers, on
H200: plain data parallelism, WLB-LLM without delay with per-document context parallelism, and DistCA. Each run is
simulated as the benchmark (``tests/test_e2e_combined.py`` of that repository) ran it, one micro-batch on each rank: the
weights stay whole on every rank, nothing is recomputed, and the host waits for nothing within a step.

What it does not record is how a batch became micro-batches: that changed from commit to commit. Of a few settings that
the commits show, the one is taken under which measured over predicted seconds vary least from batch to batch of the
run. That recovers a setting and fits no seconds: a prediction that is 20% off in every batch varies as little as an
exact one. (A fifth of the batches is left out of that, those furthest from the median: the batch after the first, for
which the benchmark does not warm up, is often 10 to 40% slow, and such a batch decides a correlation.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import PurePosixPath
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from wlb.documents.segments import Segment
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.planning.pricing import Software
from wlb.reproduce.published.prediction import Prediction
from wlb.rivals import distca
from wlb.rivals.plan import Ranks
from wlb.rivals.wlb_llm import breakpoint_tokens, evened
from wlb.simulate import SimulatedJob, simulated_job
from wlb.simulate.costs import JobCosts
from wlb.simulate.step import simulate_steps
from wlb.workload import Hardware, ModelShape, hardware_preset, model_shape

Lists = list[list[int]]  # a batch: lengths of documents, in lists of as many tokens each
Seconds = NDArray[np.float64]

TABLES = {
    "baseline": "measured batches: plain",
    "wlbllm": "measured batches: WLB-LLM",
    "d2": "measured batches: DistCA",
}
WARM_UP = 1.6  # times the median of a run: batches in which the system still warmed up
_COUNTED = 0.8  # of the batches of a run, by which its setting is recovered
_RECOVERED = 0.03  # spread of measured over predicted seconds, at most, where a setting counts as found

_MODEL = ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama3-8b")  # a model of theirs, and its shape here
# Commit 53a9c5a of hao-ai-lab/DistCA (16 August 2025) fuses rotary embedding, SwiGLU and dropout of all systems.
_FUSED_SINCE = "20250816"
_STACK = Software(weights="kept", gathers_context=True)
# Until commit 9426950 (25 August 2025) DistCA's planner levelled attention until ranks differed by less than the square
# of 8,192 tokens; since then it does within a tolerance, by default this project's.
_LEVEL = 0.01
# Until commit d09a369 (21 August 2025) WLB-LLM put gathered keys and values in order in Python, in both directions: a
# slice of K and one of V for each of 2 cp shards of every document, while the device waited. Estimated from the four
# runs that did (cp 2, 4 and 8), the same for all: the host's time for a slice in PyTorch.
_SLICE_SECONDS = 3e-6


@dataclass(frozen=True)
class _Run:
    """A run: ``dp`` x ``cp`` ranks of ``tp`` GPUs. It is ``early`` if the benchmark did not have ``cp_size`` yet."""

    mode: str
    shape: ModelShape
    hardware: Hardware
    tp: int
    dp: int
    cp: int
    early: bool
    batches: tuple[Lists, ...]

    def job(self, *, dp: int | None = None) -> SimulatedJob:
        """Whose context window is a rank's (or a context-parallel group's) share of a batch."""
        ranks = self.dp if dp is None else dp
        return simulated_job(
            self.shape,
            -(-max(sum(map(sum, lists)) for lists in self.batches) // ranks),
            "plain-4d",
            sharding="per_document",
            hardware=self.hardware,
            micro_batches=1,
            tp=self.tp,
            cp=self.cp,
            dp=ranks,
            software=_STACK,
        )


def measured_batch_rows(document: dict[str, Any]) -> list[Prediction]:
    """A row for every batch of every run, in order.

    ``run`` is the run's path. ``row`` names the batch and has a check sum of its documents' lengths. Batches in which
    the system still warmed up have a reason in place of a prediction, and so has a run whose setting is not recovered.
    """
    return [row for run in document["runs"] for row in _rows(run)]


def _rows(run: dict[str, Any]) -> list[Prediction]:
    mode, measured = run["config"].get("mode"), np.array([batch["ms"] / 1e3 for batch in run["batches"]])
    typical = measured <= WARM_UP * np.median(measured)
    predicted, setting, reason = _predicted(run, measured, typical)
    return [
        Prediction(
            table=TABLES.get(mode, f"measured batches: {mode}"),
            run=run["path"],
            row=f"batch {index}, documents {_check_sum(batch['documents']):08x}",
            source=f"hao-ai-lab/DistCA {run.get('commit', '')}".strip(),
            measured_seconds=float(measured[index]),
            predicted_seconds=None if predicted is None or not typical[index] else float(predicted[index]),
            reason=reason if typical[index] else f"over {WARM_UP} times the median of the run: warming up",
            assumed=setting,
        )
        for index, batch in enumerate(run["batches"])
    ]


def _predicted(
    run: dict[str, Any], measured: Seconds, typical: NDArray[np.bool_]
) -> tuple[Seconds | None, str | None, str | None]:
    """Seconds of every batch and the setting recovered; or neither, and why."""
    config = run["config"]
    if config.get("mode") not in TABLES:
        return None, None, f"mode {config.get('mode')!r} is not simulated"
    if config.get("model_path") != _MODEL[0]:
        return None, None, f"the shape of {config.get('model_path')!r} is not known here"
    missing = [name for name in ("num_layers", "tp_size", "dp_size") if not isinstance(config.get(name), int)]
    if missing:
        return None, None, f"its {', '.join(missing)} is not published"
    described = _described(run)
    candidates = {"baseline": _plain, "wlbllm": _wlb_llm, "d2": _distca}[described.mode](described)
    spreads = {name: _spread(measured[typical] / seconds[typical]) for name, seconds in candidates.items()}
    setting = min(spreads, key=spreads.__getitem__)
    if described.mode == "wlbllm" and spreads[setting] > _RECOVERED:
        return None, None, f"packer not recovered: measured over predicted varies by {spreads[setting]:.1%} at least"
    return candidates[setting], setting, None


def _described(run: dict[str, Any]) -> _Run:
    """``run`` as the benchmark ran it.

    Until commit 52a1e36 (21 August 2025), which brought ``cp_size``, WLB-LLM made one context-parallel group of all
    ranks. Those of DistCA are ``dp_size``, whatever ``cp_size`` says.
    """
    config = run["config"]
    dp, cp, early = config["dp_size"], 1, "cp_size" not in config
    if config["mode"] == "wlbllm":
        dp, cp = (1, dp) if early else (dp, config["cp_size"])
    date = re.search(r"20\d{6}", run["path"])
    hardware = hardware_preset("h200")
    return _Run(
        mode=config["mode"],
        shape=replace(model_shape(_MODEL[1]), layers=config["num_layers"]),
        hardware=hardware.eager() if date and date.group() < _FUSED_SINCE else hardware,
        tp=config["tp_size"],
        dp=dp,
        cp=cp,
        early=early,
        batches=tuple(batch["documents"] for batch in run["batches"]),
    )


def _plain(run: _Run) -> dict[str, Seconds]:
    """Lists are dealt to ranks adjacently, or in turn."""
    return _dealt(
        run,
        {
            "adjacent lists on a rank": lambda lists: _adjacent(lists, run.dp),
            "lists dealt in turn": lambda lists: [_joined(lists[rank :: run.dp]) for rank in range(run.dp)],
        },
    )


def _wlb_llm(run: _Run) -> dict[str, Seconds]:
    """The repository's packer, ``distca/planner/wlb_planner.py``, whose L_max was far over the mean for a while."""
    if run.dp == 1:
        predicted = _dealt(run, {"one context-parallel group": lambda lists: [_joined(lists)]})
        if run.early:
            slices = 2 * run.cp * 2 * 2 * run.shape.layers * np.array([len(_joined(lists)) for lists in run.batches])
            predicted |= {
                f"{name}, keys and values put in order in Python": seconds + _SLICE_SECONDS * slices
                for name, seconds in predicted.items()
            }
        return predicted

    def packed(length_factor: float) -> Callable[[Lists], Lists]:
        def pack(lists: Lists) -> Lists:
            lengths = np.array(_joined(lists), np.int64)
            members = evened(lengths, run.dp, breakpoint_tokens(run.shape), length_factor)
            return [lengths[documents].tolist() for documents in members]

        return pack

    return _dealt(run, {"L_max is the mean": packed(1.0), "no L_max": packed(np.inf)})


def _distca(run: _Run) -> dict[str, Seconds]:
    """The first half of the lists and the second are the two half-batches, each served by itself."""
    job = run.job()
    ranks = Ranks(job, job.context_window, keeps_weights=True)

    def seconds(lists: Lists, tolerance: float) -> float:
        lengths = np.array(_joined(lists), np.int64)
        first = len(_joined(lists[: len(lists) // 2]))
        halves = [half for half in (range(first), range(first, len(lengths))) if half]
        plan = distca.serve(halves, lengths, ranks, idle_stages_serve=False, tolerance=tolerance)
        return distca.price_attention_servers(plan, ranks).seconds

    tolerances = {"attention level": _LEVEL}
    if not run.early:
        tolerances["attention within 10%"] = distca.TOLERANCE
    return {
        name: np.array([seconds(lists, tolerance) for lists in run.batches]) for name, tolerance in tolerances.items()
    }


def _dealt(run: _Run, dealings: dict[str, Callable[[Lists], Lists]]) -> dict[str, Seconds]:
    """Seconds of the batches with a micro-batch of documents on each data-parallel rank."""
    costs = JobCosts(run.job())
    predicted = {}
    for name, deal in dealings.items():
        plans = [
            StepPlan(step, tuple((_micro_batch(lengths),) for lengths in deal(lists)))
            for step, lists in enumerate(run.batches)
        ]
        predicted[name] = simulate_steps(plans, costs).seconds
    return predicted


def _adjacent(lists: Lists, ranks: int) -> Lists:
    bounds = [len(lists) * rank // ranks for rank in range(ranks + 1)]
    return [_joined(lists[start:stop]) for start, stop in pairwise(bounds)]


def _micro_batch(lengths: Sequence[int]) -> MicroBatch:
    return MicroBatch(tuple(Segment(index, 0, length) for index, length in enumerate(lengths)), 0.0)


def _joined(lists: Sequence[Sequence[int]]) -> list[int]:
    return [length for of_list in lists for length in of_list]


def _spread(ratios: Seconds) -> float:
    """The mean distance from the median, over the median, of the ``_COUNTED`` part that is nearest to it."""
    distances = np.sort(np.abs(ratios / np.median(ratios) - 1))
    return float(distances[: math.ceil(_COUNTED * len(distances))].mean())


def _check_sum(lists: Lists) -> int:
    """Of the lengths, in whatever order or lists they are."""
    return crc32(np.sort(np.array(_joined(lists), np.int64)).tobytes())


@dataclass(frozen=True)
class SystemRatio:
    """Seconds of ``run``, of one system, over those of ``base``, of another, on the ``batches`` that both ran.

    Both are in ``folder``; ``table`` and ``base_table`` name their systems.
    """

    folder: str
    base_table: str
    base: str
    table: str
    run: str
    batches: int
    measured: float
    predicted: float


def system_ratios(predictions: Sequence[Prediction]) -> list[SystemRatio]:
    """How systems compare, where several in one folder ran batches of the same documents: every two runs, plain first.

    Batches count that both runs measured past their warm-up and that are predicted for both.
    """
    runs: dict[tuple[str, str], dict[str, Prediction]] = {}
    for table in TABLES.values():
        for one in predictions:
            if one.table == table and one.predicted_seconds is not None:
                runs.setdefault((table, one.run), {})[one.row] = one
    ratios = []
    for ((base_table, base), base_rows), ((table, run), rows) in combinations(runs.items(), 2):
        folder, common = PurePosixPath(run).parent, rows.keys() & base_rows.keys()
        if table == base_table or folder != PurePosixPath(base).parent or not common:
            continue
        measured, predicted = (
            sum(getattr(rows[row], field) for row in common) / sum(getattr(base_rows[row], field) for row in common)
            for field in ("measured_seconds", "predicted_seconds")
        )
        ratios.append(SystemRatio(str(folder), base_table, base, table, run, len(common), measured, predicted))
    return ratios
