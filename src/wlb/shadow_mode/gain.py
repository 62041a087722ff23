"""Computes a gain from measured steps: fits prices to them, and plans the same documents by these prices."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import isnan, nan
from typing import NamedTuple

import numpy as np

from wlb.errors import UserError
from wlb.job.planner import StepPlanner
from wlb.shadow_mode.fields import Lengths
from wlb.simulate import simulated_job
from wlb.simulate.decide import decide
from wlb.simulate.verdict import LEAST_GAIN
from wlb.workload.fitted import FittedPrices, fit_prices

_PACKING = {"max_length_factor": 1.5, "order": "pipeline"}  # as ``wlb.integrations.packed`` has by default
_LEAST_EXPLAINED = 0.5  # share of the variance of seconds; below it we claim no gain


class Measured(NamedTuple):
    """A micro-batch of one process: tokens of its documents with and without padding, and its seconds."""

    computed: Lengths
    documents: Lengths
    seconds: float


Step = Sequence[Sequence[Measured]]  # the micro-batches of each process


@dataclass(frozen=True)
class ShadowGain:
    """Mean seconds of a step: measured, and by the fitted prices as it is, without padding, and balanced.

    ``imbalance`` is the slowest of ``processes`` over their mean, by the prices if measured seconds include waiting.
    What the prices tell is NaN if they explain too little. Balanced micro-batches hold ``context_window`` tokens on
    average, and each process has ``micro_batches`` per step.
    """

    steps: int
    processes: int
    imbalance: float
    prices: FittedPrices
    measured: float
    own: float
    unpadded: float
    balanced: float
    context_window: int
    micro_batches: int

    @property
    def speed(self) -> float:
        """Speed of balanced steps over the steps of the job, by the prices."""
        return self.own / self.balanced

    @property
    def values(self) -> dict[str, float]:
        """The logged values by name, without those that are unknown."""
        values = vars(self) | vars(self.prices) | {"speed": self.speed}
        known = {name: value for name, value in values.items() if isinstance(value, float) and not isnan(value)}
        return {f"wlb_shadow/{name}": value for name, value in known.items()}

    @property
    def verdict(self) -> str:
        """Advice, in one sentence."""
        if isnan(self.speed):
            explained = max(self.prices.r_squared, 0)
            return f"the gain is unknown: prices explain {explained:.0%} of the variance of measured seconds"
        if self.speed < 1 + LEAST_GAIN:
            return f"keep what you have: balanced steps gain under {LEAST_GAIN:.0%}"
        settings = f"context_window={self.context_window} and micro_batches={self.micro_batches}"
        return f"balanced steps run {self.speed:.2f}x as fast; train with {settings}"

    def __str__(self) -> str:
        measured = f"step {self.measured:.3g} s measured"
        if self.processes > 1 and not isnan(self.imbalance):
            measured = f"slowest process {self.imbalance:.2f}x the mean; {measured}"
        if isnan(self.speed):
            return f"{measured}; {self.verdict}"
        alone, ratio = self.processes == 1, self.unpadded / self.balanced
        balance = "no balance on one process" if alone else f"balance {ratio:.2f}x"
        return (
            f"{measured}, {self.own:.3g} s by prices, {self.balanced:.3g} s balanced: {self.speed:.2f}x as fast "
            f"(padding {self.own / self.unpadded:.2f}x, {balance}); prices {self.prices}"
        )


def gain_of(steps: Sequence[Step], *, waits_inside: bool, on_cuda: bool = False) -> ShadowGain:
    """The gain of balanced steps, as ``packed_batches`` makes them without own lists, over ``steps``.

    Each step has equally many processes. Tensor-parallel processes, with the same documents, count as one.
    ``waits_inside`` tells whether processes wait for each other in every micro-batch or only at the end of a step;
    seconds ``on_cuda`` include that waiting. Balanced micro-batches hold the mean tokens of the job's micro-batches, or
    the longest document if that is longer, and steps keep their tokens. One process has nothing to balance and keeps
    its micro-batches, without padding. Raises ``UserError`` for too few micro-batches or documents.
    """
    if not steps:
        raise UserError("no optimizer step was measured on all processes")
    prices = _fitted(steps, waits_inside, on_cuda and len(steps[0]) > 1)
    known = prices.r_squared >= _LEAST_EXPLAINED

    def seconds(of: str) -> list[list[list[float]]]:
        return [[[prices.seconds(getattr(one, of)) for one in rank] for rank in step] for step in steps]

    def mean(of_steps: list[list[list[float]]]) -> float:
        slots = (zip_longest(*step, fillvalue=0.0) if waits_inside else [map(sum, step)] for step in of_steps)
        return sum(sum(map(max, of_step)) for of_step in slots) / len(steps)

    computed, unpadded = seconds("computed"), seconds("documents")
    measured = [[[one.seconds for one in rank] for rank in step] for step in steps]
    of_ranks = [[*map(sum, step)] for step in (computed if on_cuda else measured)]
    names = [str([[one.computed.tolist() for one in step[rank]] for step in steps]) for rank in range(len(steps[0]))]
    ranks = [names.index(name) for name in dict.fromkeys(names)]
    parts = [one for step in steps for rank in ranks for one in step[rank]]
    lengths = np.concatenate([one.documents for one in parts])
    window = max(int(lengths.max(initial=1)), round(lengths.sum() / len(parts)))
    micro_batches = max(1, round(lengths.sum() / len(steps) / len(ranks) / window))
    balanced = unpadded
    if len(ranks) > 1:
        packing = {"grouping": "even", "rank_micro_batches": micro_batches, **_PACKING}
        sizes = {"micro_batches": micro_batches, "dp": len(ranks), "pool": 1}
        job = simulated_job("7b", window, packing=packing, packed_by=prices, **sizes)
        planned = StepPlanner(decide(job, lengths, lock_step=True), lengths, epochs=1, whole=True)
        balanced = [[[prices.seconds(one.lengths) for one in rank] for rank in step.plan.ranks] for step in planned]
    return ShadowGain(
        steps=len(steps),
        processes=len(ranks),
        imbalance=sum(map(max, of_ranks)) / sum(map(np.mean, of_ranks)) if known or not on_cuda else nan,
        prices=prices,
        measured=mean(measured),
        own=mean(computed) if known else nan,
        unpadded=mean(unpadded) if known else nan,
        balanced=mean(balanced) if known else nan,
        context_window=window,
        micro_batches=micro_batches,
    )


def _fitted(steps: Sequence[Step], waits_inside: bool, waits_measured: bool) -> FittedPrices:
    """Prices fitted to whatever has a time of its own: a micro-batch, simultaneous micro-batches, or a whole step."""
    units: list[Step] = [*steps]
    if not waits_measured:
        units = [[[one]] for step in steps for rank in step for one in rank]
    elif waits_inside:
        units = [[[one] if one else [] for one in slot] for step in steps for slot in zip_longest(*step)]
    terms = np.array([[_terms(rank) for rank in unit] for unit in units])  # (units, ranks, terms)
    seconds = [max(sum(one.seconds for one in rank) for rank in unit) for unit in units]
    return fit_prices(terms[..., 0], terms[..., 1], seconds, micro_batches=terms[..., 2])


def _terms(micro_batches: Sequence[Measured]) -> tuple[float, float, int]:
    lengths = np.concatenate([np.zeros(0), *(one.computed for one in micro_batches)])
    return float((lengths**2).sum()), float(lengths.sum()), len(micro_batches)
