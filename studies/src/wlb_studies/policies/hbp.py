"""HBP: packing lengths for short and long documents, each with its own context parallelism and checkpointing.

Source: Hierarchical Balance Packing (NeurIPS '25, arXiv 2503.07680), section 4 and appendices E, I and J. Every packing
length is profiled with every context-parallel size. Four packing lengths are kept: the one that trains a token fastest,
the longest, and the share of a single rank in each. Each document goes to the smallest packing length that holds it,
shorter documents fill the remaining room, and micro-batches of similar attention run side by side. Only groups and
checkpointing differ between packing lengths.

Assumed: 8,192 to the window, doubling; profiles are simulated; kinds of checkpointing in place of numbers of layers;
ring exchange hidden as ours is, which it also allows; one step runs all lengths, no curriculum; pipeline size 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from wlb.simulate.space import SearchSpace
from wlb_studies.policies.filling import Integers, best_fit, in_order, longest_first, power_of_two
from wlb_studies.policies.hotspa import HotSwitching, without_update
from wlb_studies.policies.layouts import candidate_ranks, checkpointed
from wlb_studies.policies.plan import GroupPlan, Ranks
from wlb_studies.policies.policy import Outcome, Policy, batches_of_draws, best_of

SHORTEST = 8192  # smallest packing length profiled; the others double it, up to the window
PROFILED = 10  # micro-batches of every group


@dataclass(frozen=True)
class PackingLevels(HotSwitching):
    """A ``LayoutTrial``: ``longest`` has the packing lengths; ``Ranks`` of each determine its groups."""

    def plans(self, lengths: Integers) -> list[tuple[Ranks, GroupPlan]]:
        return [
            (ranks, balanced(packs, lengths, ranks, level))
            for ranks, level, packs in zip(self.strategies, self.longest, filled(lengths, self.longest), strict=True)
            if packs
        ]


def filled(lengths: Integers, levels: tuple[int, ...]) -> list[list[list[int]]]:
    """Micro-batches of every level, shortest first: packed by best fit, then filled with shorter documents.

    The longest level fills its micro-batches first, one by one, starting with the next shorter level.
    """
    level_of = np.searchsorted(levels, lengths)
    left = [[d for d in longest_first(lengths) if level_of[d] == level] for level in range(len(levels))]
    packed: list[list[list[int]]] = [[] for _ in levels]
    for level in reversed(range(len(levels))):
        packed[level] = best_fit(left[level], lengths, levels[level]) if left[level] else []
        for pack in packed[level]:
            room = levels[level] - int(lengths[pack].sum())
            for shorter in reversed(range(level)):
                for document in [d for d in left[shorter] if lengths[d] <= room]:
                    if lengths[document] <= room:
                        left[shorter].remove(document)
                        pack.append(document)
                        room -= int(lengths[document])
    return packed


def balanced(packs: list[list[int]], lengths: Integers, ranks: Ranks, level: int) -> GroupPlan:
    """Micro-batches by decreasing attention, as many at once as there are groups."""
    falling = sorted(packs, key=lambda pack: -int((lengths[pack] ** 2).sum()))
    return GroupPlan.of_fixed_groups(lengths, falling, ranks, _size(level, ranks))


class HbpPolicy(Policy):
    """Packing lengths in every tensor-parallel size; without a pipeline, as published."""

    def best(self, name: str, space: SearchSpace, lengths: Integers, steps: int | None = None) -> Outcome:
        draws = batches_of_draws(lengths, space, steps)
        documents = draws[0][0]
        choices = candidate_ranks(space, documents, pipelines=False, interleaves=False)
        of_layouts = {ranks.job.layout: ranks for ranks in choices}.values()
        trials = [trial for ranks in of_layouts if (trial := selected(ranks, documents, space)) is not None]
        return best_of(name, trials, draws, space)


def selected(ranks: Ranks, documents: Integers, space: SearchSpace) -> PackingLevels | None:
    """The packing lengths of a layout, profiled on ``documents``; None if no group holds a window."""
    kinds = checkpointed(ranks, space)
    window = space.context_window
    doublings = max(0, (window - 1) // SHORTEST).bit_length()
    best: dict[int, tuple[float, Ranks]] = {}

    def profile(level: int) -> Ranks | None:
        ways = [(_token_seconds(way, level, documents), way) for way in _ways(kinds, level)]
        if not ways:
            return None
        best[level] = min(ways, key=lambda way: way[0])
        return best[level][1]

    for level in [*(SHORTEST << n for n in range(doublings) if SHORTEST << n < window), window]:
        profile(level)
    if window not in best:
        return None
    fastest = min(best, key=lambda level: best[level][0])
    alone = {level: best[level][1].capacity for level in (fastest, window)}
    levels = {fastest, window, alone[fastest], *(length for length in [alone[window]] if length >= fastest)}
    for level in levels - set(best):
        profile(level)
    kept = sorted(levels & set(best))
    return PackingLevels(tuple(kept), tuple(best[level][1] for level in kept))


def _ways(kinds: list[Ranks], level: int) -> Iterator[Ranks]:
    """Groups of every power of two of ranks for ``level`` tokens, each with the cheapest checkpointing."""
    for exponent in range(kinds[0].count.bit_length()):
        share = -(-level // 2**exponent)
        fitting = next((kind for kind in kinds if kind.capacity >= share), None)
        if fitting is not None:
            yield replace(fitting, capacity=share)


def _size(level: int, ranks: Ranks) -> int:
    return power_of_two(ranks.needed(level))


def _token_seconds(ranks: Ranks, level: int, documents: Integers) -> float:
    """Seconds per token in the first micro-batches that documents of up to ``level`` tokens fill in order."""
    size = _size(level, ranks)
    short = np.flatnonzero(documents <= level)
    packs = in_order(short.tolist(), documents, level)[: PROFILED * (ranks.count // size)]
    if not packs:
        return float("inf")
    plan = GroupPlan.of_fixed_groups(documents, packs, ranks, size)
    return without_update(plan, ranks) / float(plan.trained.sum())
