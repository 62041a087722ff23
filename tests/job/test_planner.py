"""Steps hold every document once, and planning goes on from any step as if it had never stopped."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.limits import examples
from wlb.documents.order import DocumentStream
from wlb.documents.permutation import Permutation
from wlb.job.config import DataConfig, PackingConfig
from wlb.job.job import Job
from wlb.job.planner import PlannedStep, StepPlanner, waiting_in
from wlb.packing import options, slices
from wlb.packing.options import Grouping
from wlb.schedules.layout import Layout
from wlb.workload import hardware_preset, model_shape

WINDOW = 32
METHODS = ("sequential", "fixed_greedy", "variable_length", "balanced")


def planner_of(
    lengths: list[int],
    method: str,
    *,
    one_epoch: bool,
    dp: int = 1,
    window_tokens: int = WINDOW,
    overlong: str = "split",
    **packing: Any,
) -> StepPlanner:
    """One with the options in ``packing`` that the method reads."""
    data = DataConfig.model_validate(
        {"store": "unused", "context_window": window_tokens, "seed": 4, "overlong": overlong}
    )
    given = {"outlier_thresholds": [8, 16]} | packing
    unread = {option for read in options.METHODS.values() for option in read} - options.METHODS[method].keys()
    read = {name: value for name, value in given.items() if name not in unread}
    config = PackingConfig.model_validate({"method": method, "global_batch": 4} | read)
    job = Job(model_shape("tiny"), hardware_preset("h100"), config, data=data, layout=Layout(dp=dp, pp=2))
    return StepPlanner(job, np.array(lengths, dtype=np.int64), epochs=1 if one_epoch else None)


class Divided(NamedTuple):
    """How a job of four windows a step is divided; ``spare`` is the room of a micro-batch beside its even share."""

    number: int
    size: int
    micro_batches: int
    grouping: Grouping
    spare: int = 1  # windows: no document can fail to find room

    def planner(self, lengths: list[int]) -> StepPlanner:
        packing = PackingConfig.model_validate({"method": "balanced", "global_batch": 4})
        data = DataConfig.model_validate({"store": "unused", "context_window": WINDOW, "seed": 4})
        pp = 2 if self.grouping == "slices" else 1
        job = Job(
            model_shape("tiny"),
            hardware_preset("h100"),
            packing,
            data=data,
            layout=Layout(dp=self.number * self.size, pp=pp),
        ).with_pools(self.grouping, self.size, pp * self.micro_batches)
        job = job.with_length_factor(max(1.0, 4 / job.step_micro_batches + self.spare))
        return StepPlanner(job, np.array(lengths, dtype=np.int64), epochs=1)


@pytest.fixture(autouse=True, scope="module")
def short_tiles() -> Iterator[None]:
    """Documents of these tests are cut into slices too."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slices, "QUERY_TILE", 4)
        yield


def resumed_in_turn(lengths: list[int], chain: list[tuple[Divided, int]], last: Divided) -> list[PlannedStep]:
    """The steps of an epoch in which each of ``chain`` plans so many of them, and ``last`` all others."""
    steps: list[PlannedStep] = []
    state: dict[str, Any] | None = None
    for pools, count in [*chain, (last, len(lengths))]:
        planner = pools.planner(lengths)
        if state is not None:
            planner.load_state_dict(json.loads(json.dumps(state)))
        steps += islice(planner, count)
        state = planner.state_dict()
    return steps


def tokens_of(steps: list[PlannedStep]) -> Counter[tuple[int, int]]:
    return Counter(
        (document, start + offset)
        for step in steps
        for document, start, length in step.plan.segments
        for offset in range(length)
    )


