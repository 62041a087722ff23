"""``wlb.balance`` with common prefixes, padding, rounding and a cap on documents, against all divisions of a few."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb
from tests.cases import in_turn
from wlb.errors import UserError

CROSSOVER = 20  # tokens of a document whose attention costs half of what the rest costs


class Prices:
    def document_seconds(self, lengths: Any) -> Any:
        tokens = np.asarray(lengths, np.float64)
        return tokens + tokens**2 / 2 / CROSSOVER


class Step(NamedTuple):
    """Documents, and what a micro-batch of some of them costs and counts."""

    lengths: list[int]
    options: dict[str, Any]
    of: Callable[[Sequence[int]], tuple[float, int]]


def price(tokens: int, after: int = 0) -> float:
    """Of tokens that attend to themselves and to those before: linear, and a triangle beside a rectangle."""
    return tokens + (tokens**2 / 2 + tokens * after) / CROSSOVER


def sharing(random: np.random.Generator, documents: int) -> Step:
    prompts = random.integers(0, 3, documents).tolist()
    prefixes = {prompt: int(random.integers(0, random.choice([2, 10, 40, 100]))) for prompt in range(3)}
    responses = random.integers(0, random.choice([5, 40]), documents).tolist()

    def of(part: Sequence[int]) -> tuple[float, int]:
        own = {prompts[i] for i in part}
        cost = sum(price(prefixes[p]) for p in own) + sum(price(responses[i], prefixes[prompts[i]]) for i in part)
        return cost, sum(prefixes[p] for p in own) + sum(responses[i] for i in part)

    lengths = [prefixes[prompt] + response for prompt, response in zip(prompts, responses, strict=True)]
    return Step(lengths, {"groups": prompts, "prefixes": prefixes}, of)


def padding(random: np.random.Generator, documents: int) -> Step:
    lengths = random.integers(1, random.choice([5, 40]), documents).tolist()
    rounded = int(random.choice([1, 8]))

    def of(part: Sequence[int]) -> tuple[float, int]:
        longest = -(-max(lengths[i] for i in part) // rounded) * rounded
        return len(part) * price(longest), len(part) * longest

    return Step(lengths, {"padded": True, "multiple_of": rounded}, of)


def rounding(random: np.random.Generator, documents: int) -> Step:
    lengths = random.integers(0, random.choice([5, 40]), documents).tolist()
    rounded = int(random.choice([2, 16]))

    def of(part: Sequence[int]) -> tuple[float, int]:
        held = [-(-lengths[i] // rounded) * rounded for i in part]
        return sum(map(price, held)), sum(held)

    return Step(lengths, {"multiple_of": rounded}, of)


def best(step: Step, parts: int, most: int | None, at_most: int) -> float | None:
    """The least cost of the dearest part over all divisions; None where none keeps to the limits."""
    costs = []
    for owners in itertools.product(range(parts), repeat=len(step.lengths) - 1):
        divided = [[i for i, owner in enumerate((0, *owners)) if owner == part] for part in range(parts)]
        if all(0 < len(part) <= at_most for part in divided):
            of = [step.of(part) for part in divided]
            if most is None or max(tokens for _, tokens in of) <= most:
                costs.append(max(cost for cost, _ in of))
    return min(costs, default=None)


@in_turn(
    ("kind", "capped", "bound"),
    [
        (sharing, False, 1.2),
        (padding, False, 1.0005),
        (padding, True, 1.0005),
        (rounding, False, 1.1),
        (rounding, True, 1.1),
    ],
)
def test_few_documents_are_divided_nearly_as_well_as_they_can(kind: Any, capped: bool, bound: float):
    """And only few that fit are refused, where the limit leaves no room: never those that are padded."""
    refused = 0
    for seed in range(100):
        random = np.random.default_rng([seed, capped])
        parts = int(random.integers(2, 4))
        step = kind(random, int(random.integers(parts, 7)))
        documents = range(len(step.lengths))
        most = None
        if random.random() < 0.5:
            whole = step.of(documents)[1]
            most = max(1, *(step.of([i])[1] for i in documents), int(random.choice([1, 1.1, 1.3]) * whole / parts))
        at_most = int(random.integers(-(-len(documents) // parts), len(documents))) if capped else len(documents)
        options = step.options | ({"max_documents": at_most} if capped else {})
        least = best(step, parts, most, at_most)
        try:
            divided = wlb.balance(step.lengths, parts, most, workload=Prices(), **options)
        except UserError:
            refused += least is not None
            continue
        assert least is not None
        assert sorted(itertools.chain(*divided)) == list(documents)
        assert all(0 < len(part) <= at_most for part in divided)
        assert most is None or max(step.of(part)[1] for part in divided) <= most
        assert max(step.of(part)[0] for part in divided) <= bound * least
    assert refused <= 2 * (kind is sharing)


@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans(), st.sampled_from([sharing, padding, rounding]))
def test_limits_hold_for_ranks_whatever_is_given(seed: int, ranks: int, together: bool, kind: Any):
    random = np.random.default_rng(seed)
    step = kind(random, int(random.integers(0, 60)))
    most = [None, 60, 150][random.integers(3)]
    at_most = [None, 1, 5][random.integers(3)] if kind is not sharing else None
    groups = step.options.get("groups") or random.integers(0, 9, len(step.lengths)).tolist()
    options = step.options | {"groups": groups if together or kind is sharing else None}
    parts = [None, 4][random.integers(2)]
    wishes: dict[str, Any] = {"oversize": "alone", "empty": "allowed", "max_documents": at_most, "ranks": ranks}
    try:
        of_ranks = wlb.balance(step.lengths, parts, most, workload=Prices(), **options, **wishes)
    except UserError:
        assert parts is not None, "enough micro-batches hold all"
        return
    micro_batches = [*itertools.chain(*of_ranks)]
    assert {len(own) for own in of_ranks} == {len(of_ranks[0])}
    assert sorted(itertools.chain(*micro_batches)) == [*range(len(step.lengths))]
    for part in filter(None, micro_batches):
        assert at_most is None or len(part) <= at_most
        filled = [i for i in part if step.lengths[i]]
        assert most is None or step.of(part)[1] <= most or len(filled) == 1
    if together or kind is sharing:
        ranks_of = {(groups[i], rank) for rank, own in enumerate(of_ranks) for i in itertools.chain(*own)}
        assert len(ranks_of) == len(set(groups))


def test_ranks_get_equally_many_micro_batches_of_rollouts_under_a_limit():
    """Where a rank needs fewer than others, it halves some."""
    for seed in range(100):
        random = np.random.default_rng(seed)
        prompts = random.integers(0, 6, int(random.integers(6, 40))).tolist()
        prefixes = dict(enumerate(random.integers(5, 60, 6).tolist()))
        lengths = [
            prefixes[prompt] + response
            for prompt, response in zip(prompts, random.integers(1, 40, len(prompts)).tolist(), strict=True)
        ]
        shared: dict[str, Any] = {"groups": prompts, "prefixes": prefixes, "workload": Prices(), "empty": "allowed"}
        of_ranks = wlb.balance(lengths, ranks=int(random.integers(1, 4)), max_tokens=100, **shared)
        assert len({len(own) for own in of_ranks}) == 1
        micro_batches = [*itertools.chain(*of_ranks)]
        assert sorted(itertools.chain(*micro_batches)) == [*range(len(lengths))]
        for part in micro_batches:
            once = sum(prefixes[prompt] for prompt in {prompts[i] for i in part})
            assert once + sum(lengths[i] - prefixes[prompts[i]] for i in part) <= 100


@in_turn("rollouts", [4, 16, 64])
def test_rollouts_of_prompts_need_few_micro_batches_under_a_limit(rollouts: int):
    """A group that fills most of a micro-batch is cut, so that it fills up others."""
    random = np.random.default_rng(0)
    prompts = np.repeat(np.arange(2048 // rollouts), rollouts)
    prefixes = random.integers(200, 2_000, 2048 // rollouts)
    responses = random.lognormal(7, 1, 2048).astype(int).clip(16, 20_000)
    shared: dict[str, Any] = {"groups": prompts, "prefixes": dict(enumerate(prefixes.tolist()))}
    micro_batches = wlb.balance(responses + prefixes[prompts], None, 32_768, **shared)
    assert len(micro_batches) < 1.05 * (responses.sum() + prefixes.sum()) / 32_768


def test_rollouts_of_a_prompt_over_the_limit_are_alone():
    for prompt in (60, 62):
        shared: dict[str, Any] = {"groups": [0] * 4, "prefixes": {0: prompt}, "workload": "tokens", "oversize": "alone"}
        assert sorted(wlb.balance([70, 90, 65, 62], None, 60, **shared)) == [[0], [1], [2], [3]]


@in_turn("seed", range(8))
def test_many_documents_are_even_under_a_cap(seed: int):
    """As even as without, if every micro-batch is nearly full; also beside an outlier, and where tokens are scarce."""
    random = np.random.default_rng(seed)
    lengths = random.lognormal(6, 1, int(random.integers(150, 400))).astype(int) + 1
    most = -(-len(lengths) // 8) + 1
    parts = wlb.balance(lengths, 8, workload="tokens", max_documents=most)
    assert max(map(len, parts)) <= most
    assert max(lengths[part].sum() for part in parts) < 1.01 * lengths.sum() / 8
    limit = int(max(1.05 * lengths.sum() / 8, lengths.max()))
    scarce = wlb.balance(lengths, None, limit, max_documents=most)
    assert max(map(len, scarce)) <= most
    assert max(lengths[part].sum() for part in scarce) <= limit
    lengths[0] = 40 * lengths[1:].max()
    slots = wlb.balance(lengths, 32, ranks=4, max_documents=(most + 6) // 3)
    assert max(len(part) for own in slots for part in own) <= (most + 6) // 3


def test_a_cap_that_only_a_search_can_keep():
    divided = wlb.balance([1, 8, 8, 9, 4, 6, 11, 5], 2, 26, max_documents=4, workload="tokens")
    assert {len(part) for part in divided} == {4}


def test_rollouts_of_a_prompt_meet_where_it_pays():
    """Long prompts: each is computed once, and no micro-batch is dearer than the mean by more than 1%."""
    random = np.random.default_rng(0)
    prompts = np.repeat(np.arange(128), 8)
    prefixes = dict(enumerate(random.integers(1_000, 4_000, 128).tolist()))
    lengths = random.lognormal(6, 1, 1024).astype(int) + [prefixes[prompt] for prompt in prompts.tolist()]
    workload = wlb.make_workload("7b", "h100")

    def seconds(part: list[int]) -> float:
        before = [prefixes[prompt] for prompt in prompts[part].tolist()]
        once = workload.document_seconds([prefixes[prompt] for prompt in set(prompts[part].tolist())])
        return float(once.sum() + (workload.document_seconds(lengths[part]) - workload.document_seconds(before)).sum())

    shared: dict[str, Any] = {"groups": prompts, "prefixes": prefixes}
    for divided in (wlb.balance(lengths, 8, **shared), [p for (p,) in wlb.balance(lengths, ranks=8, **shared)]):
        costs = [seconds(part) for part in divided]
        assert max(costs) < 1.01 * seconds([*range(1024)]) / 8
    apart = wlb.balance(lengths, 8)
    assert max(map(seconds, apart)) > 1.5 * max(costs)


def test_slots_of_padded_documents_are_no_longer_than_an_outlier():
    """Ranks wait for one long document in its slot alone, which others fill."""
    lengths = [900, *np.random.default_rng(1).integers(10, 100, 200).tolist()]
    of_ranks = wlb.balance(lengths, 32, ranks=4, padded=True, workload="tokens")
    loads = np.array([[len(part) * max(lengths[i] for i in part) for part in own] for own in of_ranks])
    slots, totals = loads.max(axis=0), loads.sum(axis=1)
    assert sorted(slots.tolist())[-1] == 900
    assert sorted(slots.tolist())[-2] < 400
    assert totals.max() < 1.02 * totals.mean()


def test_padded_documents_in_the_fewest_micro_batches():
    assert len(wlb.balance([9, 1, 8, 2, 7, 3], None, 18, padded=True)) == 3
    assert wlb.balance([9, 1, 8, 2, 7, 3], None, 18, padded=True, equal_size=True) == [[0, 2], [4, 5], [1, 3]]
    assert wlb.balance([9, 1, 8, 2, 7, 3], 2, padded=True, equal_size=True) == [[0, 2, 4], [1, 3, 5]]
    assert len(wlb.balance([5] * 9, max_documents=4)) == 3


_SHARED: dict[str, Any] = {"lengths": [9, 9], "parts": 1, "groups": ["a", "b"], "prefixes": {"a": 4, "b": 4}}


@in_turn(
    ("arguments", "message"),
    [
        (_SHARED | {"groups": None}, "groups needs ranks or prefixes, and one id, int or str, for each of 2"),
        (_SHARED | {"prefixes": [4, 4]}, "prefixes must map .* is a list; give a dict"),
        (_SHARED | {"prefixes": {"a": 4}}, "prefixes lacks group 'b'; give it 0"),
        (_SHARED | {"prefixes": {"a": 4, "b": -1}}, r"prefixes\['b'\] = -1 is not a whole number >= 0"),
        (_SHARED | {"prefixes": {"a": 4, "b": 10}}, "document 1 has 9 tokens, under the 10 of its prefix; .* lower"),
        (_SHARED | {"max_tokens": 17}, r"into 1 parts of max_tokens = 17; raise parts \(2 would do\)"),
        (_SHARED | {"parts": 3}, "2 documents cannot fill 3 parts"),
        (_SHARED | {"costs": [1, 1]}, "prefixes and costs exclude each other; leave one of them out"),
        (_SHARED | {"multiple_of": 8}, "prefixes and multiple_of exclude"),
        (_SHARED | {"max_documents": 8}, "prefixes and max_documents exclude"),
        (_SHARED | {"padded": True}, "prefixes and padded exclude"),
        (_SHARED | {"parts": 2, "equal_size": True}, "one micro-batch for each rank, not 2; give ranks"),
        ({"lengths": [9], "parts": 1, "padded": True, "costs": [1]}, "padded and costs exclude"),
        ({"lengths": [9, 8], "parts": 1, "max_tokens": 17, "padded": True}, r"padded .* parts \(2 would do\)"),
        ({"lengths": [5] * 4, "parts": 2, "max_tokens": 9, "padded": True, "equal_size": True}, "equal_size = False"),
        ({"lengths": [9], "parts": 1, "multiple_of": 0}, "multiple_of = 0 is not a whole number >= 1"),
        ({"lengths": [9], "parts": 1, "max_tokens": 15, "multiple_of": 8}, "document 0 has 16 tokens, over .* 15"),
        ({"lengths": [9], "parts": 1, "max_documents": 0}, "max_documents = 0 is not"),
        ({"lengths": [9] * 5, "parts": 2, "max_documents": 2}, "max_documents = 2; raise parts to 3 or .* to 3"),
    ],
)
def test_what_cannot_be_is_one_line_with_a_remedy(arguments: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message) as refusal:
        wlb.balance(**arguments)
    assert "\n" not in str(refusal.value)


@pytest.mark.filterwarnings("error")
def test_prefixes_alone_are_divided():
    assert wlb.balance([0, 0, 5, 6], 4, ranks=2, groups=[0, 0, 1, 1], prefixes={0: 0, 1: 1}) == [[[0], [1]], [[3], [2]]]
    assert wlb.balance([5, 5], 2, groups=[0, 0], prefixes={0: 5}) == [[0], [1]]
    assert wlb.balance([0, 0], groups=[0, 0], prefixes={0: 0}, max_tokens=9) == [[0, 1]]
