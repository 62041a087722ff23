"""Choosing outlier thresholds and L_max: try them on a sample of the lengths, keep the best trade-off.

Every candidate packs the same sample; what counts is the imbalance degree reached under a bound on the mean token
delay. ``search`` does this for the command line. ``TunedVariableLengthPacker`` does it while it packs, with
``outlier_thresholds = "auto"``: once enough documents have been seen, and again whenever their distribution has moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.documents.filling import documents_filling
from wlb.errors import UserError
from wlb.packing.packer import PackingTask, Pending
from wlb.packing.statistics import PackingStatistics
from wlb.packing.variable_length import VariableLengthOptions, VariableLengthPacker

DEFAULT_MAX_TOKEN_DELAY = 0.35
MAX_LENGTH_FACTORS = (1.0, 1.25, 1.5, 1.75, 2.0)

# Thresholds tried, in context windows: about four to the octave where outliers are, coarser below.
_THRESHOLD_FRACTIONS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 7 / 16, 1 / 2, 5 / 8, 3 / 4, 7 / 8)

_SCREENING_STEPS = 96  # every candidate packs this many steps
_FINALISTS = 12  # as many of the best, and the trade-off curve, pack the whole sample


@dataclass(frozen=True)
class Trial:
    """What one setting of ``variable_length`` does to a sample."""

    outlier_thresholds: tuple[int, ...]
    max_length_factor: float
    imbalance_degree: float
    mean_token_delay: float
    longest_delay: int
    tokens_per_step_cv: float


def search(
    lengths: ArrayLike,
    task: PackingTask,
    options: VariableLengthOptions | None = None,
    *,
    factors: Sequence[float] = MAX_LENGTH_FACTORS,
    max_token_delay: float = DEFAULT_MAX_TOKEN_DELAY,
    queues: int = 2,
    on_trial: Callable[[int, int], None] = lambda done, total: None,
) -> list[Trial]:
    """Try every pair of thresholds (and one, and none) with every factor; best trial first.

    Trials within ``max_token_delay`` (mean steps a token waits) come first, by imbalance degree; the others follow by
    delay. ``lengths`` are document lengths in tokens, in arrival order, those over the window counted as one window;
    all candidates pack the first part of them, then the best and those on the trade-off curve pack all and are
    returned. ``options`` has what the trials do not vary. ``on_trial(done, total)`` reports the progress of either
    round. Raises ``UserError`` where the lengths fill no step.
    """
    options = options or VariableLengthOptions()
    micro_batches, context_window = task.micro_batches, task.context_window
    sample = np.minimum(np.asarray(lengths, np.int64), context_window)
    steps_available = int(sample.sum()) // (micro_batches * context_window)
    if steps_available < 1:
        raise UserError(
            f"{sample.sum()} tokens fill no step of {micro_batches} micro-batches x {context_window} tokens; "
            "give more lengths or fewer micro-batches"
        )
    candidates = [(t, factor) for factor in factors for t in _threshold_sets(context_window, queues)]
    screening = sample[: documents_filling(sample, _SCREENING_STEPS * micro_batches * context_window)]

    def run(settings: Sequence[tuple[tuple[int, ...], float]], part: NDArray[np.int64]) -> list[Trial]:
        trials = []
        for done, (thresholds, factor) in enumerate(settings, 1):
            tried = {"outlier_thresholds": thresholds, "max_length_factor": factor}
            trials.append(try_setting(part, task, options.changed(**tried)))
            on_trial(done, len(settings))
        return sorted(trials, key=lambda trial: _preference(trial, max_token_delay))

    screened = run(candidates, screening)
    if len(screening) == len(sample):
        return screened
    finalists = dict.fromkeys(
        (trial.outlier_thresholds, trial.max_length_factor) for trial in screened[:_FINALISTS] + trade_off(screened)
    )
    return run([*finalists], sample)


def try_setting(lengths: NDArray[np.int64], task: PackingTask, options: VariableLengthOptions) -> Trial:
    """Pack ``lengths`` once with ``options``, which name thresholds and factor."""
    packer = VariableLengthPacker(task, options)
    statistics = PackingStatistics()
    statistics.add(packer.plan(lengths.tolist()))
    assert options.max_length_factor != "auto"
    return Trial(
        packer.outlier_thresholds,
        options.max_length_factor,
        statistics.imbalance_degree,
        statistics.mean_token_delay,
        statistics.longest_delay,
        statistics.tokens_per_step_cv,
    )


def trade_off(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that no other beats in both imbalance degree and token delay, by rising delay."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.mean_token_delay, t.imbalance_degree, t.max_length_factor)):
        if not front or trial.imbalance_degree < front[-1].imbalance_degree:
            front.append(trial)
    return front


def _threshold_sets(context_window: int, queues: int) -> Iterator[tuple[int, ...]]:
    thresholds = sorted({max(1, int(fraction * context_window)) for fraction in _THRESHOLD_FRACTIONS})
    for count in range(queues + 1):
        yield from combinations(thresholds, count)


def _preference(trial: Trial, max_token_delay: float) -> tuple[bool, float, float]:
    if trial.mean_token_delay <= max_token_delay:
        return False, trial.imbalance_degree, trial.mean_token_delay
    return True, trial.mean_token_delay, trial.imbalance_degree


class ThresholdTuner:
    """Thresholds for a running packer, from the documents it has seen; deterministic and part of its state.

    Keeps the latest lengths. Once they fill ``_SAMPLE_STEPS`` steps it searches thresholds on them, and again when the
    share of tokens per octave of length has moved by more than ``_DRIFT`` (total variation) since the last search.
    A balance that holds for few micro-batches holds for many, so the search packs at most ``_MICRO_BATCHES``.
    """

    _MICRO_BATCHES = 4
    _SAMPLE_STEPS = 48
    _DRIFT = 0.1

    def __init__(self, task: PackingTask, options: VariableLengthOptions) -> None:
        self._task = task._replace(micro_batches=min(task.micro_batches, self._MICRO_BATCHES))
        self._options = options
        self._sample: list[int] = []
        self._sample_tokens = 0
        self._tuned_shares: list[float] | None = None

    def observe(self, lengths: Sequence[int]) -> tuple[int, ...] | None:
        """Take in the lengths of fresh documents; returns new thresholds when it is time to change them."""
        self._sample += lengths
        self._sample_tokens += sum(lengths)
        if self._sample_tokens < self._SAMPLE_STEPS * self._task.micro_batches * self._task.context_window:
            return None
        shares = self._token_shares()
        moved = (
            self._tuned_shares is None
            or math.fsum(abs(now - then) for now, then in zip(shares, self._tuned_shares, strict=True))
            > 2 * self._DRIFT
        )
        sample, self._sample, self._sample_tokens = self._sample, [], 0
        if not moved:
            return None
        self._tuned_shares = shares
        factor = (
            self._options.most_tokens(self._task.context_window, self._task.micro_batches) / self._task.context_window
        )
        return search(sample, self._task, self._options, factors=[factor])[0].outlier_thresholds

    def state_dict(self) -> dict[str, Any]:
        return {"sample": list(self._sample), "tuned_shares": self._tuned_shares}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from ``state``; None, from a packer without a tuner, starts afresh."""
        self._sample = list(state["sample"]) if state else []
        self._sample_tokens = sum(self._sample)
        self._tuned_shares = state["tuned_shares"] if state else None

    def _token_shares(self) -> list[float]:
        """Share of the sample's tokens in documents of each octave of length, shortest octave first."""
        lengths = np.asarray(self._sample, np.int64)
        octave = np.frexp(lengths.astype(np.float64))[1]
        shares = np.bincount(octave, lengths, minlength=64) / lengths.sum()
        return [float(share) for share in shares]


class TunedVariableLengthPacker(VariableLengthPacker):
    """``variable_length`` as ``make_packer`` makes it: with "auto", thresholds follow the documents seen."""

    def __init__(self, task: PackingTask, options: VariableLengthOptions) -> None:
        super().__init__(task, options)
        self._tuner = ThresholdTuner(task, options) if options.outlier_thresholds == "auto" else None

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "tuner": self._tuner.state_dict() if self._tuner else None,
            "outlier_thresholds": list(self.outlier_thresholds),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if self._tuner is not None:
            self._tuner.load_state_dict(state["tuner"])
            self.outlier_thresholds = tuple(state["outlier_thresholds"])
        super()._restore(state)

    def _admit(self, fresh: list[Pending]) -> tuple[list[Pending], list[Pending]]:
        thresholds = self._tuner.observe([item.length for item in fresh]) if self._tuner else None
        if thresholds is not None:
            self._use(thresholds)
        return super()._admit(fresh)