many_lengths = st.lists(st.integers(1, 50), min_size=1, max_size=150)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=examples(7), deadline=None)
@given(lengths=many_lengths)
def test_one_epoch_trains_every_token_once(method, lengths):
    steps = list(planner_of(lengths, method, one_epoch=True))
    assert tokens_of(steps) == Counter((i, t) for i, n in enumerate(lengths) for t in range(n))
    assert [step.plan.step for step in steps] == list(range(len(steps)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("one_epoch", [True, False])
@settings(max_examples=examples(7), deadline=None)
@given(lengths=many_lengths, stop=st.integers(0, 6), window=st.integers(1, 3))
def test_resumes_after_any_step(method, one_epoch, lengths, stop, window):
    straight = planner_of(lengths, method, one_epoch=one_epoch, window=window)
    before = list(islice(straight, stop))
    after = list(islice(straight, 8))
    resumed = planner_of(lengths, method, one_epoch=one_epoch, window=window)
    if before:
        resumed.load_state_dict(json.loads(json.dumps(before[-1].state)))
        assert len({one.document for one in waiting_in(resumed.state_dict())}) == before[-1].pending_documents
    again = islice(resumed, 8 if before else stop + 8)
    expected = [(step.plan, step.state, step.documents) for step in (after if before else before + after)]
    assert [(step.plan, step.state, step.documents) for step in again] == expected
    skipped = planner_of(lengths, method, one_epoch=one_epoch, window=window).plans(stop)
    assert [*islice(skipped, 8)] == [step.plan for step in after]


def any_pools(spare: int = 1) -> st.SearchStrategy[Divided]:
    grouping: st.SearchStrategy[Grouping] = st.sampled_from(["even", "slices"])
    return st.builds(
        Divided, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 4), grouping, st.just(spare)
    )


def random_lengths(least: int) -> st.SearchStrategy[list[int]]:
    """Documents for many steps, so that a planner takes in those of several steps at once."""

    def drawn(count: int, seed: int) -> list[int]:
        return [*map(int, np.random.default_rng(seed).integers(least, WINDOW + 1, count))]

    return st.builds(drawn, st.integers(1, 150), st.integers(0, 2**32))


def a_chain(spare: int = 1) -> st.SearchStrategy[list[tuple[Divided, int]]]:
    return st.lists(st.tuples(any_pools(spare), st.integers(0, 3)), max_size=4)


@settings(max_examples=examples(20), deadline=None)
@given(lengths=random_lengths(1), chain=a_chain(), pools=any_pools())
def test_balanced_steps_keep_their_documents_in_other_pools(lengths, chain, pools):
    expected = list(pools.planner(lengths))
    actual = resumed_in_turn(lengths, chain, pools)
    assert [sorted(step.plan.segments) for step in actual] == [sorted(step.plan.segments) for step in expected]
    assert [(step.documents, step.pending_documents) for step in actual] == [
        (step.documents, step.pending_documents) for step in expected
    ]
    assert {step.plan.longest_delay for step in actual} == {0}


ONE_MICRO_BATCH = Divided(1, 1, 1, "even", 0)


# The job stops in the middle of the epoch's last steps, which its successor divides otherwise.
@example(
    lengths=[*map(int, np.random.default_rng(0).integers(WINDOW // 4, WINDOW + 1, 22))],
    chain=[(ONE_MICRO_BATCH, 1), (Divided(1, 1, 3, "even", 0), 3)],
    pools=ONE_MICRO_BATCH,
)
@settings(max_examples=examples(20), deadline=None)
@given(lengths=random_lengths(WINDOW // 4), chain=a_chain(spare=0), pools=any_pools(spare=0))
def test_the_delay_is_true_where_documents_find_no_room_in_other_pools(lengths, chain, pools):
    """Counted again from nothing but the order of documents: a step takes in what is due by it, and trains a part."""
    steps = resumed_in_turn(lengths, chain, pools)
    assert tokens_of(steps) == Counter((i, t) for i, n in enumerate(lengths) for t in range(n))
    global_batch = 4 * WINDOW
    coming = Permutation(len(lengths), 4, 0, 0).between(0, len(lengths)).tolist()[::-1]
    arrived: dict[int, int] = {}  # step of each document that waits
    ahead = 0
    for number, step in enumerate(steps):
        wanted = global_batch - sum(lengths[document] for document in arrived)
        due = max(0, wanted) - ahead
        at_the_end = sum(lengths[document] for document in coming) < max(wanted, due)
        taken = 0
        while coming and (at_the_end or taken < due):
            document = coming.pop()
            arrived[document] = number
            taken += lengths[document]
        ahead = taken - due
        waits = [(number - arrived.pop(d), length) for d, _, length in step.plan.segments]
        assert step.plan.delay_token_steps == sum(wait * length for wait, length in waits)
        assert step.plan.longest_delay == max(wait for wait, _ in waits)


def test_the_next_epoch_follows_without_draining():
    lengths = [5] * 100  # 500 tokens: not a whole number of steps of 128
    steps = list(islice(planner_of(lengths, "sequential", one_epoch=False), 20))
    assert {step.plan.tokens for step in steps} == {4 * WINDOW}
    trained = tokens_of(steps)
    assert set(trained.values()) == {1}
    assert {(document, token) for document in range(500) for token in range(5)} <= trained.keys()


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=examples(7), deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=80), overlong=st.sampled_from(["split", "truncate"]))
def test_a_document_is_finished_when_all_of_its_pieces_are_trained(method, lengths, overlong):
    """Packers hold long pieces back while they train the short one at the document's end."""
    planner = planner_of(lengths, method, one_epoch=True, overlong=overlong)
    left = [min(length, WINDOW) if overlong == "truncate" else length for length in lengths]
    for step in planner:
        for document, _, length in step.plan.segments:
            left[document] -= length
        trained = {segment.document for segment in step.plan.segments}
        assert step.documents == tuple(sorted(document for document in trained if not left[document]))
        assert step.pending_documents == step.state["stream"]["stores"][0]["cursor"] - left.count(0)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=examples(12), deadline=None)
@given(
    lengths=many_lengths,
    window=st.integers(1, 3),
    chain=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2]), st.integers(0, 3)), max_size=5),
)
def test_a_chain_of_resumes_with_other_micro_batches_trains_every_token_once(method, lengths, window, chain):
    steps: list[PlannedStep] = []
    planner = planner_of(lengths, method, one_epoch=True, window=window)
    for per_rank, dp, count in chain:
        steps += islice(planner, count)
        state = json.loads(json.dumps(planner.state_dict()))
        packing = {"global_batch": per_rank * dp, "window": window}
        planner = planner_of(lengths, method, one_epoch=True, dp=dp, **packing)
        planner.load_state_dict(state)
        for step in islice(planner, 1):
            assert [len(rank) for rank in step.plan.ranks] == [per_rank] * dp
            steps.append(step)
    steps += planner
    assert tokens_of(steps) == Counter((i, t) for i, n in enumerate(lengths) for t in range(n))
    assert [step.plan.step for step in steps] == list(range(len(steps)))


