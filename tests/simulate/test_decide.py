"""Pools and their micro-batches, given or decided by simulation."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from wlb.documents.lengths import read_lengths
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.job.memory.fit import fits
from wlb.job.planner import StepPlanner
from wlb.packing.options import Grouping
from wlb.simulate import simulate, simulated_job
from wlb.simulate.decide import _LeastSeconds, decide
from wlb.simulate.rate import rate
from wlb.workload import hardware_preset, make_workload

WINDOW = 32_768
LENGTHS = read_lengths(f"synthetic:4000:{WINDOW}:0")


def balanced(**settings: Any) -> Job:
    sizes = {"tp": 8, "dp": 4, "cp": 2, "micro_batches": 2}
    return simulated_job("llama3-8b", WINDOW, "balanced", **(sizes | settings))


def test_pools_that_are_given_are_taken():
    job = decide(balanced(pool=4, packing={"rank_micro_batches": 6}), LENGTHS)
    assert (job.layout.dp, job.layout.cp, job.layout.pool, job.rank_micro_batches) == (4, 2, 4, 6)
    assert (job.step_micro_batches, job.global_batch, job.layout.world_size) == (12, 8, 64)
    assert job.pools_decided
    assert decide(job, LENGTHS) is job


def test_the_global_batch_stays_what_it_is():
    undecided = balanced(micro_batches=3)
    job = decide(undecided, LENGTHS)
    step = next(StepPlanner(job, LENGTHS).plans())
    assert abs(step.tokens - 12 * WINDOW) < WINDOW
    assert (job.layout.dp, job.layout.cp) == (4, 2)
    assert job == decide(undecided, LENGTHS)  # the same every time


@pytest.mark.parametrize(("window", "global_batch"), [(32_768, 128), (4096, 512)])
def test_pools_that_fit_are_taken_where_any_do(window: int, global_batch: int):
    """Level steps, and more than one micro-batch, hold whole gathered weights and gradients, which do not fit here."""
    packing = {"global_batch": global_batch}
    sizes: dict[str, Any] = {"tp": 1, "cp": 8, "dp": 32, "activation_checkpointing": "full"}
    job = simulated_job("llama3-70b", window, "balanced", packing=packing, **sizes)
    assert fits(decide(job, np.full(2 * global_batch * window // 4096, 4096)))


def test_no_document_waits_and_steps_are_of_one_size():
    found = simulate(balanced(pool=8, packing={"rank_micro_batches": 8}), LENGTHS, 12)
    assert found.token_delay == 0
    assert found.tokens_cv < 0.05
    assert {"token_delay", "tokens_cv", "layout"} < set(found.to_json())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pool": 3, "packing": {"rank_micro_batches": 2}}, "pool = 3 does not divide dp x cp = 8"),
        ({"pool": 8, "packing": {"rank_micro_batches": 3}, "pp": 4}, "rank_micro_batches = 3 cannot fill the pp = 4"),
        (
            {"pool": 8, "packing": {"rank_micro_batches": 4, "max_length_factor": 1.5}},
            "max_length_factor = 1.5 leaves no room for a global batch of 8 context windows in 4 micro-batches; give "
            "at least 2",
        ),
        (
            {"packing": {"rank_micro_batches": 65_536}},
            "rank_micro_batches = 65536 divides a global batch of 8 context windows into 65536 micro-batches, over "
            "512; lower it to 512",
        ),
        (
            {"dp": 128, "pool": 1, "packing": {"rank_micro_batches": 1, "global_batch": 1}},
            "into 256 micro-batches, over 64; raise parallel.pool or packing.global_batch",
        ),
    ],
)
def test_pools_that_cannot_run_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        decide(balanced(**settings), LENGTHS)


@pytest.mark.parametrize(
    ("global_batch", "settings"),
    [
        (640, {}),
        (2001, {"pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b"}),
        (640, {"pp": 4, "packing": {"rank_micro_batches": 700}}),
        pytest.param(65_536, {}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_large_global_batch_is_decided_on_by_a_part_of_it(global_batch, settings):
    packing = {"global_batch": global_batch, **settings.get("packing", {})}
    job = simulated_job("tiny", 64, "balanced", **({"dp": 2, "micro_batches": 4} | settings | {"packing": packing}))
    lengths = np.random.default_rng(0).integers(1, 65, 1000)
    decided = decide(job, lengths)
    assert decided.pools_decided
    assert decided.global_batch == global_batch
    assert decided.rank_micro_batches == packing.get("rank_micro_batches", decided.rank_micro_batches)
    step = next(StepPlanner(decided, lengths).plans())
    assert abs(step.tokens - global_batch * 64) < 64


def test_a_large_global_batch_keeps_the_l_max_that_is_given():
    packing = {"global_batch": 300, "max_length_factor": 1.0, "grouping": "even"}
    decided = decide(simulated_job("tiny", 64, "balanced", dp=8, packing=packing), np.full(1000, 60))
    assert (decided.packing.max_length_factor, decided.global_batch) == (1.0, 300)


def test_pools_of_a_pipeline_whose_weights_alone_do_not_fit_are_decided_too():
    packing = {"global_batch": 8, "grouping": "even", "max_length_factor": 1.0}
    job = simulated_job("llama3-70b", 2048, "balanced", pp=2, activation_checkpointing="full", packing=packing)
    assert not fits(decide(job, np.full(100, 2048)))  # and a job says what it lacks


def test_prices_that_level_steps_cannot_use_leave_them_out():
    job = simulated_job("tiny", 64, "balanced", dp=4, packed_by=make_workload("tiny"))
    assert decide(job, np.full(1000, 60)).packing.grouping == "even"


def test_so_many_documents_that_a_step_would_take_minutes_are_refused():
    job = simulated_job("tiny", 2**31 - 1, "plain-4d")
    said = r"1 context windows of 2147483647 tokens .* some 2147483647 of these .* lower"
    with pytest.raises(UserError, match=said):
        StepPlanner(job, np.ones(1000, np.int64))
    with pytest.raises(UserError, match=said):
        decide(simulated_job("tiny", 2**31 - 1, "balanced"), np.ones(1000, np.int64))


GROUPINGS: tuple[Grouping, ...] = ("even", "slices")


def all_choices(job: Job, lengths: np.ndarray) -> list[Job]:
    """The job with every size of pools, number of micro-batches and grouping, found without ``decide``'s search."""
    found = []
    for size in (size for size in range(1, job.layout.dp_cp + 1) if job.layout.dp_cp % size == 0):
        for count in range(1, 2 * job.global_batch * size // job.layout.dp_cp + 1):
            for grouping in GROUPINGS:
                with suppress(UserError):
                    found.append(decide(job.with_pools(grouping, size, count), lengths))
    return found


# `make test` tries two random jobs, `make test-all` six.
@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2, 4, 5))])
def test_pools_fit_wherever_any_do_and_hardly_any_are_faster(seed: int):
    """Other numbers of micro-batches, and whole documents in pools of another size, are up to 6% faster."""
    random = np.random.default_rng(seed)
    hardware = replace(hardware_preset("h100"), memory_bytes=float(random.choice([6e9, 12e9, 40e9])))
    pp, dp = int(random.choice([1, 2])), int(random.choice([2, 4]))
    packing = {"global_batch": int(random.choice([4, 8]))}
    job = simulated_job("550m", 8192, "balanced", hardware=hardware, dp=dp, pp=pp, tp=2, packing=packing)
    lengths = sample_lengths(600, 8192, seed, median_fraction=float(random.choice([1 / 64, 1 / 4])))
    choices = all_choices(job, lengths)
    found = decide(job, lengths)
    assert fits(found) == any(map(fits, choices))
    rates = [rate(one, lengths, 4, job.work_prices).work_rate for one in choices if fits(one)]
    assert not rates or rate(found, lengths, 4, job.work_prices).work_rate >= 0.94 * max(rates)


