"""Outlier thresholds that follow the documents: ``variable_length`` with ``outlier_thresholds = "auto"``.

Every candidate packs the same sample of lengths; the best has the smallest imbalance degree of those that keep a bound
on the mean token delay. They are tried once enough documents have been seen, and again whenever the distribution of
lengths has moved. ``wlb.studies.thresholds`` tries L_max too, for ``wlb tune``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.filling import documents_filling
from wlb.packing.options import PackingOptions
from wlb.packing.packer import Pending
from wlb.packing.variable_length import VariableLengthPacker
from wlb.workload.base import DocumentPrices

DEFAULT_MAX_TOKEN_DELAY = 0.35
SCREENING_STEPS = 96  # every candidate packs so many

# Thresholds tried, in context windows: about four to the octave where outliers are, coarser below.
_THRESHOLD_FRACTIONS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 7 / 16, 1 / 2, 5 / 8, 3 / 4, 7 / 8)


@dataclass(frozen=True)
class Trial:
    """What one setting of ``variable_length`` does to a sample."""

    outlier_thresholds: tuple[int, ...]
    max_length_factor: float
    imbalance_degree: float
    mean_token_delay: float
    longest_delay: int
    tokens_per_step_cv: float

    def preference(self, max_token_delay: float) -> tuple[bool, float, float]:
        """Sorts trials: those within the bound by imbalance degree, then the others by delay."""
        if self.mean_token_delay <= max_token_delay:
            return False, self.imbalance_degree, self.mean_token_delay
        return True, self.mean_token_delay, self.imbalance_degree


def try_setting(
    lengths: NDArray[np.int64],
    micro_batches: int,
    context_window: int,
    workload: DocumentPrices,
    options: PackingOptions,
) -> Trial:
    """Pack ``lengths``, which fill a step, once with ``options``, which name thresholds and factor."""
    packer = VariableLengthPacker(micro_batches, context_window, workload, options)
    plans = packer.plan(lengths.tolist())
    tokens = [plan.tokens for plan in plans]
    assert options.max_length_factor != "auto"
    return Trial(
        packer.outlier_thresholds,
        options.max_length_factor,
        imbalance_degree=float(np.mean([plan.imbalance for plan in plans])),
        mean_token_delay=sum(plan.delay_token_steps for plan in plans) / sum(tokens),
        longest_delay=max(plan.longest_delay for plan in plans),
        tokens_per_step_cv=float(np.std(tokens) / np.mean(tokens)),
    )


def threshold_sets(context_window: int, queues: int = 2) -> Iterator[tuple[int, ...]]:
    """All sets of at most ``queues`` thresholds that are tried."""
    thresholds = sorted({max(1, int(fraction * context_window)) for fraction in _THRESHOLD_FRACTIONS})
    for count in range(queues + 1):
        yield from combinations(thresholds, count)


class ThresholdTuner:
    """Thresholds for a running packer, from the documents it has seen; deterministic and part of its state.

    Keeps the latest lengths. Once they fill ``_SAMPLE_STEPS`` steps it tries thresholds on them, and again when the
    share of tokens per octave of length has moved by more than ``_DRIFT`` (total variation) since then. A balance that
    holds for few micro-batches holds for many, so trials pack at most ``_MICRO_BATCHES``.
    """

    _MICRO_BATCHES = 4
    _SAMPLE_STEPS = 48
    _DRIFT = 0.1

    def __init__(
        self, micro_batches: int, context_window: int, workload: DocumentPrices, options: PackingOptions
    ) -> None:
        self._sizes = min(micro_batches, self._MICRO_BATCHES), context_window
        self._workload = workload
        self._options = options
        self._sample: list[int] = []
        self._sample_tokens = 0
        self._tuned_shares: list[float] | None = None

    def observe(self, lengths: Sequence[int]) -> tuple[int, ...] | None:
        """Take in the lengths of fresh documents; returns new thresholds when it is time to change them."""
        self._sample += lengths
        self._sample_tokens += sum(lengths)
        if self._sample_tokens < self._SAMPLE_STEPS * math.prod(self._sizes):
            return None
        shares = self._token_shares()
        moved = (
            self._tuned_shares is None
            or math.fsum(abs(now - then) for now, then in zip(shares, self._tuned_shares, strict=True))
            > 2 * self._DRIFT
        )
        sample, self._sample, self._sample_tokens = np.asarray(self._sample), [], 0
        if not moved:
            return None
        self._tuned_shares = shares
        sample = sample[: documents_filling(sample, SCREENING_STEPS * math.prod(self._sizes))]
        trials = [
            try_setting(sample, *self._sizes, self._workload, self._options.changed(outlier_thresholds=thresholds))
            for thresholds in threshold_sets(self._sizes[1])
        ]
        return min(trials, key=lambda trial: trial.preference(DEFAULT_MAX_TOKEN_DELAY)).outlier_thresholds

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

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._tuner = ThresholdTuner(*settings) if self.options.outlier_thresholds == "auto" else None

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
