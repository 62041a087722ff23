"""From measured steps to a gain: prices fitted to them, and plans of the same documents by these prices."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from wlb.errors import UserError
from wlb.shadow_mode.lengths import Lengths
from wlb.workload import ModelShape
from wlb.workload.fitted import FittedPrices, fit_prices
from wlb.workload.profile import WorkloadProfile

_LEAST_GAIN = 0.05  # that is worth a change, as in ``wlb check``
_LEAST_EXPLAINED = 0.5  # of the variance of seconds, below which no gain is believed


class Measured(NamedTuple):
    """A micro-batch of one process: tokens of its documents as computed and without padding, and its seconds."""

    computed: Lengths
    documents: Lengths
    seconds: float


Step = Sequence[Sequence[Measured]]  # of each process, its micro-batches


@dataclass(frozen=True)
class ShadowGain:
    """Mean seconds of a step: as measured; then by the fitted prices, as it is, without padding, and balanced.

    In balanced steps ranks run in lock step, or their own lists of micro-batches (None where that is not predicted).
    ``imbalance`` is the slowest process over the mean one, by the prices where measured seconds include waiting.
    Balanced micro-batches hold ``context_window`` tokens on average, and each process has ``micro_batches`` a step.
    The ``profile`` has the prices, where the model is known.
    """

    steps: int
    imbalance: float
    prices: FittedPrices
    measured: float
    own: float
    unpadded: float
    lock_step: float
    own_lists: float | None
    context_window: int
    micro_batches: int
    profile: WorkloadProfile | None = None

    @property
    def advises_lists(self) -> bool:
        """Whether own lists, which ask more of the loop, are faster than lock step by enough to be worth it."""
        return self.own_lists is not None and self.own_lists * (1 + _LEAST_GAIN) < self.lock_step

    @property
    def speed(self) -> float:
        """Of the balanced steps that are advised over the job's own, by the prices."""
        return self.own / (self.own_lists if self.own_lists and self.advises_lists else self.lock_step)

    @property
    def values(self) -> dict[str, float]:
        """What is logged, by name."""
        values = vars(self) | vars(self.prices) | {"speed": self.speed}
        return {f"wlb_shadow/{name}": value for name, value in values.items() if isinstance(value, float)}

    @property
    def verdict(self) -> str:
        """Advice, in one sentence."""
        if self.speed < 1 + _LEAST_GAIN:
            return f"keep what you have: balanced steps gain under {_LEAST_GAIN:.0%}"
        if (explained := self.prices.r_squared) < _LEAST_EXPLAINED:
            return f"the gain is not known: prices explain {max(explained, 0):.0%} of the variance of measured seconds"
        how, setting = ("with own lists", "own_lists=True, ") if self.advises_lists else ("in lock step", "")
        settings = f"{setting}context_window={self.context_window}, micro_batches={self.micro_batches}"
        return f"balanced steps run {self.speed:.2f}x as fast {how}; train with {settings}"

    def __str__(self) -> str:
        padding, balance = self.own / self.unpadded, self.unpadded / self.lock_step
        lists = f"{self.own / self.own_lists:.2f}x" if self.own_lists else "not known, for want of processes or model"
        return (
            f"slowest process {self.imbalance:.2f}x the mean; step {self.measured:.3g} s measured, {self.own:.3g} s by "
            f"prices, {self.lock_step:.3g} s balanced: {self.own / self.lock_step:.2f}x as fast in lock step (padding "
            f"{padding:.2f}x, balance {balance:.2f}x), with own lists {lists}; prices {self.prices}"
        )


