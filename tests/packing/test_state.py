"""A packer restored from its state continues as the original would have, at any point and in any packer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.streams import (
    METHODS,
    SETTINGS,
    WORKLOADS,
    coverage,
    packer_for,
    packings,
    segments_of,
    streams,
    through_json,
    whole_documents,
)
from wlb.errors import UserError
from wlb.packing.options import PackingOptions
from wlb.packing.packer import held_segments
from wlb.packing.registry import make_packer


@pytest.mark.parametrize("method", METHODS)
@SETTINGS
@given(st.data())
def test_continues_identically_from_any_point(method, data):
    stream = data.draw(streams(methods=(method,)))
    lengths = stream[2]
    cut = data.draw(st.integers(0, len(lengths)))
    original = packer_for(stream)
    original.plan(lengths[:cut])
    state = original.state_dict()
    assert through_json(state) == state
    used = packer_for(stream)
    used.plan(lengths[: data.draw(st.integers(0, len(lengths)))])
    expected = None
    for packer in (original, packer_for(stream), used):
        if packer is not original:
            packer.load_state_dict(through_json(state))
            assert packer.state_dict() == state
        outcome = packer.plan(lengths[cut:]), packer.state_dict(), packer.drain()
        assert expected in (None, outcome)
        expected = outcome


@SETTINGS
@given(streams(methods=("sequential",)), st.integers(0, 5))
def test_steps_that_are_taken_back_are_planned_again(stream, kept):
    packer = packer_for(stream)
    plans = packer.plan(stream[2])
    state = packer.state_dict()
    packer.take_back(plans[kept:])
    again = packer.plan(())
    assert again == plans[kept:]
    assert packer.state_dict() == state


@SETTINGS
@given(streams(), packings(methods=("sequential",)))
def test_another_method_begins_with_what_was_held_oldest_first(stream, other):
    packer = packer_for(stream)
    plans = packer.plan(stream[2])
    state = through_json(packer.state_dict())
    held = held_segments(state)
    assert sorted(held) == sorted(packer.pending)
    ages = {tuple(row[:3]): row[3] for row in (*state.get("carried", ()), *state.get("waiting", ()))}
    arrivals = [ages.get(segment, len(plans)) for segment in held]
    assert arrivals == sorted(arrivals)
    successor = make_packer("sequential", **other[1])
    successor.begin_with(held, step=len(plans))
    assert successor.pending == held
    rest = successor.drain()
    assert [plan.step for plan in plans + rest] == list(range(len(plans) + len(rest)))
    assert coverage(segments_of(plans + rest)) == coverage(whole_documents(stream[2]))


def test_queues_that_are_merged_stay_in_order_of_arrival():
    def packer(*thresholds):
        return make_packer(
            "variable_length",
            micro_batches=4,
            context_window=16,
            workload=WORKLOADS["7b"],
            outlier_thresholds=thresholds,
        )

    two, one = packer(4, 8), packer(4)
    two.plan([16, *[1] * 50, 5, *[1] * 64, 16, *[1] * 64, 5, *[1] * 64])
    one.load_state_dict(two.state_dict())
    before, after = ([row[3] for row in p.state_dict()["waiting"]] for p in (two, one))
    assert before == [1, 3, 0, 2]
    assert after == [0, 1, 2, 3]


def test_a_drain_after_shrinking_keeps_to_the_window():
    large, small = (
        make_packer("sequential", micro_batches=n, context_window=8, workload=WORKLOADS["7b"]) for n in (9, 2)
    )
    large.plan([13, 13, 13])
    small.load_state_dict(large.state_dict())
    plans = small.drain()
    assert [[m.tokens for m in plan.micro_batches] for plan in plans] == [[8, 8], [8, 8], [4, 3]]


@pytest.mark.parametrize("thresholds", [(5,), ()])
def test_a_state_with_documents_that_no_longer_fit_is_refused(thresholds):
    def packer(window):
        return make_packer(
            "variable_length",
            micro_batches=6,
            context_window=window,
            workload=WORKLOADS["7b"],
            outlier_thresholds=thresholds,
        )

    large = packer(24)
    large.plan([(77, 20), (78, 20)])
    with pytest.raises(UserError, match=r"document 77 has 20 tokens, over the context window of 8; .*split_overlong"):
        packer(8).load_state_dict(through_json(large.state_dict()))


@pytest.mark.parametrize("saved", METHODS)
@pytest.mark.parametrize("loaded", METHODS)
def test_only_the_same_method_and_format_is_read(saved, loaded):
    options = {"micro_batches": 2, "context_window": 8, "workload": WORKLOADS["7b"]}
    state = make_packer(saved, **options).state_dict()
    packer = make_packer(loaded, **options)
    if saved != loaded:
        with pytest.raises(UserError, match=f"saved by '{saved}' .* a '{saved}' packer") as error:
            packer.load_state_dict(state)
        assert "\n" not in str(error.value)
    for wrong in (state | {"format": 0}, {}):
        with pytest.raises(UserError, match="packer state has format"):
            packer.load_state_dict(wrong)


def test_a_job_keeps_to_the_options_that_decide_its_steps():
    """Not to how they are said, nor to those that only place documents within a step."""

    def identity(method, context_window=4096, **options):
        return PackingOptions(method=method, **options).identity(context_window)

    usual = identity("variable_length")
    assert usual == identity("variable_length", outlier_thresholds=(768, 2304))
    assert usual != identity("variable_length", outlier_thresholds=(768,))
    assert usual != identity("variable_length", 8192)
    assert identity("fixed_greedy", window=2) != identity("fixed_greedy")
    sizes = {"max_length_factor": 3.0, "global_batch": 8, "rank_micro_batches": 2, "grouping": "even"}
    assert identity("balanced", **sizes) == identity("balanced")
