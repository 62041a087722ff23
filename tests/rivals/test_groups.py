"""Policies that form groups: their published invariants on random documents, and a case of each worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.rivals.ranks import CAPACITY, DOCUMENTS, lengths_of, ranks
from wlb.errors import UserError
from wlb.rivals.bytescale import hybrid_data_parallel
from wlb.rivals.filling import power_of_two
from wlb.rivals.flexsp import heterogeneous_groups
from wlb.rivals.hotspa import same_groups
from wlb.rivals.megatron import dp_balanced, dynamic, packing_aware
from wlb.rivals.plan import GroupPlan
from wlb.rivals.verl import karmarkar_karp_twice
from wlb.rivals.wlb_llm import breakpoint_tokens, evened, without_delay
from wlb.workload import model_shape

PLANS = {
    "dp_balanced": dp_balanced,
    "dynamic": dynamic,
    "packing_aware": packing_aware,
    "bytescale": hybrid_data_parallel,
    "flexsp": heterogeneous_groups,
    "hotspa": same_groups,
    "verl": karmarkar_karp_twice,
    "wlb": without_delay,
}
FIXED = ("dp_balanced", "hotspa", "verl", "wlb")


def described(plan: GroupPlan) -> list[tuple[int, tuple[int, ...], list[int]]]:
    return sorted((g.slot, g.ranks, sorted(plan.lengths[list(g.documents)].tolist())) for g in plan.groups)


@pytest.mark.parametrize("name", PLANS)
@settings(max_examples=10)
@given(lengths=DOCUMENTS)
def test_all_documents_are_attended_whole_under_the_token_cap(name, lengths):
    plan = PLANS[name](lengths, ranks())
    assert sorted(d for group in plan.groups for d in group.documents) == [*range(len(lengths))]
    for group in plan.groups:
        assert lengths[list(group.documents)].sum() <= CAPACITY * len(group.ranks)
    places = [(group.slot, rank) for group in plan.groups for rank in group.ranks]
    assert len(places) == len(set(places))  # a rank runs one group at a time


@pytest.mark.parametrize("name", [name for name in PLANS if name != "bytescale"])
@settings(max_examples=5)
@given(lengths=DOCUMENTS)
def test_groups_are_powers_of_two_and_alike_where_they_are_fixed(name, lengths):
    sizes = {len(group.ranks) for group in PLANS[name](lengths, ranks()).groups}
    assert all(size == power_of_two(size) for size in sizes)
    assert len(sizes) == 1 or name not in FIXED


@settings(max_examples=10)
@given(lengths=DOCUMENTS)
def test_bytescale_gives_a_document_the_ranks_that_it_needs(lengths):
    for group in hybrid_data_parallel(lengths, ranks()).groups:
        longest = int(lengths[list(group.documents)].max())
        assert len(group.ranks) == -(-longest // CAPACITY)
        assert len(group.ranks) == 1 or len(group.documents) == 1


@settings(max_examples=10)
@given(lengths=DOCUMENTS)
def test_megatron_dynamic_runs_documents_one_by_one_with_a_barrier_between_rounds(lengths):
    plan = dynamic(lengths, ranks())
    assert all(len(group.documents) == 1 for group in plan.groups)
    rounds = sorted(plan.barriers)
    sizes: dict[tuple[int, int], set[int]] = {}
    for group in plan.groups:
        of_round = int(np.searchsorted(rounds, group.slot, side="right"))
        for rank in group.ranks:
            sizes.setdefault((of_round, rank), set()).add(len(group.ranks))
    assert all(len(of_rank) == 1 for of_rank in sizes.values())  # a rank's group stays what it is in a round


def test_dp_balanced_by_hand():
    """Groups of 2 ranks hold 16: [8, 8] and [4, 4, 4] in arrival order; three fives more make a third and halve it."""
    few = ranks(4, capacity=8, window=16)
    assert described(dp_balanced(lengths_of(8, 8, 4, 4, 4), few)) == [(0, (0, 1), [8, 8]), (0, (2, 3), [4, 4, 4])]
    more = dp_balanced(lengths_of(8, 8, 4, 4, 4, 5, 5, 5), few)
    assert sorted(len(group.documents) for group in more.groups) == [1, 2, 2, 3]


def test_dynamic_by_hand():
    """16 tokens need 2 ranks, the others one; the second 4 goes to the lighter of the two ranks alone."""
    plan = dynamic(lengths_of(16, 8, 4, 4), ranks(4, capacity=8, window=16))
    assert described(plan) == [(0, (0, 1), [16]), (0, (2,), [8]), (0, (3,), [4]), (1, (3,), [4])]


def test_packing_aware_by_hand():
    """16^2 / 2 is over the mean rank's 352 / 4 = 88, so 16 gets all 4 ranks; the others fit beside it: 88 in all."""
    plan = packing_aware(lengths_of(16, 8, 4, 4), ranks(4, capacity=8, window=16))
    assert described(plan) == [(0, (0, 1, 2, 3), [4, 4, 8, 16])]


