"""Searches which outliers a step trains, treating all shorter documents as divisible.

What unbalances a step are its few long documents; the many short ones fill whatever the long ones leave, almost like a
liquid. So a set of outliers is tried by placing them alone, longest first, and pouring the rest over them: that says
within a fraction of a percent how even the step would be, how many tokens it would train, and what would have to wait,
in a few microseconds instead of a whole packing. The price of a set is

    heaviest over mean micro-batch
    + ``delay_price`` x tokens that wait another step, in global batches
    + a tenth       x how uneven the next step would be if it had to train all outliers left, and short ones

The search starts from the sets that hold the most expensive outliers back, all but one, all but two, ..., and then
swaps single outliers while the cost falls. It ends at once where training all that is due is even already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from operator import itemgetter
from typing import NamedTuple

from wlb.lightest import into_lightest
from wlb.packing.packer import Pending

_EVEN = 1.0005  # price from which nothing is searched
_THRESHOLDS = 16  # sets that hold the most expensive outliers back
_OUTLOOK = 0.1  # price of a heaviest micro-batch twice the mean, in the next step
_OUT_OF_BOUNDS = 100.0  # price of a global batch of tokens over the most, or under the least, of a step
_MOVED = 24  # outliers, the most expensive, that are swapped one by one

_price = itemgetter(0)  # of a release
Released = tuple[bool, ...]  # of every outlier


class Outlier(NamedTuple):
    """A document that is weighed alone, and whether it is due by this step, or even must be in it."""

    item: Pending
    due: bool
    overdue: bool


class Fluid(NamedTuple):
    """Documents that are short enough to be poured: their tokens and seconds in all, and how many they are."""

    tokens: int
    seconds: float
    documents: int


class Release(NamedTuple):
    """The outliers to release. Short documents that are due wait where they would make more than ``limit`` seconds."""

    price: float
    released: Released
    limit: float
    imbalance: float


class StepRules(NamedTuple):
    """Every step trains ``least`` to ``most`` tokens in ``micro_batches`` of at most ``capacity``.

    ``batch`` is a global batch in tokens; for one of them to wait a step costs ``delay_price``. Where
    ``fluid_may_wait``, short documents that are due may be left for the next step.
    """

    micro_batches: int
    capacity: int
    least: int
    most: int
    batch: int
    delay_price: float
    fluid_may_wait: bool


class Offer(NamedTuple):
    """What a step may train: ``outliers``, most expensive first, short documents that are ``due``, and ``early`` ones.

    It trains at least ``aim`` tokens if ``early`` suffices.
    """

    outliers: Sequence[Outlier]
    due: Fluid
    early: Fluid
    aim: int
    rules: StepRules

    @property
    def density(self) -> float:
        """Seconds of a token of the fluid; in its absence, of the shortest outlier's."""
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
    """Sets without the k most expensive outliers; of the others those that are due, or all."""
    count = len(offer.outliers)
    steps = min(count, _THRESHOLDS)
    for held in sorted({round(count * (step / steps) ** 2) if steps < count else step for step in range(steps + 1)}):
        for early in (False, True):
            yield tuple([o.overdue or (index >= held and (early or o.due)) for index, o in enumerate(offer.outliers)])


def _improved(best: Release, attempt: Callable[[Released], Release], offer: Offer) -> Release:
    """The best that is reached from ``best`` by releasing or holding single outliers."""
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
    """Pour the fluid over outliers of ``tokens`` tokens: all that is due, or only what the heaviest outlier hides.

    Yields the seconds of fluid, those of the heaviest micro-batch then, and those up to which it was poured.
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
    """Heaviest micro-batch, of ``peak`` seconds, over the mean of ``loads`` and ``fluid`` seconds more in all."""
    total = math.fsum(loads) + fluid
    return max(1.0, peak * len(loads) / total) if total else 1.0


def _space(loads: list[float], rooms: list[int], density: float, peak: float) -> float:
    """Seconds of fluid for which there is room below ``peak``."""
    return math.fsum([min(peak - load, room * density) for load, room in zip(loads, rooms, strict=True) if load < peak])


def _outlook(outliers: Sequence[Outlier], offer: Offer) -> float:
    """Imbalance of ``outliers`` alone, evened out with a global batch of fluid."""
    loads, rooms, _ = _placed(outliers, offer.rules)
    peak = max(loads)
    fluid = min(_space(loads, rooms, offer.density, peak), offer.rules.batch * offer.density)
    return _imbalance(loads, fluid, peak)


def _placed(outliers: Sequence[Outlier], rules: StepRules) -> tuple[list[float], list[int], int]:
    """Outliers, longest first, into the lightest micro-batches with room: seconds, room left, and tokens unplaced."""
    loads, rooms = [0.0] * rules.micro_batches, [rules.capacity] * rules.micro_batches
    lengths = [outlier.item.length for outlier in outliers]
    owners, _ = into_lightest(lengths, [outlier.item.seconds for outlier in outliers], loads, rooms)
    return loads, rooms, sum([length for length, owner in zip(lengths, owners, strict=True) if owner < 0])


def _level(loads: list[float], rooms: list[int], seconds: float, density: float) -> tuple[float, float]:
    """The level to which ``seconds`` of fluid lift the micro-batches, and the seconds for which there is no room."""
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