def gain_of(
    steps: Sequence[Step], *, waits_inside: bool, on_cuda: bool = False, shape: ModelShape | None = None
) -> ShadowGain:
    """What balanced steps, those of ``packed_batches``, gain over ``steps``; each has equally many processes.

    Processes with the same documents, as tensor-parallel ones, count as one. ``waits_inside`` says whether processes
    wait for each other in every micro-batch or only at the end of a step; seconds ``on_cuda`` include that. Balanced
    micro-batches hold as many tokens as the job's on average, or the longest document if that is more; a step keeps its
    tokens. Own lists need the ``shape`` of the model, for what ranks exchange that share a document. Raises
    ``UserError`` where there are too few micro-batches or documents.
    """
    if not steps:
        raise UserError("no optimizer step was measured on all processes")
    prices = _fitted(steps, waits_inside, on_cuda and len(steps[0]) > 1)

    def seconds(of: str) -> list[list[list[float]]]:
        return [[[prices.seconds(getattr(one, of)) for one in rank] for rank in step] for step in steps]

    def mean(of_steps: list[list[list[float]]]) -> float:
        return sum(_step_seconds(step, waits_inside) for step in of_steps) / len(steps)

    computed, measured = seconds("computed"), [[[one.seconds for one in rank] for rank in step] for step in steps]
    of_ranks = [[*map(sum, step)] for step in (computed if on_cuda else measured)]
    names = [str([[one.computed.tolist() for one in step[rank]] for step in steps]) for rank in range(len(steps[0]))]
    ranks = [names.index(name) for name in dict.fromkeys(names)]
    parts = [one for step in steps for rank in ranks for one in step[rank]]
    lengths = np.concatenate([one.documents for one in parts])
    window = max(int(lengths.max(initial=1)), round(lengths.sum() / len(parts)))
    micro_batches = max(1, round(lengths.sum() / len(steps) / len(ranks) / window))
    sizes = {"context_window": window, "micro_batches": micro_batches, "dp": len(ranks)}
    profile, hardware = (None, "") if shape is None else _profile(prices, shape, on_cuda)
    lists = {"own_lists": True, "profile": profile, "hardware": hardware} if profile and ranks[1:] else None
    return ShadowGain(
        steps=len(steps),
        imbalance=sum(map(max, of_ranks)) / sum(map(np.mean, of_ranks)),
        prices=prices,
        measured=mean(measured),
        own=mean(computed),
        unpadded=mean(seconds("documents")),
        lock_step=_balanced(lengths, prices, waits_inside, **sizes, workload=prices) / len(steps),
        own_lists=_balanced(lengths, prices, waits_inside, **sizes, **lists) / len(steps) if lists else None,
        context_window=window,
        micro_batches=micro_batches,
        profile=profile,
    )


def _balanced(lengths: Lengths, prices: FittedPrices, waits_inside: bool, **settings: Any) -> float:
    """Seconds of balanced steps: by ``prices``, but for a shared micro-batch, which takes what it is planned to."""
    from wlb.integrations.batches import WholeSteps, balanced_job  # with torch, which ``import wlb`` does not need

    job, total = balanced_job(lengths, **settings), 0.0
    for plan in WholeSteps(job, lengths):
        if not job.levels_steps:
            ranks = [[prices.seconds(one.lengths) for one in rank] for rank in plan.ranks]
            total += _step_seconds(ranks, waits_inside)
            continue
        free = np.zeros(settings["dp"])  # when each process is done with its list so far
        for one in plan.micro_batches:
            members = [*one.ranks]
            free[members] = free[members].max() + (one.workload if members[1:] else prices.seconds(one.lengths))
        total += float(free.max())
    return total


def _profile(prices: FittedPrices, shape: ModelShape, on_cuda: bool) -> tuple[WorkloadProfile, str]:
    """The prices as a profile of this machine, and the hardware preset of the links that ranks exchange by."""
    import torch

    from wlb.training.environment import hardware_name

    profile = prices.profile(
        shape,
        machine=torch.cuda.get_device_name() if on_cuda else platform.processor() or platform.machine(),
        versions={"torch": torch.__version__},
        dtype="as trained",
        clock="events around micro-batches" if on_cuda else "CPU seconds of the training thread",
        threads=torch.get_num_threads(),
    )
    return profile, hardware_name(torch.device("cuda" if on_cuda else "cpu"))


def _step_seconds(ranks: Sequence[Sequence[float]], waits_inside: bool) -> float:
    return sum(map(max, zip_longest(*ranks, fillvalue=0.0))) if waits_inside else max(map(sum, ranks))


def _fitted(steps: Sequence[Step], waits_inside: bool, waits_measured: bool) -> FittedPrices:
    """Prices of what is measured by itself: a micro-batch, those at the same time, or a whole step."""
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
