"""Predict steps of samplers whose documents a table describes by a formula, instead of listing them.

Source: huggingface/transformers, pull request 47340, which measures ``batch_rebalance`` against two other samplers on
lengths drawn from a clamped log-normal distribution. Every document of a micro-batch is padded to its longest. The
documents are drawn again here, with a seed of ours, and the median of the steps is compared with the printed one.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb_studies.policies.rebalance import balanced_runs, cost
from wlb_studies.published.metrics import Row, seconds_of_step, size
from wlb_studies.published.prediction import ODD, Prediction, why
from wlb_studies.published.whole_steps import described_row, published_step

Integers = NDArray[np.int64]
KIND = "padded samplers"
_FORMULA = re.compile(r"([\d,]+) lengths lognormvariate\(mu=([\d.]+), sigma=([\d.]+)\) clamped to \[(\d+), (\d+)\]")
_SEED = 0


def is_sampled(row: Row) -> bool:
    return _FORMULA.search(str(row.get("data"))) is not None


def sampled_row(row: Row) -> Prediction:
    """A prediction or a reason for a row whose documents are drawn by a formula."""
    one = replace(described_row(row), kind=KIND, missing="kernels that are not fused, and host time")
    try:
        arm = re.sub(r"\W.*", "", str(row.get("arm")))
        if arm not in _SAMPLERS:
            raise UserError(f"its arm is unknown here: {row.get('arm')}; choose one of {', '.join(_SAMPLERS)}")
        if any(size(row, name) > 1 for name in ("tp", "cp", "pp")):
            raise UserError("samplers deal documents to data-parallel ranks; its tp, cp or pp is over 1")
        steps = [published_step(row | {"lengths": lengths}) for lengths in _steps(row, _SAMPLERS[arm])]
        if not steps:
            raise UserError("its documents fill no step")
        median = float(np.median([step.seconds for step in steps]))
        assumed = f"{len(steps)} steps of documents drawn with seed {_SEED}"
        return replace(one, measured_seconds=seconds_of_step(row), predicted_seconds=median, assumed=assumed)
    except ODD as error:
        return replace(one, reason=why(error))


def _steps(row: Row, sampler: Callable[[Integers, int, int, int], Iterable[Any]]) -> list[list[list[int]]]:
    """Padded lengths of the micro-batches of every step, data-parallel rank by rank."""
    found = _FORMULA.search(row["data"])
    assert found is not None
    mu, sigma = map(float, found.group(2, 3))
    count, shortest, longest = (int(text.replace(",", "")) for text in found.group(1, 4, 5))
    generator = np.random.default_rng(_SEED)
    lengths = np.clip(generator.lognormal(mu, sigma, count), shortest, longest).astype(np.int64)
    ranks, batch, step = size(row, "gpus"), size(row, "micro_batch"), size(row, "global_batch")
    if not (micro_batches := step // (ranks * batch)):
        raise UserError(f"its global_batch of {step} has no micro-batch of {batch} for each of {ranks} GPUs")
    return [
        [[int(max(run))] * len(run) for rank in step_lists for run in rank]
        for step_lists in sampler(lengths, ranks, micro_batches, batch)
    ]


def _in_order(order: Integers, ranks: int, micro_batches: int, batch: int) -> Integers:
    """Documents dealt to ranks in turn, then cut; shape (steps, ranks, micro-batches, batch)."""
    steps = len(order) // (ranks * micro_batches * batch)
    dealt = order[: steps * ranks * micro_batches * batch].reshape(-1, ranks).T
    return dealt.reshape(ranks, steps, micro_batches, batch).swapaxes(0, 1)


def _random(lengths: Integers, ranks: int, micro_batches: int, batch: int) -> Integers:
    return _in_order(lengths, ranks, micro_batches, batch)


def _group_by_length(lengths: Integers, ranks: int, micro_batches: int, batch: int) -> Integers:
    """Sorted within at most 50 batches of a rank's step (``trainer_pt_utils.py: get_length_grouped_indices``)."""
    of_rank = micro_batches * batch
    group = max(1, min(len(lengths) // (4 * of_rank), 50)) * of_rank
    grouped = [np.sort(lengths[start : start + group])[::-1] for start in range(0, len(lengths), group)]
    return _in_order(np.concatenate(grouped), ranks, micro_batches, batch)


def _batch_rebalance(lengths: Integers, ranks: int, micro_batches: int, batch: int) -> Iterable[Any]:
    step = ranks * micro_batches * batch
    for start in range(0, len(lengths) - step + 1, step):
        descending = np.sort(lengths[start : start + step])[::-1]
        runs = np.split(descending, np.cumsum(balanced_runs(descending, ranks, micro_batches))[:-1])
        dearest_first = sorted(runs, key=lambda run: -cost(len(run), run[0]))
        yield [dearest_first[rank::ranks] for rank in range(ranks)]


_SAMPLERS = {"random": _random, "group_by_length": _group_by_length, "batch_rebalance": _batch_rebalance}