@pytest.mark.parametrize("head", ["dealt", "last"])
def test_a_pipeline_takes_at_least_as_long_as_its_busiest_rank(head):
    def least(*blocks: int) -> float:
        one = balanced(tp=1, cp=1, dp=2, pp=2, head=head, stage_blocks=blocks, micro_batches=8)
        one = one.with_pools("slices", 1, 16)
        return _LeastSeconds(one, LENGTHS).of(one)

    even, half_more = least(16, 16), least(8, 24)
    if head == "dealt":  # no rank has more than the mean of blocks and head
        assert even == pytest.approx(least(15, 17), rel=0.01)
        assert 1.3 < half_more / even < 1.5
    else:
        assert half_more > 1.3 * even > 1.3 * least(17, 15)


def test_grouping_is_decided_where_pools_are_given():
    job = simulated_job("tiny", WINDOW, pp=2, micro_batches=4, packing={"rank_micro_batches": 4}, head="last")
    job = replace(job, layout=replace(job.layout, pool=1))
    assert not job.pools_decided
    decided = decide(job, np.full(100, WINDOW))
    assert (decided.rank_micro_batches, decided.packing.grouping) == (4, "slices")


@pytest.mark.parametrize("layout", [{}, {"pp": 2, "schedule": "1f1b"}])
def test_slices_without_planned_lists_are_refused(layout):
    with pytest.raises(UserError, match="needs pp of at least 2 and schedule = 'planned'"):
        decide(simulated_job("tiny", 512, micro_batches=4, packing={"grouping": "slices"}, **layout), np.full(100, 512))