@settings(max_examples=examples(20), deadline=None)
@given(
    lengths=many_lengths,
    chain=st.lists(
        st.tuples(st.sampled_from(METHODS), st.integers(1, 6), st.integers(8, 40), st.integers(0, 3)), max_size=4
    ),
)
def test_a_chain_of_other_methods_and_windows_trains_every_token_once(lengths, chain):
    steps: list[PlannedStep] = []
    planner = planner_of(lengths, "variable_length", one_epoch=True)
    for method, micro_batches, window_tokens, count in chain:
        steps += islice(planner, count)
        state = json.loads(json.dumps(planner.state_dict()))
        planner = planner_of(
            lengths, method, one_epoch=True, window_tokens=window_tokens, global_batch=micro_batches, window=2
        )
        planner.load_state_dict(state, packed_otherwise=True)
        for step in islice(planner, 1):
            assert max(segment.length for segment in step.plan.segments) <= window_tokens
            steps.append(step)
    steps += planner
    assert tokens_of(steps) == Counter((i, t) for i, n in enumerate(lengths) for t in range(n))
    assert [step.plan.step for step in steps] == list(range(len(steps)))


def test_steps_not_handed_out_come_first_when_packed_again():
    lengths = [n % 30 + 1 for n in range(300)]
    straight = planner_of(lengths, "fixed_greedy", one_epoch=True, window=3)
    next(straight)
    state = json.loads(json.dumps(straight.state_dict()))
    packed = {
        segment
        for plan in state["emitted"]
        for rank in plan["ranks"]
        for m in rank
        for segment in map(tuple, m["segments"])
    }
    assert len(state["emitted"]) > 1
    smaller = planner_of(lengths, "fixed_greedy", one_epoch=True, window=1, global_batch=2)
    smaller.load_state_dict(state)
    again = [step.plan for step in islice(smaller, 3)]
    assert [plan.step for plan in again] == [1, 2, 3]
    taken = [segment for plan in again for segment in plan.segments]
    waiting = {tuple(row[:3]) for row in state["packer"]["carried"]}
    assert set(taken) <= packed | waiting


