"""Whatever arrives, however it is batched: every prompt is prefilled once, in order, within budget; none starves."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from wlb.errors import UserError
from wlb.workload import make_workload
from wlb_studies.serving.batching import METHODS, Chunk, PrefillPlanner, Prompt, poisson_arrivals
from wlb_studies.serving.job import PrefillJob
from wlb_studies.serving.policies import batched
from wlb_studies.serving.prefill import PrefillRun, capacity, simulate_prefill
from wlb_studies.serving.result import prefill_result

WORKLOAD = make_workload("tiny", "cpu")
BUDGET = 1024


def served(lengths: Any, arrivals: Any, planner: PrefillPlanner, **ranks: Any) -> PrefillRun:
    return simulate_prefill(PrefillJob(lengths, arrivals, WORKLOAD, BUDGET, **ranks), planner)


@st.composite
def queues(draw):
    """Prompts, arrivals, planner, ranks."""
    chunked = draw(st.booleans())
    longest = 8 * BUDGET if chunked else BUDGET
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=40))
    gaps = draw(st.lists(st.floats(0, 0.5), min_size=len(lengths), max_size=len(lengths)))
    planner = PrefillPlanner(
        WORKLOAD,
        BUDGET,
        draw(st.sampled_from(METHODS)),
        chunked,
        prompts_per_batch=draw(st.integers(1, 5)),
        max_rounds=draw(st.integers(1, 10)),
    )
    ranks = {"dp": draw(st.integers(1, 4)), "pp": draw(st.integers(1, 3)), "lock_step": draw(st.booleans())}
    return np.array(lengths), np.cumsum(gaps), planner, ranks


def first_passes(run: PrefillRun) -> dict[int, int]:
    """The pass in which each prompt finishes."""
    return {chunk.prompt: n for n, each in enumerate(run.passes) for batch in each.batches for chunk in batch}


@settings(max_examples=examples(75), deadline=None)
@given(queues())
def test_every_prompt_is_prefilled_once_in_order_on_one_rank(queue):
    lengths, arrivals, planner, ranks = queue
    finished: list[int] = []
    job = PrefillJob(lengths, arrivals, WORKLOAD, BUDGET, **ranks)
    run = simulate_prefill(job, planner, on_progress=finished.append)
    assert sum(finished) == len(lengths)
    done = [0] * len(lengths)
    places: list[set[tuple[int, int]]] = [set() for _ in lengths]
    for each in run.passes:
        assert any(each.batches)
        for rank, batch in enumerate(each.batches):
            assert sum(stop - start for _, start, stop in batch) <= BUDGET
            if planner.method == "count":
                assert len(batch) <= planner.prompts_per_batch
            for prompt, start, stop in batch:
                assert arrivals[prompt] <= each.start
                assert start == done[prompt] < stop
                done[prompt] = stop
                places[prompt].add((each.engine, rank))
    assert done == lengths.tolist()
    assert {len(place) for place in places} == {1}
    if not planner.chunked:
        assert all(start == 0 for each in run.passes for batch in each.batches for _, start, _ in batch)


@settings(max_examples=examples(50), deadline=None)
@given(queues())
def test_time_to_first_token_is_when_the_last_chunk_leaves(queue):
    lengths, arrivals, planner, ranks = queue
    run = served(lengths, arrivals, planner, **ranks)
    last = first_passes(run)
    ends = np.array([run.passes[last[prompt]].end for prompt in range(len(lengths))])
    np.testing.assert_allclose(run.first_token_seconds, ends - arrivals)
    alone = [planner.batch_seconds([Chunk(0, 0, length)]) for length in lengths.tolist()]
    if not planner.chunked:  # a chunk's last tile may make the sum of chunks dearer, never cheaper
        assert np.all(run.first_token_seconds >= np.array(alone) * (1 - 1e-9))
    for engine in {each.engine for each in run.passes}:
        starts = [each.start for each in run.passes if each.engine == engine]
        ends_of_first_stage = [
            each.start + each.seconds.max() / ranks["pp"] for each in run.passes if each.engine == engine
        ]
        assert all(a <= b + 1e-9 for a, b in zip(ends_of_first_stage, starts[1:], strict=False))


@settings(max_examples=examples(75), deadline=None)
@given(queues())
def test_the_oldest_prompt_is_never_passed_over(queue):
    lengths, arrivals, planner, ranks = queue
    ranks["lock_step"] = True
    run = served(lengths, arrivals, planner, **ranks)
    finished = first_passes(run)
    for n, each in enumerate(run.passes):
        waiting = [p for p in range(len(lengths)) if arrivals[p] <= each.start and finished[p] >= n]
        if planner.method == "workload:shortest":
            seen = {p: sum(arrivals[p] <= earlier.start for earlier in run.passes[:n]) for p in waiting}
            waiting = [p for p in waiting if seen[p] >= planner.max_rounds]
        if waiting:
            assert waiting[0] in {chunk.prompt for batch in each.batches for chunk in batch}


@settings(max_examples=examples(50), deadline=None)
@given(queues())
def test_chunks_cut_by_workload_take_no_longer_than_a_whole_budget(queue):
    lengths, arrivals, planner, ranks = queue
    if not (planner.method.startswith("workload") and planner.chunked):
        return
    budget = planner.batch_seconds([Chunk(0, 0, BUDGET)])
    for each in served(lengths, arrivals, planner, **ranks).passes:
        for batch, seconds in zip(each.batches, each.seconds, strict=True):
            first_tile = len(batch) == 1 and batch[0].stop - batch[0].start <= 128
            assert seconds <= budget * (1 + 1e-9) or first_tile


def test_a_single_rank_that_never_idles_gains_no_throughput():
    lengths = np.array([100, 1000, 40, 700, 900, 20] * 10)
    arrivals = np.zeros(len(lengths))
    total = WORKLOAD.attention_seconds(lengths, "forward").sum() + WORKLOAD.linear_seconds(lengths.sum(), "forward")
    for method in METHODS:
        planner = PrefillPlanner(WORKLOAD, BUDGET, method, chunked=False)
        run = served(lengths, arrivals, planner)
        assert run.seconds == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("chunked", [True, False])
def test_ranks_in_lock_step_gain_where_lengths_differ(chunked):
    random = np.random.default_rng(0)
    lengths = np.clip(random.pareto(1.0, 300) * 100, 10, 16 * BUDGET if chunked else BUDGET).astype(np.int64)
    job = PrefillJob(lengths, np.zeros(len(lengths)), WORKLOAD, BUDGET, dp=8, chunked=chunked)
    rows = {method: prefill_result(method, batched(method, job), job) for method in METHODS}
    assert rows["workload"].busy > rows["tokens"].busy
    assert rows["workload"].tokens_per_second > rows["tokens"].tokens_per_second
    assert rows["workload:shortest"].mean_seconds < rows["tokens"].mean_seconds
    assert all(row.p50_seconds <= row.p95_seconds <= row.p99_seconds <= row.longest_seconds for row in rows.values())


def test_a_pipeline_overlaps_passes():
    lengths, arrivals = np.full(20, BUDGET), np.zeros(20)
    planner = PrefillPlanner(WORKLOAD, BUDGET, "tokens")
    pass_seconds = planner.batch_seconds([Chunk(0, 0, BUDGET)])
    run = served(lengths, arrivals, planner, pp=4)
    assert run.seconds == pytest.approx((20 + 4 - 1) * pass_seconds / 4)


def test_arrivals_follow_the_seed_and_the_rate():
    arrivals = poisson_arrivals(20_000, 5.0, seed=1)
    assert np.array_equal(arrivals, poisson_arrivals(20_000, 5.0, seed=1))
    assert not np.array_equal(arrivals, poisson_arrivals(20_000, 5.0, seed=2))
    assert np.all(np.diff(arrivals) >= 0)
    assert arrivals[-1] == pytest.approx(20_000 / 5, rel=0.03)


def test_capacity_is_what_full_passes_reach():
    lengths = np.full(64, BUDGET)
    planner = PrefillPlanner(WORKLOAD, BUDGET, "tokens")
    run = served(lengths, np.zeros(64), planner, dp=4)
    assert 64 / run.seconds == pytest.approx(capacity(lengths, planner, 4))


def test_mistakes_name_value_and_remedy():
    with pytest.raises(UserError, match=r"prompt 7 has 2000 tokens, over the token budget 1024.*chunked prefill"):
        PrefillPlanner(WORKLOAD, BUDGET, chunked=False).plan([Prompt(3, 10), Prompt(7, 2000)])
    with pytest.raises(UserError, match="prefill method 'best' is unknown"):
        PrefillPlanner(WORKLOAD, BUDGET, "best")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="token_budget = 0"):
        PrefillPlanner(WORKLOAD, 0)
    with pytest.raises(UserError, match="no prompts"):
        served(np.array([], np.int64), np.array([]), PrefillPlanner(WORKLOAD, BUDGET))
    with pytest.raises(UserError, match="arrival rate must be positive, got 0"):
        poisson_arrivals(3, 0.0)
    assert PrefillPlanner(WORKLOAD, BUDGET).plan([], 2) == [[], []]


def test_the_work_of_planning_does_not_grow_with_ranks_times_prompts() -> None:
    """A prompt is priced for the rank that takes it, not for every one that could."""

    class Counted:
        asked = 0

        def __getattr__(self, name: str) -> Any:
            self.asked += 1
            return getattr(WORKLOAD, name)

    waiting = [Prompt(number, 100) for number in range(200)]
    for method in METHODS:
        workload: Any = Counted()
        batches = PrefillPlanner(workload, BUDGET, method).plan(waiting, 200)
        assert [len(batch) for batch in batches] == [1] * 200
        assert workload.asked < 5 * 200
