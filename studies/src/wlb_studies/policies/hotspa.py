"""HotSPa: a parallel strategy for every bucket of lengths, switched within a step.

Source: HotSPa (SOSP '24), its abstract; the system is Hetu (PKU-DAIR/Hetu). Documents are divided into buckets by
length. Each bucket trains with its fastest strategy on all GPUs, one bucket after another. Between two strategies
weights move, and so do gradients, which accumulate over all buckets.

Assumed: up to four buckets, with the quartiles of tokens as bounds that make the step fastest; moves are not
overlapped, and a GPU receives only what it lacks.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, pairwise

import numpy as np

from wlb.simulate.space import SearchSpace
from wlb.workload.links import group_link
from wlb.workload.weights import parameters
from wlb_studies.policies.filling import Integers, best_fit, longest_first, power_of_two
from wlb_studies.policies.layouts import candidate_ranks, layout_text
from wlb_studies.policies.plan import GroupPlan, Ranks
from wlb_studies.policies.policy import Outcome, Policy, PricedStep, batches_of_draws, best_of
from wlb_studies.policies.pricing import StepPrice, begun_together, group_seconds, price, step_seconds

BOUNDS = (1 / 4, 1 / 2, 3 / 4)  # share of tokens in documents up to each bound that is tried; assumed
_GRADIENT_BYTES = 4


def same_groups(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Groups of the smallest size that holds the longest document; most expensive micro-batch first."""
    size = power_of_two(ranks.needed(int(lengths.max())))
    cost = ranks.job.costs.document_seconds(lengths)
    packed = best_fit(longest_first(lengths), lengths, ranks.capacity * size)
    packed.sort(key=lambda documents: -float(cost[documents].sum()))
    return GroupPlan.of_fixed_groups(lengths, packed, ranks, size)


@dataclass(frozen=True)
class HotSwitching:
    """A ``LayoutTrial``: the strategy of every bucket, shortest documents first."""

    longest: tuple[int, ...]  # document of each bucket
    strategies: tuple[Ranks, ...]

    @property
    def layout(self) -> str:
        return "; ".join(
            f"to {longest:,}: {layout_text(r)}" for longest, r in zip(self.longest, self.strategies, strict=True)
        )

    def plans(self, lengths: Integers) -> list[tuple[Ranks, GroupPlan]]:
        """The strategies in use, in order, and what each runs."""
        return [
            (ranks, same_groups(documents, ranks))
            for ranks, documents in zip(self.strategies, in_buckets(lengths, self.longest), strict=True)
            if len(documents)
        ]

    def step(self, lengths: Integers) -> PricedStep:
        began = time.process_time()
        used = self.plans(lengths)
        planning = time.process_time() - began
        prices = [price(plan, ranks) for ranks, plan in used]
        moved = switched_bytes([ranks for ranks, _ in used])
        job = used[0][0].job
        # Reducing gradients and updating weights come once, after the last bucket.
        seconds = sum(without_update(plan, ranks) for ranks, plan in used[:-1]) + prices[-1].seconds
        seconds += float(group_link(job.hardware, "point_to_point", job.layout.world_size, 1).seconds(moved))
        exchanged = sum(one.exchanged_bytes for one in prices) + moved
        step = StepPrice(seconds, exchanged, max(one.memory_bytes for one in prices))
        return PricedStep(step, np.concatenate([plan.trained for _, plan in used]), planning)


def in_buckets(lengths: Integers, longest: Sequence[int]) -> list[Integers]:
    """Lengths of the documents of every bucket."""
    bucket = np.searchsorted(longest, lengths)
    return [lengths[bucket == index] for index in range(len(longest))]


def switched_bytes(strategies: Sequence[Ranks]) -> float:
    """Weights and gradients that a GPU receives over a step: its new share minus what it already holds.

    After the last strategy the weights of the first return; gradients are finished by then.
    """
    total = 0.0
    for index, new in enumerate(strategies):
        old = strategies[index - 1]
        share = 1 / (new.job.layout.tp * new.job.layout.pp)
        held = 1 / (max(new.job.layout.tp, old.job.layout.tp) * max(new.job.layout.pp, old.job.layout.pp))
        values = parameters(new.job.shape) * (share - held)
        total += values * (new.job.hardware.bytes_per_value + (_GRADIENT_BYTES if index else 0))
    return total


class HotSpaPolicy(Policy):
    """The buckets and strategies that are fastest on the first steps."""

    def best(self, name: str, space: SearchSpace, lengths: Integers, steps: int | None = None) -> Outcome:
        draws = batches_of_draws(lengths, space, steps)
        documents, window = draws[0][0], space.context_window

        @cache
        def fastest(above: int, longest: int) -> Ranks:
            own = documents[(documents > above) & (documents <= longest)]
            return min(candidate_ranks(space, own), key=partial(_seconds, own))

        inner = bounds(documents)
        buckets = [(*some, window) for number in range(len(inner) + 1) for some in combinations(inner, number)]
        trials = [HotSwitching(longest, tuple(fastest(*two) for two in pairwise((0, *longest)))) for longest in buckets]
        trials += [replace(trial, strategies=(fastest(0, window),) * len(trial.longest)) for trial in trials]
        return best_of(name, dict.fromkeys(trials), draws, space)


def bounds(lengths: Integers) -> list[int]:
    """The longest document of every bucket to try, except the last, which holds a window."""
    ascending = np.sort(lengths)
    tokens = np.cumsum(ascending)
    found = ascending[np.searchsorted(tokens, np.array(BOUNDS) * tokens[-1])]
    return [bound for bound in np.unique(found).tolist() if bound < ascending[-1]]


def _seconds(lengths: Integers, ranks: Ranks) -> float:
    return price(same_groups(lengths, ranks), ranks).seconds


def without_update(plan: GroupPlan, ranks: Ranks) -> float:
    """Seconds of ``plan`` until its last backward."""
    seconds, _ = group_seconds(plan, ranks)
    return step_seconds(seconds, begun_together(plan, ranks), ranks, updates_weights=False)
