"""Outlier thresholds that follow the documents: ``variable_length`` with ``outlier_thresholds = "auto"``.

Every candidate packs the same sample of lengths; the best has the smallest imbalance degree of those that keep a bound
on the mean token delay. They are tried once enough documents have been seen, and again whenever the distribution of
lengths has moved. ``wlb.studies.thresholds`` tries L_max too, for ``wlb tune``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from wlb.documents.filling import documents_filling
from wlb.packing.packer import Pending
from wlb.packing.plan import StepPlan
from wlb.packing.variable_length import VariableLengthPacker

DEFAULT_MAX_TOKEN_DELAY = 0.35
SCREENING_STEPS = 96  # every candidate packs so many

# Thresholds tried, in context windows: about four to the octave where outliers are, coarser below.
_THRESHOLD_FRACTIONS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 7 / 16, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
_MICRO_BATCHES = 4  # at most, of a trial: a balance that holds for few micro-batches holds for many
_DRIFT = 0.1  # of the share of tokens in each octave of length (total variation), from which thresholds are tried again


def threshold_sets(context_window: int, queues: int = 2) -> Iterator[tuple[int, ...]]:
    """All sets of at most ``queues`` thresholds that are tried."""
    thresholds = sorted({max(1, int(fraction * context_window)) for fraction in _THRESHOLD_FRACTIONS})
    for count in range(queues + 1):
        yield from combinations(thresholds, count)


def imbalance_and_delay(plans: Sequence[StepPlan]) -> tuple[float, float]:
    """The imbalance degree of at least one step, and the mean steps that a token has waited."""
    delay = sum(plan.delay_token_steps for plan in plans) / sum(plan.tokens for plan in plans)
    return float(np.mean([plan.imbalance for plan in plans])), delay


def preference(imbalance: float, delay: float, max_token_delay: float) -> tuple[bool, float, float]:
    """Sorts trials: those within the bound on delay by imbalance, then the others by delay."""
    return (False, imbalance, delay) if delay <= max_token_delay else (True, delay, imbalance)


class TunedVariableLengthPacker(VariableLengthPacker):
    """``variable_length`` as ``make_packer`` makes it: with "auto", thresholds follow the documents seen.

    It keeps the latest lengths until they fill ``_SAMPLE_STEPS`` steps, and then tries thresholds on them.
    """

    _SAMPLE_STEPS = 48

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._is_auto = self.options.outlier_thresholds == "auto"
        self._sample: list[int] = []
        self._tuned_shares: list[float] | None = None

    def state_dict(self) -> dict[str, Any]:
        tuner = {"sample": [*self._sample], "tuned_shares": self._tuned_shares} if self._is_auto else None
        return {**super().state_dict(), "tuner": tuner, "outlier_thresholds": [*self.outlier_thresholds]}

    def _restore(self, state: dict[str, Any]) -> None:
        if self._is_auto:
            tuner = state["tuner"] or {"sample": [], "tuned_shares": None}  # of a packer with thresholds of its own
            self._sample, self._tuned_shares = [*tuner["sample"]], tuner["tuned_shares"]
            self.outlier_thresholds = tuple(state["outlier_thresholds"])
        super()._restore(state)

    def _admit(self, fresh: list[Pending]) -> tuple[list[Pending], list[Pending]]:
        if self._is_auto and (thresholds := self._observe([item.length for item in fresh])) is not None:
            self.outlier_thresholds = thresholds
            self._wait(self._waiting())
        return super()._admit(fresh)

    def _observe(self, lengths: Sequence[int]) -> tuple[int, ...] | None:
        """Take in the lengths of fresh documents; returns new thresholds when it is time to change them."""
        self._sample += lengths
        micro_batches = min(self.micro_batches, _MICRO_BATCHES)
        step_tokens = micro_batches * self.context_window
        if sum(self._sample) < self._SAMPLE_STEPS * step_tokens:
            return None
        sample, self._sample = np.asarray(self._sample), []
        octaves = np.bincount(np.frexp(sample.astype(np.float64))[1], sample, minlength=64)
        shares = (octaves / sample.sum()).tolist()
        tuned = self._tuned_shares
        if tuned is not None and math.fsum(abs(a - b) for a, b in zip(shares, tuned, strict=True)) <= 2 * _DRIFT:
            return None
        self._tuned_shares = shares
        arrivals = sample[: documents_filling(sample, SCREENING_STEPS * step_tokens)].tolist()

        def wanted(thresholds: tuple[int, ...]) -> tuple[bool, float, float]:
            options = self.options.changed(outlier_thresholds=thresholds)
            packer = VariableLengthPacker(micro_batches, self.context_window, self.workload, options)
            return preference(*imbalance_and_delay(packer.plan(arrivals)), DEFAULT_MAX_TOKEN_DELAY)

        return min(threshold_sets(self.context_window), key=wanted)