def test_steps_over_a_smaller_l_max_are_packed_again():
    lengths = [20] * 100
    large = planner_of(lengths, "variable_length", one_epoch=True, max_length_factor=2.0, outlier_thresholds=[])
    steps, coming = [next(large)], next(large)
    assert max(m.tokens for m in coming.plan.micro_batches) > WINDOW
    small = planner_of(lengths, "variable_length", one_epoch=True, max_length_factor=1.0, outlier_thresholds=[])
    small.load_state_dict(coming.state | {"emitted": [coming.plan.to_json(), *coming.state["emitted"]]})
    rest = list(small)
    assert max(m.tokens for step in rest for m in step.plan.micro_batches) <= WINDOW
    assert tokens_of(steps + rest) == Counter((i, t) for i, n in enumerate(lengths) for t in range(n))


@pytest.mark.parametrize("method", METHODS)
def test_resuming_takes_in_only_what_the_next_step_needs(method, monkeypatch):
    lengths = [16] * 5000
    planner = planner_of(lengths, method, one_epoch=False)
    state = planner.state_dict()
    state["stream"]["stores"][0] |= {"epoch": 10_000, "cursor": 4000}
    state["packer"] |= {"step": 10_000_000}
    taken: list[int] = []
    take = DocumentStream.take

    def counting(stream: DocumentStream, documents: int) -> Any:
        taken.append(documents)
        return take(stream, documents)

    monkeypatch.setattr(DocumentStream, "take", counting)
    planner.load_state_dict(json.loads(json.dumps(state)))
    assert taken == []
    step = next(planner)
    assert sum(taken) == 64
    assert step.plan.step == 10_000_000
    order = Permutation(5000, 4, 10_000, 0).between(4000, 4064)
    assert {segment.document for segment in step.plan.segments} <= {10_000 * 5000 + i for i in order.tolist()}


@pytest.mark.parametrize(
    ("changed", "kinds"),
    [({}, "FIW"), ({"compiled": True}, "FB"), ({"activation_checkpointing": "full"}, "FB")],
    ids=["eager", "compiled", "checkpointing"],
)
def test_backwards_have_two_parts_only_where_the_runtime_can_put_one_off(changed, kinds):
    lengths = np.array([8, 5, 19] * 20)
    job = replace(Divided(1, 1, 2, "slices").planner(lengths.tolist())._job, **changed)
    lists = next(StepPlanner(job, lengths)).plan.operations
    assert {operation.kind for pipeline in lists for rank in pipeline for operation in rank} == {*kinds}


def test_many_dropped_documents_do_not_bring_in_all_others():
    data = DataConfig.model_validate(
        {"store": "unused", "context_window": WINDOW, "overlong": "drop", "shuffle": False}
    )
    job = replace(Divided(1, 1, 2, "even").planner([1])._job, data=data)
    step = next(StepPlanner(job, np.array([WINDOW + 1] * 640 + [5] * 9000)))
    assert len(step.state["packer"]["arrived"]) < 1000


@pytest.mark.parametrize(("dp", "per_rank", "windows"), [(1, 32, 2), (2, 16, 8), (4, 8, 1)])
def test_micro_batches_of_slices_shorter_than_a_window_train_every_token_once(dp, per_rank, windows):
    data = DataConfig.model_validate({"store": "unused", "context_window": 4096, "seed": 4})
    packing = PackingConfig.model_validate({"method": "balanced", "global_batch": windows})
    job = Job(model_shape("7b"), hardware_preset("h100"), packing, data=data, layout=Layout(dp=dp, pp=2))
    job = job.with_pools("slices", 1, per_rank)
    job = job.with_length_factor(job.least_length_factor)
    assert job.max_tokens < 4096
    lengths = np.array([4096, 90, 4000, 700, 2500, 64, 1800, 4096, 12] * 2)
    trained: Counter[int] = Counter()
    for step in islice(StepPlanner(job, lengths, epochs=1), 100):
        assert all(part.tokens <= job.max_tokens for part in step.plan.micro_batches)
        for document, _, length in step.plan.segments:
            trained[document] += length
    assert trained == dict(enumerate(lengths.tolist()))
