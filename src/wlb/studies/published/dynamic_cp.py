"""Megatron-Core's dynamic context parallelism over ``dp_balanced``, as NVIDIA measured it on 4 to 64 GPUs.

Source: NVIDIA/Megatron-LM, branch ``dev``, ``examples/dynamic_context_parallel`` (README.md and benchmark_dcp.sh),
measured on 9 June 2026. Model, layout, lengths and number of documents of a step are published, and so is the seed of
the lengths, so every step has the very documents that were measured: the first 10 of 30 steps are left out, and of
the others' seconds the mean without the lowest and the highest tenth is taken, as there. The GPU is not published.

A step is planned as by the rival policies. ``default_dynamic_cp`` then packed the rounds of ``megatron-dynamic``
(``dynamic_packed``); ``megatron-packing`` replaced that on 27 June 2026. The model is small: the measured steps take
several times what the GPUs compute, and time of the host is not simulated, so neither seconds nor ratios can agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.schedules.operations import rank_operations
from wlb.schedules.timing import pipeline_times
from wlb.simulate import simulated_job
from wlb.simulate.costs import JobCosts
from wlb.studies.experiment import Column, Table, Value
from wlb.studies.policies.megatron import dp_balanced, dynamic_packed, packing_aware
from wlb.studies.policies.plan import GroupPlan, Ranks
from wlb.studies.policies.pricing import begun_together, group_seconds
from wlb.studies.published.metrics import Row, positive, size, stated
from wlb.studies.published.prediction import ODD, Prediction, source_of, why
from wlb.workload import ModelShape, hardware_preset
from wlb.workload.links import group_link, shard_bytes
from wlb.workload.weights import parameters

Integers = NDArray[np.int64]

TABLE = "megatron dynamic CP example"
# Quoted: README.md, "Slurm Benchmark Results", seconds of dp_balanced over seconds of dynamic CP by number of GPUs.
PUBLISHED_RATIOS = {4: 1.285, 8: 1.412, 16: 1.212, 32: 1.375, 64: 1.495}
ASSUMED = (
    "preset b200 with 4 GPUs a node; gradients reduced over one 400 Gb/s adapter for each GPU; no time of the host, no "
    "launches of kernels"
)
HARDWARE = "b200"
_GPUS_OF_A_NODE = 4  # quoted
# Quoted: benchmark_dcp.sh. Its feed-forward layer has two matrices 8,192 wide, as many weights as three of 2/3 of that.
SHAPE = ModelShape(
    hidden=2048, layers=12, heads=16, kv_heads=16, head_dim=128, ffn_hidden=8192 * 2 // 3, vocab_size=131_072
)
_WINDOW, _CAPACITY, _CP = 8192, 2048, 4
_DOCUMENTS_OF_A_RANK = 8  # of each data-parallel rank, in a step
_SHORTEST, _MEAN, _SIGMA = 128, 1024, 1.5
_SEED, _DRAWN = 0, 1_000_000  # megatron/training/datasets/sft_dataset.py
_GRADIENT_BYTES = 4
_STEPS = range(10, 30)
_TRIMMED = len(_STEPS) // 10  # at either end

Policy = Callable[[Integers, Ranks], GroupPlan]
_POLICIES: dict[str, Policy] = {"dp_balanced": dp_balanced, "default_dynamic_cp": dynamic_packed}


def dynamic_cp_row(row: Row) -> Prediction:
    """A prediction, or why there is none, for a row of ``TABLE``: gpus, policy and value in ms, beside its source."""
    one = Prediction(TABLE, "", f"{row.get('policy')}, {row.get('gpus')} GPUs", source_of(row))
    try:
        one = replace(one, measured_seconds=positive(row, "value") / 1000)
        name, gpus = stated(row, "policy").split(",")[0], size(row, "gpus")
        if name not in _POLICIES:
            raise UserError(f"no policy is called {name!r}")
        if gpus % _CP:
            raise UserError(f"{gpus} GPUs are no multiple of its cp, {_CP}")
        return replace(one, predicted_seconds=step_seconds(_POLICIES[name], gpus), assumed=ASSUMED)
    except ODD as error:
        return replace(one, reason=why(error))


def speed_ratios() -> Table:
    """Seconds of ``dp_balanced`` over those of dynamic CP, a row for each number of GPUs that was published."""
    columns = (
        Column("GPUs", "", ".0f"),
        Column("published", "quoted", ".3f"),
        Column("predicted", "simulated", ".3f"),
        Column("predicted / published", "simulated", ".2f"),
        Column("predicted, packing-aware", "simulated", ".3f"),
    )
    rows: list[tuple[Value, ...]] = []
    for gpus, published in PUBLISHED_RATIOS.items():
        base = step_seconds(dp_balanced, gpus)
        predicted = base / step_seconds(dynamic_packed, gpus)
        rows.append((gpus, published, predicted, predicted / published, base / step_seconds(packing_aware, gpus)))
    return Table("Megatron-Core's dynamic CP: speed over dp_balanced", columns, rows)


@lru_cache(maxsize=64)
def step_seconds(policy: Policy, gpus: int) -> float:
    """A step's seconds, the trimmed mean over the measured steps."""
    ranks = _ranks(gpus)
    padded_to = 2 * (_CP if policy is dp_balanced else gpus)  # as cp may be as large
    seconds = sorted(_seconds(policy(documents(step, gpus, padded_to), ranks), ranks) for step in _STEPS)
    return float(np.mean(seconds[_TRIMMED : len(seconds) - _TRIMMED]))


