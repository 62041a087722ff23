"""Search outlier thresholds and L_max of ``variable_length`` for the best trade-off on a sample."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.errors import UserError
from wlb.packing.options import PackingOptions
from wlb.packing.plan import StepPlan
from wlb.packing.variable_length import VariableLengthPacker
from wlb.workload.base import DocumentPrices
from wlb_studies.filling import documents_filling

MAX_LENGTH_FACTORS = (1.0, 1.25, 1.5, 1.75, 2.0)
DEFAULT_MAX_TOKEN_DELAY = 0.35
SCREENING_STEPS = 96  # packed with every candidate

# Thresholds tried, in context windows: about four to the octave where outliers are, coarser below.
_THRESHOLD_FRACTIONS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 7 / 16, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
_FINALISTS = 12  # this many of the best trials, and the trade-off curve, pack the whole sample


@dataclass(frozen=True)
class Trial:
    """The result of one setting of ``variable_length`` on a sample."""

    outlier_thresholds: tuple[int, ...]
    max_length_factor: float
    imbalance_degree: float
    mean_token_delay: float
    longest_delay: int
    tokens_per_step_cv: float


def search(
    lengths: ArrayLike,
    micro_batches: int,
    context_window: int,
    workload: DocumentPrices,
    options: PackingOptions = PackingOptions(method="variable_length"),
    *,
    factors: Sequence[float] = MAX_LENGTH_FACTORS,
    max_token_delay: float = DEFAULT_MAX_TOKEN_DELAY,
    queues: int = 2,
    on_trial: Callable[[int, int], None] = lambda done, total: None,
) -> list[Trial]:
    """Try every pair of thresholds (and one, and none) with every factor; best trial first.

    Trials within ``max_token_delay`` (mean steps a token waits) come first, by imbalance degree; the others follow by
    delay. ``lengths`` are document lengths in tokens, in arrival order; lengths over the window count as one window.
    All candidates pack the first part; the best and the trade-off curve then pack everything and are returned.
    ``options`` holds what the trials do not vary. ``on_trial(done, total)`` reports progress in both rounds. Raises
    ``UserError`` if the lengths do not fill a step.
    """
    sample = np.minimum(np.asarray(lengths, np.int64), context_window)
    step_tokens = micro_batches * context_window
    if sample.sum() < step_tokens:
        raise UserError(
            f"{sample.sum()} tokens fill no step of {micro_batches} micro-batches x {context_window} tokens; "
            "give more lengths or fewer micro-batches"
        )
    lengths_tried = sorted({max(1, int(fraction * context_window)) for fraction in _THRESHOLD_FRACTIONS})
    threshold_sets = [one for count in range(queues + 1) for one in combinations(lengths_tried, count)]
    candidates = [(thresholds, factor) for factor in factors for thresholds in threshold_sets]
    screening = sample[: documents_filling(sample, SCREENING_STEPS * step_tokens)]

    def run(settings: Sequence[tuple[tuple[int, ...], float]], part: NDArray[np.int64]) -> list[Trial]:
        trials = []
        for done, (thresholds, factor) in enumerate(settings, 1):
            tried = options.changed(outlier_thresholds=thresholds, max_length_factor=factor)
            packer = VariableLengthPacker(micro_batches, context_window, workload, tried)
            trials.append(_trial(packer.plan(part.tolist()), thresholds, factor))
            on_trial(done, len(settings))
        return sorted(trials, key=preference)

    def preference(trial: Trial) -> tuple[bool, float, float]:
        imbalance, delay = trial.imbalance_degree, trial.mean_token_delay
        return (False, imbalance, delay) if delay <= max_token_delay else (True, delay, imbalance)

    screened = run(candidates, screening)
    if len(screening) == len(sample):
        return screened
    finalists = dict.fromkeys(
        (trial.outlier_thresholds, trial.max_length_factor) for trial in screened[:_FINALISTS] + trade_off(screened)
    )
    return run([*finalists], sample)


def _trial(plans: Sequence[StepPlan], thresholds: tuple[int, ...], factor: float) -> Trial:
    tokens = [plan.tokens for plan in plans]
    return Trial(
        thresholds,
        factor,
        imbalance_degree=float(np.mean([plan.imbalance for plan in plans])),
        mean_token_delay=sum(plan.delay_token_steps for plan in plans) / sum(tokens),
        longest_delay=max(plan.longest_delay for plan in plans),
        tokens_per_step_cv=float(np.std(tokens) / np.mean(tokens)),
    )


def trade_off(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that no other beats in both imbalance degree and token delay, by increasing delay."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.mean_token_delay, t.imbalance_degree, t.max_length_factor)):
        if not front or trial.imbalance_degree < front[-1].imbalance_degree:
            front.append(trial)
    return front
