"""transformers' ``batch_rebalance``: padded micro-batches of near-equal cost, dealt over data-parallel ranks.

Source: huggingface/transformers 5.24, ``trainer_pt_utils.py: BatchRebalanceSampler``. Every document of a micro-batch
is padded to its longest, and n documents so long as s tokens cost n s + 0.001 n s^2. The documents of a step, longest
first, are cut into a run for each micro-batch of each rank. The dearest run gives to the cheapest, one by one.

Assumed: padding is computed like any token; groups are as large as a window needs; as many micro-batches as keep padded
tokens under the token cap, where a user sets their number and size.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb_studies.policies.filling import Integers, longest_first, power_of_two
from wlb_studies.policies.plan import GroupPlan, Ranks

_QUADRATIC = 0.001  # of a squared token, for every model
_ROUNDS = 30  # of the search, for each run; a round moves one document


@dataclass(frozen=True, eq=False)
class PaddedPlan(GroupPlan):
    """Groups whose documents are all as long as the longest; ``own`` are the lengths without padding."""

    own: Integers = field(kw_only=True)

    @property
    def trained(self) -> Integers:
        return self.own


def padded(lengths: Integers, ranks: Ranks) -> PaddedPlan:
    """The micro-batches of every rank, the dearest first. Raises ``UserError`` where documents are too few."""
    size = power_of_two(ranks.needed(ranks.window))
    groups, most = ranks.count // size, ranks.capacity * size
    order = longest_first(lengths)
    descending = lengths[order]
    micro_batches = -(-_fewest_runs(descending, most) // groups)
    while micro_batches * groups <= len(lengths):
        counts = balanced_runs(descending, groups, micro_batches)
        starts = np.cumsum(counts) - counts
        if (counts * descending[starts]).max() <= most:
            dearest_first = np.argsort(-_costs(counts, descending), kind="stable")
            runs = [order[starts[run] : starts[run] + counts[run]] for run in dearest_first]
            of_run = np.empty_like(lengths)
            of_run[order] = np.repeat(descending[starts], counts)
            return PaddedPlan.of_fixed_groups(of_run, runs, ranks, size, own=lengths)
        micro_batches += 1
    raise UserError(f"{len(lengths)} documents are too few for {micro_batches} padded micro-batches a rank")


def balanced_runs(descending: Integers, ranks: int, micro_batches: int) -> Integers:
    """How many documents each run has, in the most even division that the search meets.

    A run of one document that is still the dearest is set aside, with those that run beside it on other ranks.
    """
    count, runs = len(descending), ranks * micro_batches
    counts = np.full(runs, count // runs)
    counts[: count % runs] += 1
    aside, seen = np.zeros(runs, np.bool_), set[bytes]()
    best, narrowest = counts.copy(), np.inf
    for _ in range(max(_ROUNDS * runs, count)):
        if counts.tobytes() in seen or (~aside).sum() <= 1:
            break
        seen.add(counts.tobytes())
        costs = _costs(counts, descending)
        open_runs = np.flatnonzero(~aside)
        dearest, cheapest = open_runs[costs[open_runs].argmax()], open_runs[costs[open_runs].argmin()]
        if (spread := costs[dearest] - costs[cheapest]) < narrowest:
            best, narrowest = counts.copy(), spread
        if not spread:
            break
        if counts[dearest] > 1:
            counts[[dearest, cheapest]] += -1, 1
        else:
            _set_aside(int(dearest), costs, counts, aside, descending, ranks)
    return best


def _set_aside(
    dearest: int,
    costs: NDArray[np.float64],
    counts: Integers,
    aside: NDArray[np.bool_],
    descending: Integers,
    ranks: int,
) -> None:
    """Set aside ``dearest`` and its neighbours, which first take from the cheapest others what keeps them below it."""
    by_cost = np.argsort(-costs, kind="stable")
    first = by_cost.tolist().index(dearest) // ranks * ranks
    beside = np.sort(by_cost[first : first + ranks])
    for run in beside[~aside[beside] & (beside != dearest)]:
        while True:
            givers = np.flatnonzero(~aside & (counts > 1))
            givers = givers[~np.isin(givers, beside)]
            longest = descending[counts[:run].sum()]
            if not len(givers) or cost(counts[run] + 1, longest) > costs[dearest]:
                break
            counts[givers[_costs(counts, descending)[givers].argmin()]] -= 1
            counts[run] += 1
    aside[beside] = True


def _costs(counts: Integers, descending: Integers) -> NDArray[np.float64]:
    return np.asarray(cost(counts, descending[np.cumsum(counts) - counts]), np.float64)


def cost(count: int | Integers, longest: Integers) -> NDArray[np.float64]:
    """What the sampler takes documents to cost, padded to the ``longest``."""
    return count * longest * (1 + _QUADRATIC * longest)


def _fewest_runs(descending: Integers, most: int) -> int:
    """Of padded documents under ``most`` tokens."""
    start = runs = 0
    while start < len(descending):
        start, runs = start + max(1, most // int(descending[start])), runs + 1
    return runs
