"""Policies that form groups: their published invariants on random documents, and a case of each worked by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.tests.policies.ranks import CAPACITY, DOCUMENTS, WINDOW, lengths_of, ranks
from tests.limits import examples
from wlb.errors import UserError
from wlb.workload import model_shape
from wlb_studies.policies.bytescale import hybrid_data_parallel
from wlb_studies.policies.filling import power_of_two
from wlb_studies.policies.flexible_cp import any_degree, shared_out
from wlb_studies.policies.flexsp import heterogeneous_groups
from wlb_studies.policies.hbp import PackingLevels, filled
from wlb_studies.policies.hotspa import same_groups
from wlb_studies.policies.megatron import dp_balanced, dynamic, packing_aware
from wlb_studies.policies.odc import minibatch_balanced
from wlb_studies.policies.plan import GroupPlan
from wlb_studies.policies.pricing import price
from wlb_studies.policies.rebalance import balanced_runs, padded
from wlb_studies.policies.verl import karmarkar_karp_twice, packed_then_dealt
from wlb_studies.policies.wlb_llm import breakpoint_tokens, evened, without_delay

PLANS = {
    "dp_balanced": dp_balanced,
    "dynamic": dynamic,
    "packing_aware": packing_aware,
    "bytescale": hybrid_data_parallel,
    "flexible_cp": any_degree,
    "odc": minibatch_balanced,
    "flexsp": heterogeneous_groups,
    "hotspa": same_groups,
    "verl": karmarkar_karp_twice,
    "slime": packed_then_dealt,
    "batch-rebalance": padded,
    "wlb": without_delay,
}
FIXED = ("odc", "dp_balanced", "hotspa", "verl", "slime", "batch-rebalance", "wlb")
INTERLEAVED = {"pp": 2, "micro_batches": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b"}


def described(plan: GroupPlan) -> list[tuple[int, tuple[int, ...], list[int]]]:
    return sorted((g.slot, g.ranks, sorted(plan.lengths[list(g.documents)].tolist())) for g in plan.groups)


@pytest.mark.parametrize("name", PLANS)
@settings(max_examples=examples(5))
@given(lengths=DOCUMENTS)
def test_all_documents_are_attended_whole_under_the_token_cap(name, lengths):
    plan = PLANS[name](lengths, ranks())
    assert sorted(d for group in plan.groups for d in group.documents) == [*range(len(lengths))]
    for group in plan.groups:
        assert lengths[list(group.documents)].sum() <= CAPACITY * len(group.ranks)
    places = [(group.slot, rank) for group in plan.groups for rank in group.ranks]
    assert len(places) == len(set(places))  # a rank runs one group at a time


@pytest.mark.parametrize("name", [name for name in PLANS if name not in ("bytescale", "flexible_cp")])
@settings(max_examples=examples(5))
@given(lengths=DOCUMENTS)
def test_groups_are_powers_of_two_and_alike_where_they_are_fixed(name, lengths):
    sizes = {len(group.ranks) for group in PLANS[name](lengths, ranks()).groups}
    assert all(size == power_of_two(size) for size in sizes)
    assert len(sizes) == 1 or name not in FIXED


@settings(max_examples=examples(5))
@given(lengths=DOCUMENTS)
def test_bytescale_gives_a_document_the_ranks_that_it_needs(lengths):
    for group in hybrid_data_parallel(lengths, ranks()).groups:
        longest = int(lengths[list(group.documents)].max())
        assert len(group.ranks) == -(-longest // CAPACITY)
        assert len(group.ranks) == 1 or len(group.documents) == 1


@settings(max_examples=examples(5))
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


def test_dp_balanced_moves_single_documents_from_the_end():
    """Two groups of 2 ranks hold 16 each: [8, 8], [4, 4, 4], [5, 5, 5]; the last five gets a micro-batch of its own."""
    few = ranks(4, capacity=8, window=16)
    assert described(dp_balanced(lengths_of(8, 8, 4, 4, 4), few)) == [(0, (0, 1), [8, 8]), (0, (2, 3), [4, 4, 4])]
    more = dp_balanced(lengths_of(8, 8, 4, 4, 4, 5, 5, 5), few)
    assert described(more)[2:] == [(1, (0, 1), [5, 5]), (1, (2, 3), [5])]


def test_dp_balanced_rounds_to_groups_and_with_interleaved_stages_to_groups_by_pp():
    """[8, 4], [4, 4, 4]: as many as groups. Interleaved: two more, the last four twice."""
    lengths = lengths_of(8, 4, 4, 4, 4)
    pipeline = {"pp": 2, "micro_batches": 2}
    assert dp_balanced(lengths, ranks(4, capacity=6, window=12, **pipeline)).slots == 1
    plan = dp_balanced(lengths, ranks(4, capacity=6, window=12, **INTERLEAVED))
    assert described(plan) == [(0, (0, 1), [4, 8]), (0, (2, 3), [4]), (1, (0, 1), [4]), (1, (2, 3), [4])]
    with pytest.raises(UserError, match="2 documents cannot fill a multiple of 4 micro-batches"):
        dp_balanced(lengths_of(8, 8), ranks(4, capacity=6, window=12, **INTERLEAVED))


def test_dynamic_by_hand():
    """16 tokens need 2 ranks, the others one; the second 4 goes to the lighter of the two ranks alone."""
    plan = dynamic(lengths_of(16, 8, 4, 4), ranks(4, capacity=8, window=16))
    assert described(plan) == [(0, (0, 1), [16]), (0, (2,), [8]), (0, (3,), [4]), (1, (3,), [4])]


def test_what_a_round_leaves_over_is_not_sorted_again():
    """9 joins 12, and is taken out again: 84.5 to 72 is more even than to 112.5. So 1, never placed, is before it."""
    plan = dynamic(lengths_of(13, 12, 9, 1), ranks(4, capacity=8, window=16))
    assert described(plan) == [(0, (0, 1), [13]), (0, (2, 3), [12]), (1, (0, 1), [1]), (1, (2, 3), [9])]


def test_packing_aware_by_hand():
    """16 gets the 2 ranks that it needs. A rank's cap is 16 x 8 x 1.05 = 134.4, and 16^2 / 2 = 128 of it are taken.

    8 on one more rank costs 64, less than 128, so it takes no second; no more does the first 4, which adds 16 there,
    as 64 + 16 is under 128, and a rank of its own comes after: first fit in effect. But 8 + 4 are over 8 tokens.
    """
    plan = packing_aware(lengths_of(16, 8, 4, 4), ranks(4, capacity=8, window=16))
    assert described(plan) == [(0, (0, 1), [16]), (0, (2,), [8]), (0, (3,), [4, 4])]
    assert not plan.barriers


def test_packing_aware_gives_a_document_more_ranks_where_the_largest_load_then_grows_less():
    """20 on 4 ranks costs 100, and 16 on the 2 that it needs 128: on the other 4 only 64, so it gets them."""
    plan = packing_aware(lengths_of(20, 16), ranks(8, capacity=8, window=32))
    assert described(plan) == [(0, (0, 1, 2, 3), [20]), (0, (4, 5, 6, 7), [16])]


def test_packing_aware_leaves_what_is_over_the_cap_for_another_round_and_fills_all_ranks():
    """Two ranks, cap 8 x 8 x 1.05 = 67.2: 8 and 8 are 64 each; the 4 left over runs on both ranks."""
    plan = packing_aware(lengths_of(8, 8, 4), ranks(2, capacity=8, window=16))
    assert described(plan) == [(0, (0,), [8]), (0, (1,), [8]), (1, (0, 1), [4])]


def test_packing_aware_splits_rounds_for_interleaved_stages():
    """One round of 16 on two ranks and 8 and 7 on one each: two rounds, the one with the larger group last."""
    interleaved = ranks(4, capacity=8, window=16, **INTERLEAVED)
    plan = packing_aware(lengths_of(16, 8, 7), interleaved)
    assert described(plan) == [(0, (0, 1), [8]), (0, (2, 3), [7]), (1, (0, 1, 2, 3), [16])]
    with pytest.raises(UserError, match="1 rounds are no multiple of pp = 2"):
        packing_aware(lengths_of(16), interleaved)


@pytest.mark.parametrize("name", ["dynamic", "packing_aware"])
def test_a_document_that_needs_a_power_of_two_over_all_ranks_is_refused(name):
    with pytest.raises(UserError, match="needs 4 ranks of 8 tokens, and there are 3"):
        PLANS[name](lengths_of(24, 4), ranks(3, capacity=8, window=24))


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


def test_verl_gives_every_rank_as_many_documents():
    """Were only the sum to be even, 12 would be alone: 12 against 4 + 4 + 4."""
    plan = karmarkar_karp_twice(lengths_of(12, 4, 4, 4), ranks(2, capacity=16, window=16))
    assert described(plan) == [(0, (0,), [4, 12]), (0, (1,), [4, 4])]


def test_verl_has_its_lightest_micro_batches_at_both_ends():
    plan = karmarkar_karp_twice(lengths_of(16, 15, 14, 13, 12), ranks(1, capacity=16, window=16))
    assert [group.documents for group in plan.groups] == [(4,), (2,), (0,), (1,), (3,)]


def test_verl_prices_tokens_by_a_constant():
    """s^2 + 24,576 s: 30,000 weighs 1.64e9, more than 16,000 and 22,000 less 9,000, so it meets the lightest."""
    cost = [s * s + 24_576 * s for s in (30_000, 22_000, 16_000, 9_000)]
    assert cost[0] + cost[3] - cost[1] - cost[2] == pytest.approx(266e6, rel=0.01)
    plan = karmarkar_karp_twice(lengths_of(30_000, 22_000, 16_000, 9_000), ranks(2, capacity=40_000, window=32_768))
    assert sorted(documents for _, _, documents in described(plan)) == [[9_000, 30_000], [16_000, 22_000]]


@settings(max_examples=examples(20))
@given(lengths=DOCUMENTS, counts=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_batch_rebalance_cuts_a_step_as_transformers_does(lengths, counts):
    sampler = pytest.importorskip("transformers.trainer_pt_utils").BatchRebalanceSampler
    if len(lengths) < counts[0] * counts[1]:
        return
    descending = np.sort(lengths)[::-1]
    groups = sampler(lengths.tolist(), len(lengths), *counts)._balance_groups([*enumerate(descending.tolist())])
    assert balanced_runs(descending, *counts).tolist() == [len(group) for group in groups]


def test_batch_rebalance_pays_for_padding_and_trains_none():
    lengths = lengths_of(*range(100, 2000, 30))
    plan = padded(lengths, ranks())
    assert (plan.trained == lengths).all()
    assert all(len({*plan.lengths[list(group.documents)].tolist()}) == 1 for group in plan.groups)
    unpadded = GroupPlan(lengths, plan.groups)
    assert price(plan, ranks()).seconds > price(unpadded, ranks()).seconds


def test_slime_packs_all_documents_by_first_fit_and_then_deals_micro_batches():
    """[9, 5, 2], [8, 6], [7]: one is halved, [9, 5, 2] to 9 and 5 + 2, and each of two ranks runs two of the four."""
    plan = packed_then_dealt(lengths_of(9, 8, 5, 6, 7, 2), ranks(2, capacity=16, window=16))
    assert sorted(documents for _, _, documents in described(plan)) == [[2, 5], [6, 8], [7], [9]]
    assert sorted(group.ranks for group in plan.groups) == [(0,), (0,), (1,), (1,)]
    tokens = plan.tokens_per_rank(2).sum(axis=1)
    assert sorted(tokens) == [16, 21]


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


def test_flexible_cp_by_hand():
    """20 needs 3 ranks of 8, with room for 4; 8 fills one; 5 and 3 share one. The sixth goes to the slowest, 20."""
    plan = any_degree(lengths_of(20, 8, 5, 4, 3), ranks(6, capacity=8, window=32))
    assert described(plan) == [(0, (0, 1, 2, 3), [4, 20]), (0, (4,), [8]), (0, (5,), [3, 5])]
    assert not plan.barriers


def test_flexible_cp_runs_more_micro_batches_where_groups_of_whole_ranks_do_not_fit():
    """Three documents of 9 tokens need two ranks each, and there are four: 27 tokens of 32."""
    plan = any_degree(lengths_of(9, 9, 9), ranks(4, capacity=8, window=16))
    assert sorted((group.slot, len(group.ranks)) for group in plan.groups) == [(0, 2), (0, 2), (1, 4)]
    with pytest.raises(UserError, match="3 ranks of 8 tokens cannot hold a document of 25"):
        any_degree(lengths_of(25), ranks(3, capacity=8, window=32))


@settings(max_examples=examples(30))
@given(
    groups=st.lists(st.tuples(st.integers(1, 3), st.floats(0.1, 50)), min_size=1, max_size=4), more=st.integers(0, 5)
)
def test_ranks_given_to_the_slowest_group_are_what_the_published_dynamic_program_finds(groups, more):
    least, cost = zip(*groups, strict=True)
    fastest = {0: 0.0}  # seconds of the slowest group so far, by ranks used
    for fewest, seconds in groups:
        options = [
            (used + size, max(slowest, seconds / size))
            for used, slowest in fastest.items()
            for size in range(fewest, fewest + more + 1)
        ]
        fastest = {used: min(slow for other, slow in options if other == used) for used, _ in options}
    sizes = shared_out(least, cost, sum(least) + more)
    assert sum(sizes) == sum(least) + more
    assert all(size >= fewest for size, fewest in zip(sizes, least, strict=True))
    slowest = max(seconds / size for seconds, size in zip(cost, sizes, strict=True))
    assert slowest == pytest.approx(min(slow for used, slow in fastest.items() if used <= sum(least) + more))


def test_odc_balances_the_step_and_lets_ranks_run_different_numbers_of_micro_batches():
    """4096 weighs as much as eight times 600, which do not fit one micro-batch."""
    plan = minibatch_balanced(lengths_of(4096, *[600] * 8), ranks(2, capacity=4096, window=4096))
    assert described(plan) == [(0, (0,), [4096]), (0, (1,), [600] * 4), (1, (1,), [600] * 4)]
    assert plan.fetches_weights


@settings(max_examples=examples(5))
@given(lengths=DOCUMENTS)
def test_hbp_packs_every_document_once_to_the_least_level_that_holds_it_or_fills_a_longer_one(lengths):
    levels = (2048, 8192, WINDOW)
    packed = filled(lengths, levels)
    assert sorted(d for packs in packed for pack in packs for d in pack) == [*range(len(lengths))]
    for level, below, packs in zip(levels, (0, *levels), packed, strict=False):
        assert all(lengths[pack].sum() <= level and lengths[pack].max() > below for pack in packs)


def test_hbp_by_hand():
    """To 16: 12 alone, 7 and 6 together. 4 fills the first, 3 the second, and 2 is left for a rank alone."""
    levels = (4, 16)
    lengths = lengths_of(12, 7, 6, 4, 3, 2)
    assert filled(lengths, levels) == [[[5]], [[0, 3], [1, 2, 4]]]
    few = ranks(4, capacity=8, window=16)
    trial = PackingLevels(levels, (replace(few, capacity=4), few))
    (short, _), (long, plan) = trial.plans(lengths)
    assert (short.capacity, long.capacity) == (4, 8)
    assert {len(group.ranks) for group in plan.groups} == {2}
