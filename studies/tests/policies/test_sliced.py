"""Pipelines of slices: every token once, lists that run, published cases by hand, and no price below the work."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.tests.policies.ranks import DOCUMENTS, WINDOW, lengths_of
from tests.limits import examples
from tests.simulate.jobs import SHAPE
from wlb.job.job import Job
from wlb.job.memory.walk import predict_memory
from wlb.schedules.operations import FORWARD, INPUT, WEIGHT, rank_operations
from wlb.schedules.timing import pipeline_times
from wlb.simulate import simulated_job
from wlb.simulate.decide import Packed
from wlb.simulate.search import least_seconds
from wlb.workload.base import Checkpointing
from wlb_studies.policies import POLICIES
from wlb_studies.policies.chunkflow import equal_chunks
from wlb_studies.policies.infinipipe import equal_seconds
from wlb_studies.policies.plan import Group, GroupPlan, Ranks
from wlb_studies.policies.pricing import price as price_of_groups
from wlb_studies.policies.seq1f1b import even_slices
from wlb_studies.policies.sliced import (
    Piece,
    SlicedPlan,
    SlicedPolicy,
    SlicedTrial,
    cut_at,
    even_cuts,
    one_forward_one_backward,
    price,
)
from wlb_studies.policies.slimpack import asymmetric_units
from wlb_studies.policies.slimpipe import uniform_slices

SLICED = {name: policy for name, policy in POLICIES.items() if isinstance(policy, SlicedPolicy)}
COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=9)
STAGES = [(2, 1), (4, 1), (2, 2), (4, 2), (8, 4)]


def job_of(pp: int = 2, dp: int = 2, cp: int = 2, window: int = WINDOW, **layout: Any) -> Job:
    return simulated_job(SHAPE, window, "fixed-4d", pp=pp, dp=dp, cp=cp, **layout)


def tokens(plan: SlicedPlan) -> list[list[int]]:
    """Of the micro-batches of every sequence, column after column."""
    return [[sum(p.stop - p.start for p in s) for s in one] for column in plan.columns for one in column]


@pytest.mark.parametrize("name", SLICED)
@settings(max_examples=examples(5))
@given(lengths=DOCUMENTS)
def test_every_token_is_in_one_micro_batch_and_the_slices_of_a_document_follow_each_other(name, lengths):
    for setting in SLICED[name].settings:
        plan = SLICED[name].plan(lengths, job_of(), **setting)
        assert len(plan.columns) == 2
        for columns in (plan.columns, plan.backward or plan.columns):
            found: dict[int, list[tuple[int, int]]] = {}
            for sequence in chain.from_iterable(columns):
                within = [piece for slice_ in sequence for piece in slice_]
                assert all(not piece.start for slice_ in sequence for piece in slice_[1:])
                for document, start, stop in within:
                    found.setdefault(document, []).append((start, stop))
                documents = [piece.document for piece in within]
                assert all(documents.count(d) == len(found[d]) for d in documents)  # no other sequence has a part
            assert sorted(found) == [*range(len(lengths))]
            for document, pieces in found.items():
                assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
                assert pieces[-1][1] == lengths[document]
        assert sorted(plan.trained) == sorted(lengths)


@pytest.mark.parametrize(("pp", "virtual_pp"), STAGES)
@settings(max_examples=examples(20))
@given(counts=COUNTS, split=st.booleans())
def test_lists_run_all_operations_once_without_a_circle_last_slice_first(pp, virtual_pp, counts, split):
    counts = (*counts, *[1] * max(0, pp - sum(counts)))
    stages, number = pp * virtual_pp, sum(counts)
    lists = one_forward_one_backward(counts, pp, stages, split=split)
    assert len({*chain.from_iterable(lists)}) == sum(map(len, lists)) == (3 if split else 2) * stages * number
    seconds = np.ones((stages, number))
    times = pipeline_times(lists, seconds, seconds, seconds)  # raises where it is stuck
    ends = {operation: float(end) for operation, end in zip(times.operations, times.ends, strict=True)}
    for first, last in zip((0, *accumulate(counts)), accumulate(counts), strict=False):
        backwards = [one for one in ends if one.stage == 0 and one.kind not in (FORWARD, WEIGHT)]
        mine = sorted((one for one in backwards if first <= one.micro_batch < last), key=ends.__getitem__)
        assert [one.micro_batch for one in mine] == [*range(last - 1, first - 1, -1)]


@pytest.mark.parametrize(("pp", "virtual_pp"), STAGES)
def test_whole_sequences_run_in_the_named_schedules(pp, virtual_pp):
    named = rank_operations("auto", pp, 3 * pp, virtual_pp)
    assert one_forward_one_backward((1,) * 3 * pp, pp, pp * virtual_pp) == named


@pytest.mark.parametrize(("virtual_pp", "least"), [(1, (4, 3, 2, 1)), (2, (11, 9, 7, 5))])
def test_seq1f1b_warms_up_with_one_forward_less_than_slices_more(virtual_pp, least):
    """As ``schedules.py`` of thunlp/Seq1F1B: p - r - 1 + k - 1, or (v - 1) p + 2 (p - r - 1) + k - 1; and one more."""
    for slices in (1, 2, 4):
        lists = one_forward_one_backward((slices,) * 8, 4, 4 * virtual_pp)
        before = tuple(next(at for at, one in enumerate(of_rank) if one.kind != FORWARD) for of_rank in lists)
        assert before == tuple(count + slices - 1 for count in least)


def test_a_split_backward_leaves_the_weights_of_later_ranks_for_the_end():
    lists = one_forward_one_backward((1,) * 4, 2, 2, split=True)
    assert "".join(one.kind for one in lists[0]) == "FFIWFIWFIWIW"
    assert "".join(one.kind for one in lists[1]) == "FIFIWFIWFIWW"
    assert {one.kind for one in lists[0]} == {FORWARD, INPUT, WEIGHT}


def test_cuts_by_hand():
    """Four slices of equal tokens; or of equal work, where that grows as the square: half of it is over at .71."""
    assert even_cuts(1024, 4) == [0, 256, 512, 768, 1024]
    assert even_cuts(12_800, 2, lambda n: n.astype(np.float64) ** 2) == [0, 9088, 12_800]
    assert even_cuts(100, 4) == [0, 100]
    assert cut_at([1, 0], lengths_of(300, 200), [0, 250, 500]) == [
        [Piece(1, 0, 200), Piece(0, 0, 50)],
        [Piece(0, 50, 300)],
    ]


def test_policies_by_hand():
    """Windows of 16,384 tokens, 2 pipelines of 2 ranks."""
    lengths = lengths_of(WINDOW, 9000, 4000, 3000, 384)
    job = job_of()
    assert tokens(even_slices(lengths, job, 4, "tokens")) == [[4096] * 4] * 2
    first, second = tokens(even_slices(lengths, job, 2, "work"))[0]
    assert 0.5 * WINDOW < first < 0.71 * WINDOW  # even tokens, even attention
    assert first + second == WINDOW
    assert tokens(uniform_slices(lengths, job, 1)) == [[WINDOW // 2] * 2] * 2
    chunks = sorted(tokens(equal_chunks(lengths, job, 4, 1)))
    assert chunks == [[3384], [4000], [4096] * 2 + [808], [4096] * 4]
    (column,) = equal_seconds(lengths, job_of(dp=1), 8).columns  # 16 chunks, and one more at most
    until = job.costs.document_seconds
    seconds = [sum(float(until(p.stop) - until(p.start)) for p in slice_) for one in column for slice_ in one]
    assert len(seconds) <= 17
    assert max(seconds) < 1.15 * sum(seconds) / 16  # slices begin at multiples of 128 tokens
    assert len(column[0]) > len(column[1]) > 1
    units = asymmetric_units(lengths, job, 3)
    assert [sum(map(len, column)) for column in (*units.columns, *(units.backward or ()))] == [6] * 4


def test_an_unsliced_plan_takes_and_holds_what_other_code_says():
    """Four micro-batches of a pipeline of two ranks, as groups of a ``GroupPlan`` are priced."""
    lengths = lengths_of(6000, 4000, 2000, 8000)
    job = job_of(dp=1, cp=1, micro_batches=2)
    plan = SlicedPlan(lengths, [[[[Piece(d, 0, int(lengths[d]))]] for d in range(4)]])
    groups = GroupPlan(lengths, tuple(Group(d, (0,), (d,)) for d in range(4)))
    mine, other = price(plan, job), price_of_groups(groups, Ranks(job, 8000))
    assert mine.seconds == pytest.approx(other.seconds, rel=1e-6)
    even = replace(plan, lengths=lengths_of(*[6000] * 4), columns=[[[[Piece(d, 0, 6000)]] for d in range(4)]])
    assert price(even, job).memory_bytes == pytest.approx(predict_memory(job, [6000] * 8).total, rel=0.02)
    for kind in get_args(Checkpointing):
        own = replace(job, activation_checkpointing=kind)
        assert price(plan, own).memory_bytes == pytest.approx(predict_memory(own, [*lengths]).total, rel=0.05)


def test_chunks_that_keep_nothing_hold_less_and_take_longer():
    lengths = lengths_of(*[WINDOW] * 4)
    job = job_of(dp=1, cp=1)
    all_kept, last_kept = (price(equal_chunks(lengths, job, 8, keeps), job) for keeps in (8, 1))
    assert last_kept.memory_bytes < 0.7 * all_kept.memory_bytes
    assert last_kept.seconds > 1.1 * all_kept.seconds


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("kind", ["none", "keep_attention"])
def test_ranks_recompute_what_their_memory_does_not_hold_and_no_more(kind: Checkpointing, cp: int):
    lengths, job = lengths_of(*[131_072] * 8), job_of(dp=1, cp=cp, window=131_072)
    job = replace(job, hardware=replace(job.hardware, memory_bytes=1e12), activation_checkpointing=kind)
    plan = even_slices(lengths, job, 4, "work")
    roomy, all_of_it = (price(plan, one) for one in (job, replace(job, activation_checkpointing="full")))
    for share in (0.2, 0.8):
        needed = share * roomy.memory_bytes + (1 - share) * all_of_it.memory_bytes
        reserved = 0.9 * job.hardware.memory_bytes - job.memory_limit.number_of_bytes
        small = replace(job, hardware=replace(job.hardware, memory_bytes=(needed + reserved) / 0.9))
        tight, limit = price(plan, small), small.memory_limit.number_of_bytes
        assert 0.99 * limit < tight.memory_bytes <= limit
        assert roomy.seconds < tight.seconds < all_of_it.seconds


@pytest.mark.parametrize("virtual_pp", [1, 2])
@pytest.mark.parametrize("name", SLICED)
@settings(max_examples=examples(3))
@given(lengths=DOCUMENTS)
def test_no_plan_takes_less_than_its_work_spread_evenly(name, virtual_pp, lengths):
    job = job_of(virtual_pp=virtual_pp)
    alone = replace(job.layout, pp=1, virtual_pp=1, dp=job.layout.dp * job.layout.pp, stage_blocks=None)
    packing = job.packing.changed(global_batch=alone.dp)
    least = least_seconds(replace(job, layout=alone, packing=packing), [Packed([lengths])])
    for setting in SLICED[name].settings:
        assert SlicedTrial(job, SLICED[name].plan, tuple(setting.items())).step(lengths).price.seconds > least


def test_exchanging_evens_out_the_slices_of_a_sequence_and_the_head_may_be_spread():
    lengths, job = lengths_of(*[WINDOW] * 4), job_of(dp=1, cp=1, stage_blocks=(4, 4))
    even = uniform_slices(lengths, job, 2)
    assert price(even, job).seconds < price(replace(even, exchanges=False), job).seconds
    assert price(even, job).seconds < price(uniform_slices(lengths, job, 2, spreads_head=False), job).seconds


def test_columns_are_filled_with_empty_micro_batches():
    lengths = lengths_of(4096, 4096, 4096)
    pieces: Sequence[Sequence[Sequence[Piece]]] = [[[Piece(d, 0, 4096)]] for d in range(3)]
    job = job_of(cp=1)
    uneven, alone = (
        price(SlicedPlan(lengths, [pieces[:2], pieces[2:]]), job),
        price(SlicedPlan(lengths, [pieces]), job_of(dp=1, cp=1)),
    )
    assert uneven.seconds < alone.seconds
