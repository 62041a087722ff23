"""HotSPa: a parallel strategy for every bucket of lengths, switched inside a step.

Source: HotSPa (SOSP '24), its abstract; the system is Hetu (PKU-DAIR/Hetu). Documents are divided into buckets by
length; each bucket trains with the strategy that is fastest for it, on all GPUs, one bucket after another. Between two
strategies weights move, and gradients, which are accumulated over all buckets.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wlb.errors import UserError
from wlb.simulate.search import SearchSpace
from wlb.studies.policies.filling import Integers, best_fit, longest_first, power_of_two
from wlb.studies.policies.layouts import candidate_ranks, layout_text
from wlb.studies.policies.plan import GroupPlan, Ranks
from wlb.studies.policies.policy import Outcome, PricedStep, best_of, first_batches
from wlb.studies.policies.pricing import StepPrice, begun_together, group_seconds, price_groups, step_seconds
from wlb.workload.base import DocumentPrices
from wlb.workload.links import group_link
from wlb.workload.weights import parameters

BUCKETS = (1 / 16, 1 / 4, 1.0)  # of the context window: the longest document of each; assumed
_GRADIENT_BYTES = 4


def same_groups(lengths: Integers, ranks: Ranks) -> GroupPlan:
    """Groups of one size, the least that holds the longest document; short ones packed, dearest micro-batch first."""
    size = power_of_two(ranks.needed(int(lengths.max())))
    cost = ranks.job.sharding_workload.document_seconds(lengths)
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

    def step(self, lengths: Integers) -> PricedStep:
        began = time.perf_counter()
        used = [
            (ranks, same_groups(documents, ranks))
            for ranks, documents in zip(self.strategies, in_buckets(lengths, self.longest), strict=True)
            if len(documents)
        ]
        planning = time.perf_counter() - began
        seconds = exchanged = memory = 0.0
        for index, (ranks, plan) in enumerate(used):
            price = price_groups(plan, ranks)
            last = index == len(used) - 1
            seconds += price.seconds if last else _without_update(plan, ranks)
            exchanged += price.exchanged_bytes
            memory = max(memory, price.memory_bytes)
        moved = switched_bytes([ranks for ranks, _ in used])
        job = used[0][0].job
        seconds += float(group_link(job.hardware, "point_to_point", job.layout.world_size, 1).seconds(moved))
        trained = np.concatenate([plan.trained for _, plan in used])
        return PricedStep(StepPrice(seconds, exchanged + moved, memory), trained, planning)


def in_buckets(lengths: Integers, longest: Sequence[int]) -> list[Integers]:
    """Lengths of the documents of every bucket."""
    bucket = np.searchsorted(longest, lengths)
    return [lengths[bucket == index] for index in range(len(longest))]


def switched_bytes(strategies: Sequence[Ranks]) -> float:
    """What a GPU receives of weights, and of gradients, over a step: its new share less what it already holds.

    After the last strategy the weights of the first come back; gradients are done by then.
    """
    total = 0.0
    for index, new in enumerate(strategies):
        old = strategies[index - 1]
        share = 1 / (new.job.layout.tp * new.job.layout.pp)
        held = 1 / (max(new.job.layout.tp, old.job.layout.tp) * max(new.job.layout.pp, old.job.layout.pp))
        values = parameters(new.job.shape) * (share - held)
        total += values * (new.job.hardware.bytes_per_value + (_GRADIENT_BYTES if index else 0))
    return total


def best(name: str, space: SearchSpace, lengths: Integers, work_prices: DocumentPrices) -> Outcome:
    """The fastest strategy of every bucket, by its own documents of the first step."""
    batches = first_batches(lengths, space)
    longest = tuple(int(part * space.context_window) for part in BUCKETS)
    strategies: list[Ranks] = []
    tried = 0
    for documents in in_buckets(batches[0], longest):
        of_bucket = documents if len(documents) else batches[0]
        choices = candidate_ranks(space, of_bucket, pipelines=True, interleaves=True, keeps_weights=True)
        tried += len(choices)
        strategies.append(min(choices, key=lambda ranks: _seconds(of_bucket, ranks)))
    one_for_all = candidate_ranks(space, batches[0], pipelines=True, interleaves=True, keeps_weights=True)
    trials = [HotSwitching(longest, tuple(strategies))]
    trials += [HotSwitching(longest, (ranks,) * len(longest)) for ranks in (strategies[-1], one_for_all[0])]
    return best_of(name, trials, batches, space, work_prices)


def _seconds(lengths: Integers, ranks: Ranks) -> float:
    if ranks.needed(int(lengths.max())) > ranks.count:
        raise UserError(f"{ranks.count} ranks of {ranks.capacity} tokens hold no document of {lengths.max()}")
    return price_groups(same_groups(lengths, ranks), ranks).seconds


def _without_update(plan: GroupPlan, ranks: Ranks) -> float:
    """The bucket's own part of the step: reducing gradients and updating weights come once, after the last."""
    seconds, _ = group_seconds(plan, ranks)
    return step_seconds(seconds, begun_together(plan, ranks), ranks, updates_weights=False)
