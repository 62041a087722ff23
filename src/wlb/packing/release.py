"""Searches for the outliers that a step trains, treating all shorter documents as divisible.

The few long documents unbalance a step; the many short ones fill the gaps, almost like a fluid. So the search tries a
set of outliers by placing only them, longest first, and pouring the short documents over them. In a few microseconds,
instead of a whole packing, that predicts within a fraction of a percent how even the step would be, how many tokens it
would train, and what would have to wait. The price of a set is

    heaviest over mean micro-batch
    + ``delay_price`` x tokens that wait another step, in global batches
    + 0.1           x imbalance of the next step if it trained all remaining outliers, with short documents

The search starts with sets without the k most expensive outliers, and then adds or removes single outliers while the
price falls. It ends at once if training everything that is due is already even.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from operator import itemgetter
from typing import NamedTuple

from wlb.lightest import into_lightest
from wlb.packing.packer import Pending

_EVEN = 1.0005  # price of a set that is good enough without a search
_THRESHOLDS = 16  # sets without the most expensive outliers
_OUTLOOK = 0.1  # price if the heaviest micro-batch of the next step is twice the mean
_OUT_OF_BOUNDS = 100.0  # price of a global batch of tokens over or under the bounds of a step
_MOVED = 24  # most expensive outliers that are added or removed one by one

_price = itemgetter(0)  # of a Release
Released = tuple[bool, ...]  # whether each outlier is trained


class Outlier(NamedTuple):
    """A document that is considered by itself; ``due`` by this step, or ``overdue``, so it must be in it."""

    item: Pending
    due: bool
    overdue: bool


class Fluid(NamedTuple):
    """Documents short enough to be poured: their total tokens and seconds, and their number."""

    tokens: int
    seconds: float
    documents: int


class Release(NamedTuple):
    """The outliers to release. Due short documents wait if they would take a micro-batch over ``limit`` seconds."""

    price: float
    released: Released
    limit: float
    imbalance: float


class StepRules(NamedTuple):
    """Every step trains ``least`` to ``most`` tokens in ``micro_batches`` of at most ``max_tokens``.

    ``batch`` is a global batch in tokens; ``delay_price`` is the price of delaying one by a step. With
    ``fluid_may_wait``, due short documents may wait for the next step.
    """

    micro_batches: int
    max_tokens: int
    least: int
    most: int
    batch: int
    delay_price: float
    fluid_may_wait: bool


class Offer(NamedTuple):
    """What a step may train: ``outliers``, most expensive first, short documents that are ``due``, and ``early`` ones.

    The step trains at least ``aim`` tokens if ``early`` has enough.
    """

    outliers: Sequence[Outlier]
    due: Fluid
    early: Fluid
    aim: int
    rules: StepRules

    @property
    def density(self) -> float:
        """Seconds per token of the fluid or, without any, of the shortest outlier."""
        tokens = self.due.tokens + self.early.tokens
        if tokens:
            return (self.due.seconds + self.early.seconds) / tokens
        return self.outliers[-1].item.seconds / self.outliers[-1].item.length if self.outliers else 1.0


def choose(offer: Offer) -> Release:
    """The best set of outliers that the search finds."""
    tried: dict[Released, Release] = {}

    def attempt(released: Released) -> Release:
        if released not in tried:
            tried[released] = _appraise(released, offer)
        return tried[released]

    best = attempt(tuple([outlier.due for outlier in offer.outliers]))
    if best.price <= _EVEN:
        return best
    best = min((attempt(released) for released in _without_the_most_expensive(offer)), key=_price)
    return _improved(best, attempt, offer)


def _without_the_most_expensive(offer: Offer) -> Iterator[Released]:
    """Sets without the k most expensive outliers: the due ones of the others, or all others."""
    count = len(offer.outliers)
    steps = min(count, _THRESHOLDS)
    for held in sorted({round(count * (step / steps) ** 2) if steps < count else step for step in range(steps + 1)}):
        for early in (False, True):
            yield tuple([o.overdue or (index >= held and (early or o.due)) for index, o in enumerate(offer.outliers)])


def _improved(best: Release, attempt: Callable[[Released], Release], offer: Offer) -> Release:
    """The best set reached from ``best`` by releasing or holding back single outliers."""
    movable = [index for index, outlier in enumerate(offer.outliers[:_MOVED]) if not outlier.overdue]
    while True:
        before = best
        for index in movable:
            moved = (*best.released[:index], not best.released[index], *best.released[index + 1 :])
            best = min(best, attempt(moved), key=_price)
        if best is before:
            return best


def _appraise(released: Released, offer: Offer) -> Release:
    rules, density = offer.rules, offer.density
    now = [*compress(offer.outliers, released)]
    later = [outlier for outlier, release in zip(offer.outliers, released, strict=True) if not release]
    loads, rooms, unfit = _placed(now, rules)
    tokens = sum([outlier.item.length for outlier in now]) - unfit
    waiting = sum([outlier.item.length for outlier in later if outlier.due]) + unfit
    outlook = _OUTLOOK * (_outlook(later, offer) - 1) if later else 0.0
    short_documents = offer.due.documents + offer.early.documents
    enough = min(rules.micro_batches, len(offer.outliers) + short_documents)
    idle = math.inf if len(now) + short_documents < enough else 0.0
    choices = []
    for poured, peak, limit in _pourings(loads, rooms, tokens, offer):
        imbalance = _imbalance(loads, poured, peak)
        trained = tokens + poured / density
        late = waiting + max(0.0, offer.due.tokens - poured / density)
        out_of_bounds = max(0.0, rules.least - trained, trained - rules.most)
        price = imbalance + rules.delay_price * late / rules.batch + outlook
        price += _OUT_OF_BOUNDS * out_of_bounds / rules.batch + idle
        choices.append(Release(price, released, limit, imbalance))
    return min(choices, key=_price)


def _pourings(loads: list[float], rooms: list[int], tokens: int, offer: Offer) -> Iterator[tuple[float, float, float]]:
    """Pour the fluid over outliers of ``tokens`` tokens: all that is due, or only up to the heaviest micro-batch.

    Yields the seconds of fluid poured, of the heaviest micro-batch afterwards, and the limit of pouring.
    """
    density, heaviest, rules = offer.density, max(loads), offer.rules
    early = max(0, min(offer.early.tokens, offer.aim - tokens - offer.due.tokens))
    due = (offer.due.tokens + early) * density
    level, overflow = _level(loads, rooms, due, density)
    peak = max(level, heaviest)
    space = _space(loads, rooms, density, peak) - (due - overflow)
    more = density * min(offer.early.tokens - early, rules.most - tokens - offer.due.tokens - early)
    yield due - overflow + max(0.0, min(more, space)), peak, math.inf
    if rules.fluid_may_wait and level > heaviest > 0:
        yield min(due, _space(loads, rooms, density, heaviest)), heaviest, heaviest


def _imbalance(loads: list[float], fluid: float, peak: float) -> float:
    """Heaviest over mean micro-batch: ``peak`` seconds over the mean of ``loads`` plus ``fluid`` seconds in total."""
    total = math.fsum(loads) + fluid
    return max(1.0, peak * len(loads) / total) if total else 1.0


def _space(loads: list[float], rooms: list[int], density: float, peak: float) -> float:
    """Seconds of fluid that fit below ``peak``."""
    return math.fsum([min(peak - load, room * density) for load, room in zip(loads, rooms, strict=True) if load < peak])


def _outlook(outliers: Sequence[Outlier], offer: Offer) -> float:
    """Imbalance of only ``outliers``, evened out by up to a global batch of fluid."""
    loads, rooms, _ = _placed(outliers, offer.rules)
    peak = max(loads)
    fluid = min(_space(loads, rooms, offer.density, peak), offer.rules.batch * offer.density)
    return _imbalance(loads, fluid, peak)


def _placed(outliers: Sequence[Outlier], rules: StepRules) -> tuple[list[float], list[int], int]:
    """Place outliers, longest first, into the lightest micro-batches with room: seconds, rooms, unplaced tokens."""
    loads, rooms = [0.0] * rules.micro_batches, [rules.max_tokens] * rules.micro_batches
    lengths = [outlier.item.length for outlier in outliers]
    owners, _ = into_lightest(lengths, [outlier.item.seconds for outlier in outliers], loads, rooms)
    return loads, rooms, sum([length for length, owner in zip(lengths, owners, strict=True) if owner < 0])


def _level(loads: list[float], rooms: list[int], seconds: float, density: float) -> tuple[float, float]:
    """The level to which ``seconds`` of fluid fill the micro-batches, and the seconds without room."""
    events = [(load, 1) for load in loads]
    events += [(load + room * density, -1) for load, room in zip(loads, rooms, strict=True)]
    events.sort()
    rising, level, left = 0, events[0][0], seconds
    for height, change in events:
        needed = (height - level) * rising
        if rising and needed >= left:
            return level + left / rising, 0.0
        left -= needed
        level = height
        rising += change
    return level, left