def _seconds(plan: GroupPlan, ranks: Ranks) -> float:
    """All micro-batches, then reducing all gradients, then AdamW of all weights on every GPU.

    That is what the script runs: neither a distributed optimizer nor reducing beside the backward is asked for.
    """
    hardware, gpus = ranks.job.hardware, ranks.count
    seconds, _ = group_seconds(plan, ranks)
    slots = seconds.forward.shape[-1]
    operations = rank_operations("1f1b", 1, slots)
    together = begun_together(plan, ranks)[None]
    times = pipeline_times(operations, seconds.forward[None], seconds.backward[None], together=together)
    weights = parameters(SHAPE, tied_embeddings=True)
    reduced = group_link(hardware, "all_gather", gpus, 1).seconds(shard_bytes(_GRADIENT_BYTES * weights, gpus))
    update = JobCosts(ranks.job.with_layout(dp=1)).optimizer.sum() * weights / parameters(SHAPE)
    return float(times.rank_ends.max() + 2 * reduced + update)  # reduced and scattered, then gathered


def documents(step: int, gpus: int, padded_to: int) -> Integers:
    """Lengths of a step's documents as they are gathered, rank after rank, padded to a multiple of ``padded_to``.

    Ranks draw in turn. The last token of a document is only a label.
    """
    dp = gpus // _CP
    count = dp * _DOCUMENTS_OF_A_RANK
    drawn = _lengths()[step * count : (step + 1) * count].reshape(_DOCUMENTS_OF_A_RANK, dp).T.ravel()
    return -(-(drawn - 1) // padded_to) * padded_to


@lru_cache(maxsize=1)
def _lengths() -> Integers:
    location = np.log(_MEAN) - _SIGMA**2 / 2
    drawn = np.random.RandomState(_SEED).lognormal(location, _SIGMA, _DRAWN)
    return np.clip(drawn, _SHORTEST, _WINDOW).astype(np.int64)


def _ranks(gpus: int) -> Ranks:
    hardware = replace(hardware_preset(HARDWARE), node_size=_GPUS_OF_A_NODE)
    return Ranks(simulated_job(SHAPE, _WINDOW, "fixed-4d", hardware=hardware, dp=gpus), _CAPACITY)