def test_bytescale_by_hand():
    plan = hybrid_data_parallel(lengths_of(16, 8, 4, 4), ranks(4, capacity=8, window=16))
    assert described(plan) == [(0, (0, 1), [16]), (0, (2,), [8]), (0, (3,), [4, 4])]


def test_flexsp_by_hand():
    """What needs one rank gets one, as an all-to-all of so few tokens takes longer than computing them."""
    plan = heterogeneous_groups(lengths_of(16, 8, 8), ranks(4, capacity=8, window=16))
    assert sorted(len(group.ranks) for group in plan.groups) == [1, 1, 2]
    assert plan.exchange == "heads"


def test_flexsp_halves_a_micro_batch_whose_tokens_fit_but_not_one_by_one():
    """Three documents of 9 tokens need two ranks each, and there are four: 27 tokens of 32."""
    plan = heterogeneous_groups(lengths_of(9, 9, 9), ranks(4, capacity=8, window=16))
    sizes = [sorted(len(g.ranks) for g in plan.groups if g.slot == slot) for slot in (0, 1)]
    assert sizes == [[2, 2], [2]]


def test_flexsp_says_what_it_needs():
    with pytest.raises(UserError, match="give more GPUs"):
        heterogeneous_groups(lengths_of(64), ranks(2, capacity=8, window=64))


def test_verl_by_hand():
    """Two groups of 2 ranks: 8 and 7 differ by one, 6 and 5 too; the heavier of one pair meets the lighter other."""
    plan = karmarkar_karp_twice(lengths_of(8, 7, 6, 5), ranks(4, capacity=8, window=16))
    assert sorted(documents for _, _, documents in described(plan)) == [[5, 8], [6, 7]]


def test_wlb_without_delay_by_hand():
    """Longest first, each into the lighter of two micro-batches: 5; 4; 2 beside 4; 1 beside 5."""
    plan = without_delay(lengths_of(5, 4, 2, 1), ranks(2, capacity=16, window=16))
    assert described(plan) == [(0, (0,), [1, 5]), (0, (1,), [2, 4])]


def test_wlb_without_delay_lets_what_fits_nowhere_overflow_to_the_least_work():
    """L_max is the mean, 10.5. The last 2 fits neither beside 9 nor beside 10; the 10 are five short documents."""
    assert evened(lengths_of(9, *[2] * 6), 2, 1) == [[0], [1, 2, 3, 4, 5, 6]]
    # Where the least work has no room, the fewest tokens may have: 9 is dearer than 10, and takes the 1.
    assert evened(lengths_of(9, *[2] * 5, 1), 2, 1) == [[0, 6], [1, 2, 3, 4, 5]]
    assert evened(lengths_of(9, *[2] * 5, 1), 2, 1, length_factor=1.5) == [[0], [1, 2, 3, 4, 5, 6]]


def test_wlb_without_delay_weighs_by_a_breakpoint_that_the_model_has():
    """At a breakpoint of 1 attention decides and 4 alone weighs most; at a long one tokens do, and 4 shares."""
    lengths = lengths_of(4, 3, 2, 2)
    assert evened(lengths, 2, 1, length_factor=9.0) == [[0], [1, 2, 3]]
    assert evened(lengths, 2, 10**6, length_factor=9.0) == [[0, 3], [1, 2]]
    assert [breakpoint_tokens(model_shape(name)) for name in ("llama3-8b", "llama3-70b")] == [64_000, 131_072]


def test_hotspa_packs_a_bucket_in_groups_for_its_longest_document():
    plan = same_groups(lengths_of(16, 8, 4, 4), ranks(4, capacity=8, window=16))
    assert described(plan) == [(0, (0, 1), [16]), (0, (2, 3), [4, 4, 8])]
