"""The largest L_max that fits the memory, of jobs with and without a bound on a step's documents."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from wlb.documents.lengths import read_lengths
from wlb.job.job import MemoryLimit
from wlb.job.memory.fit import HELD, fits, largest_factor, most_in_flight, predicted_memory, starving
from wlb.job.memory.layers import LayerMemory, TokenMemory
from wlb.job.planner import StepPlanner
from wlb.simulate import simulated_job


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from(["balanced", "wlb-llm"]),
    st.sampled_from([{"dp": 2}, {"cp": 2}, {"pp": 2}, {"pp": 2, "virtual_pp": 2}]),
    st.integers(16, 4000),
    st.integers(2**22, 2**34),
)
def test_auto_is_the_largest_factor_that_fits(preset, layout, window, number_of_bytes):
    job = simulated_job("tiny", window, preset, **layout).with_length_factor("auto")
    job = replace(job, limit=MemoryLimit(number_of_bytes, "this test"))
    factor, most = largest_factor(job), job.packing.largest_auto_factor(job.step_micro_batches, job.global_batch)

    def fits_in_full(factor: float) -> bool:  # also planned lists, which hold less where memory is short
        roomy = replace(job.with_length_factor(factor), limit=MemoryLimit(1e18, "this test"))
        return bool(predicted_memory(roomy).total <= number_of_bytes)

    if factor is None:
        assert not fits_in_full(1.0)
        return
    assert 1 <= factor <= most
    assert factor * 64 == int(factor * 64)
    held = predicted_memory(job.with_length_factor(factor))
    assert fits(job.with_length_factor(factor))
    assert held.total <= number_of_bytes
    assert predicted_memory(job.with_length_factor(factor), limit=held.total - 1).total > held.total - 1
    assert factor == most or not fits_in_full(factor + 1 / 64)


@pytest.mark.parametrize("share", [0.5, 0.999, 1.0, 1.2, 10.0])
def test_of_pools_it_leaves_room_for_an_even_share(share):
    job = simulated_job("tiny", 4096, "balanced", dp=4, pp=2).with_pools("even", 2, 4)
    options, least = job.packing, job.least_length_factor
    needed = predicted_memory(job.with_length_factor(least)).total
    factor = largest_factor(replace(job, limit=MemoryLimit(share * needed, "this test")))
    assert (factor is None) == (share < 1)
    assert factor is None or least <= factor <= options.largest_auto_factor(job.step_micro_batches, job.global_batch)


@pytest.mark.parametrize("recomputing", ["none", "keep_attention"])
def test_planned_lists_hold_no_more_than_predicted_where_scores_are_most_of_it(recomputing):
    """The last pipeline rank holds scores of many micro-batches at once: of all slices of a document at least."""
    roomy = MemoryLimit(1e12, "this test")
    job = simulated_job(
        "llama3-8b", 131_072, activation_checkpointing=recomputing, pp=4, tp=4, virtual_pp=2, limit=roomy
    )
    job = replace(job, packing=job.packing.changed(global_batch=8)).with_pools("slices", 1, 16).with_length_factor(1.0)
    parts, leaves = predicted_memory(job).parts, [job.stage_blocks[stage] for stage in (3, 7)]
    predicted = sum(parts[name] for name in ("activations", "scores", "kept keys and values"))
    most = 0
    for plan in islice(StepPlanner(job, np.asarray(read_lengths("synthetic:3000:128K:5"))).plans(), 6):
        held = 0
        for stage, micro_batch, kind in plan.operations[0][3]:
            layers = LayerMemory(job, plan.ranks[0][micro_batch].tokens)
            units = [layers.block()] * leaves[stage // 4] + [layers.head()] * (stage == 7)
            held += {"F": 1, "I": 0}.get(kind, -1) * sum(unit.held for unit in units)
            most = max(most, held)
        assert held == 0
    assert 0.5 * predicted < most <= predicted


def test_planned_lists_hold_what_memory_allows():
    """Every rank keeps within its own limit, and a limit that holds a document alone is the least that fits."""
    job = simulated_job("llama3-8b", 131_072, activation_checkpointing="keep_attention", pp=4, tp=4, head="dealt")
    job = replace(job, packing=job.packing.changed(global_batch=8)).with_pools("slices", 1, 64).with_length_factor(0.25)
    in_full = predicted_memory(replace(job, limit=MemoryLimit(1e12, "this test"))).total
    documents, most = np.asarray(read_lengths("synthetic:3000:128K:5")), []
    for limit in (in_full, 0.9 * in_full, 0.82 * in_full):
        limited = replace(job, limit=MemoryLimit(limit, "this test"))
        assert fits(limited)
        assert predicted_memory(limited).total <= limit
        plan, held = next(StepPlanner(limited, documents).plans()), []
        for rank, operations in enumerate(plan.operations[0]):
            sizes = [job.stage_blocks[rank] * plan.ranks[0][one.micro_batch].tokens for one in operations]
            changes = [size * {"F": 1, "B": -1}.get(one.kind, 0) for size, one in zip(sizes, operations, strict=True)]
            held.append(np.cumsum(changes).max() * TokenMemory(job).of_block)
        most.append(max(held))
        beside = {*HELD, "kept keys and values", "fragments"}
        static = sum(value for name, value in predicted_memory(limited).parts.items() if name not in beside)
        assert max(held) + static <= 1.02 * limit
        assert predicted_memory(limited).parts["fragments"] == pytest.approx(
            0.04 / 1.04 * (predicted_memory(limited).total - static)
        )
    assert most[0] > most[1] > most[2]
    assert not fits(replace(job, limit=MemoryLimit(0.3 * in_full, "this test")))


def test_lists_starve_where_memory_holds_fewer_micro_batches_than_the_pipeline_has_ranks():
    job = simulated_job("llama3-8b", 131_072, activation_checkpointing="keep_attention", pp=8, tp=4, head="dealt")
    job = replace(job, packing=job.packing.changed(global_batch=16)).with_pools("slices", 1, 16)
    job = replace(job.with_length_factor(job.least_length_factor), limit=MemoryLimit(1e13, "this test"))
    short = replace(job, limit=MemoryLimit(0.6 * predicted_memory(job).total, "this test"))
    assert fits(short)
    assert starving(job) == 1
    in_flight = most_in_flight(short)[0] / (TokenMemory(short).stages[0] * 131_072)  # mean micro-batches
    assert starving(short) > 1.5
    assert starving(short) == pytest.approx(8 / in_flight)
