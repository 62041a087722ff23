"""Prices of plans: those of the simulator where it runs the same, and what switching and mixing add."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from studies.tests.policies.ranks import lengths_of, ranks
from tests.simulate.jobs import SHAPE, documents, job
from wlb.errors import UserError
from wlb.job.memory.walk import predict_memory
from wlb.job.planner import StepPlanner
from wlb.schedules.operations import rank_operations
from wlb.schedules.timing import pipeline_times
from wlb.simulate import simulate, simulate_steps, simulated_job
from wlb.simulate.run import pooled
from wlb.simulate.search import fastest_layout
from wlb.simulate.space import SearchSpace
from wlb.simulate.verdict import simulate_draws
from wlb.workload import hardware_preset, make_workload, model_shape
from wlb.workload.flops import gemm_flops_per_token
from wlb.workload.weights import parameters
from wlb_studies.policies import BASE, POLICIES, Outcome, chosen, compare
from wlb_studies.policies.bytescale import hybrid_data_parallel
from wlb_studies.policies.hotspa import HotSwitching, bounds, in_buckets, switched_bytes
from wlb_studies.policies.hydraulis import Heterogeneous, Pipelines, _columns, _deals, greedy, packed
from wlb_studies.policies.ours import PresetPolicy
from wlb_studies.policies.plan import Group, GroupPlan, Ranks
from wlb_studies.policies.policy import LayoutTrial, PricedStep, RankPolicy, RankTrial, batches_of_draws, best_of
from wlb_studies.policies.pricing import StepPrice, joined_ends, peak_memory, price

LAYOUTS = [
    {"dp": 2, "cp": 2, "pp": 1, "micro_batches": 3},
    {"dp": 2, "cp": 2, "pp": 2, "micro_batches": 4},
    {"dp": 1, "cp": 4, "pp": 2, "micro_batches": 4, "virtual_pp": 2, "schedule": "interleaved_1f1b"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_one_size_take_what_the_simulator_says(layout):
    """The plan of a step of fixed-4D, told as groups: other code puts the same seconds together."""
    simulated = job("fixed-4d", **layout)
    plan = next(StepPlanner(simulated, documents()).plans())
    lengths: list[int] = []
    groups = []
    for d, of_rank in enumerate(plan.ranks):
        for slot, micro_batch in enumerate(of_rank):
            first = len(lengths)
            lengths += micro_batch.lengths
            members = tuple(range(d * simulated.layout.cp, (d + 1) * simulated.layout.cp))
            groups.append(Group(slot, members, tuple(range(first, len(lengths)))))
    of_stage = simulated.layout.dp * simulated.layout.cp
    settings = {name: value for name, value in layout.items() if name in ("pp", "virtual_pp", "schedule")}
    as_ranks = Ranks(job("fixed-4d", dp=of_stage, micro_batches=simulated.layout.pp, **settings), 8192)
    priced = price(GroupPlan(np.array(lengths), tuple(groups)), as_ranks)
    assert priced.seconds == pytest.approx(float(simulate_steps([plan], simulated).seconds[0]), rel=1e-5)


def test_pipelines_that_run_a_micro_batch_together_begin_it_together():
    """One stage: the second pipeline's 1 + 1 s are over when the first ends its 3 + 3 s, and both go on from there."""
    forward = np.array([[[3.0, 1.0]], [[1.0, 1.0]]])
    operations = rank_operations("1f1b", 1, 2)
    assert joined_ends(operations, forward, forward, np.array([[0, 0], [1, 0]])).tolist() == [[8.0, 8.0]]
    apart = pipeline_times(operations, forward, forward)
    assert apart.rank_ends.tolist() == [[8.0, 4.0]]


@pytest.mark.usefixtures("kernels_launched_at_once")
def test_a_barrier_makes_ranks_wait_and_ranks_apart_do_not():
    lengths = lengths_of(4096, 512, 512, 4096)
    groups = (Group(0, (0,), (0,)), Group(0, (1,), (1,)), Group(1, (0,), (2,)), Group(1, (1,), (3,)))
    keeping = ranks(2, weights="kept")
    apart = price(GroupPlan(lengths, groups), keeping).seconds
    barrier = price(GroupPlan(lengths, groups, frozenset([1])), keeping).seconds
    assert barrier > 1.2 * apart


@pytest.mark.usefixtures("kernels_launched_at_once")
def test_ranks_that_fetch_weights_wait_for_nobody_and_share_no_adapters():
    """On one node fetching takes what gathering together does, so only waiting differs; on two it is slower."""
    gathering = partial(ranks, weights="gathered")

    def seconds(lengths: tuple[int, ...], *, fetched: bool) -> float:
        groups = tuple(Group(index // 2, (index % 2,), (index,)) for index in range(len(lengths)) if lengths[index])
        return price(GroupPlan(lengths_of(*lengths), groups, fetches_weights=fetched), gathering(2)).seconds

    alike, uneven = (4096, 4096, 4096, 4096), (4096, 512, 512, 4096)
    assert seconds(alike, fetched=True) == pytest.approx(seconds(alike, fetched=False))
    assert seconds(uneven, fetched=True) < 0.8 * seconds(uneven, fetched=False)
    few, more = (16_384, 512), (16_384, 512, *[0, 512] * 7)  # a rank that has no micro-batch left fetches nothing
    assert seconds(more, fetched=True) == pytest.approx(seconds(few, fetched=True), rel=0.01)
    assert seconds(more, fetched=False) > 1.1 * seconds(few, fetched=False)
    many = GroupPlan(lengths_of(*[4096] * 16), tuple(Group(0, (rank,), (rank,)) for rank in range(16)))
    assert price(replace(many, fetches_weights=True), gathering(16)).seconds > price(many, gathering(16)).seconds


@pytest.mark.parametrize("exchange", ["keys and values", "heads"])
def test_a_group_exchanges_over_the_network_where_it_lies_on_several_nodes(exchange):
    """Nodes have eight GPUs: four ranks of tp 2."""

    def seconds(*members: int, tp: int = 2) -> float:
        plan = GroupPlan(lengths_of(16_384), (Group(0, members, (0,)),), exchange=exchange)
        return price(plan, Ranks(ranks(8, tp=tp).job, 8192)).seconds

    assert seconds(0, 3) == seconds(4, 5) < seconds(3, 4) == seconds(0, 7)
    assert seconds(0, 7, tp=1) == seconds(0, 1, tp=1)


def test_only_what_a_strategy_does_not_hold_is_switched():
    """From tp 2 back to tp 1 half the weights come; towards tp 2 a rank has its half already."""
    one, two = (Ranks(simulated_job("deepseek-v3", 8192, "fixed-4d", dp=4 // tp, tp=tp), 8192) for tp in (1, 2))
    weights = 671e9  # as published, arXiv 2412.19437
    assert switched_bytes([one, one]) == 0
    assert switched_bytes([one, two]) == pytest.approx(weights / 2 * 2, rel=0.02)
    assert switched_bytes([two, one]) == pytest.approx(weights / 2 * (2 + 4), rel=0.02)


def test_switching_costs_what_moves():
    lengths = lengths_of(*[600] * 40, 9000)
    longest = (1024, 16_384)
    alike = HotSwitching(longest, (ranks(4), ranks(4))).step(lengths)
    switched = HotSwitching(longest, (ranks(2, tp=2), ranks(4))).step(lengths)
    assert alike.trained.sum() == switched.trained.sum() == lengths.sum()
    assert switched.price.exchanged_bytes >= switched_bytes([ranks(2, tp=2), ranks(4)])


def test_hydraulis_deals_to_the_pipeline_that_ends_first():
    """4 to one, both 3 to the other; what only the wide pipeline holds goes to that."""
    alike = (Pipelines(ranks(2, capacity=16, window=16), 1, 2),)
    assert sorted(map(sorted, greedy(lengths_of(4, 3, 3), alike))) == [[0], [1, 2]]
    wide = (Pipelines(ranks(4, capacity=8, window=16), 2, 1), Pipelines(ranks(4, capacity=8, window=16), 1, 2))
    lengths = lengths_of(16, 8, 8, 12)
    dealt = greedy(lengths, wide)
    assert {0, 3} <= set(dealt[0])
    step = Heterogeneous(wide).step(lengths)
    assert sorted(step.trained) == sorted(lengths)


def test_hydraulis_finds_better_deals_in_other_orders():
    """8, 7, 6, 5, 4 to two: longest first gives 8 + 5 + 4 = 17, another order 8 + 7 and 6 + 5 + 4."""
    pipelines = _columns(lengths_of(8, 7, 6, 5, 4), (Pipelines(ranks(2, capacity=16, window=16), 1, 2),))
    pipelines = pipelines._replace(cost=np.tile([8.0, 7.0, 6.0, 5.0, 4.0], (2, 1)))
    largest, _ = _deals(np.array([*itertools.permutations(range(5))]), pipelines)
    assert largest[0] == 17
    assert largest.min() == 15


def test_hydraulis_keeps_the_largest_of_all_pipelines_low_not_that_of_the_next():
    """In one order: once 9 is somewhere, the first pipeline takes all that stays under it."""
    pipelines = _columns(lengths_of(9, 2, 2, 2), (Pipelines(ranks(3, capacity=16, window=16), 1, 3),))
    pipelines = pipelines._replace(cost=np.tile([9.0, 2.0, 2.0, 2.0], (3, 1)))
    largest, owners = _deals(np.array([[0, 1, 2, 3]]), pipelines)
    assert largest.tolist() == [9.0]
    assert owners.tolist() == [[2, 1, 0, 0]]  # empty ones first, the last of them; then the first


def test_hydraulis_does_not_run_a_pipeline_without_documents():
    with pytest.raises(UserError, match="leave one of 3 pipelines without any"):
        greedy(lengths_of(4, 3), (Pipelines(ranks(4, capacity=16, window=16), 1, 3),))


@pytest.mark.parametrize(
    ("pp", "lengths", "longest", "expected"),
    [
        (1, (8, 7, 6, 5, 4), 15, [[4, 5, 6], [7, 8]]),  # two micro-batches of up to 15 take less than three
        (2, (8, 7, 6, 5, 4), 15, [[4, 7], [5, 6], [8]]),  # with two stages three of up to 11 do: 4 x 11, not 3 x 15
        (2, (3, 3, 2, 2, 2), 7, [[2, 2, 2], [3, 3]]),  # longest first finds 7 and 5
    ],
)
def test_hydraulis_packs_by_the_program(pp, lengths, longest, expected):
    kind = Pipelines(ranks(1, capacity=100 * longest, window=1600, pp=pp, micro_batches=pp), 1, 1)
    plan = packed([[*range(5)]], 100 * lengths_of(*lengths), kind)
    assert sorted(sorted(lengths[i] for i in group.documents) for group in plan.groups) == expected


def space(**changes: Any) -> SearchSpace:
    settings: dict[str, Any] = {
        "shape": SHAPE,
        "gpus": 8,
        "context_window": 8192,
        "global_batch": 16,
    } | changes
    return SearchSpace(hardware=hardware_preset("h100"), **settings)


# More GPUs have more layouts to choose from.
@pytest.mark.parametrize("gpus", [2, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_all_policies_train_the_same_documents_and_ours_as_the_simulator_does(gpus):
    lengths, searched = documents(), space(gpus=gpus, global_batch=2 * gpus)
    draws = batches_of_draws(lengths, searched, 2)
    outcomes, without = compare([*POLICIES], searched, lengths, 2)
    assert not without
    assert [outcome.policy for outcome in outcomes] == [*POLICIES]
    bounded = {outcome.policy for outcome in outcomes if "integer programs of at most" in outcome.layout}
    assert bounded == {"flexsp", "hydraulis"}
    by_name = {outcome.policy: outcome for outcome in outcomes}
    prices = make_workload(SHAPE, "h100")
    work = [sum(float(prices.document_seconds(batch).sum()) for batch in batches) for batches in draws]
    assert len({*work}) == 3
    for name, outcome in by_name.items():
        assert outcome.memory_bytes <= 0.9 * 80e9
        if isinstance(POLICIES[name], PresetPolicy) and name != "balanced":  # which cut, carry over or delay documents
            continue
        assert outcome.draw_tokens == [sum(int(batch.sum()) for batch in batches) for batches in draws], name
        assert outcome.draw_work == pytest.approx(work), name
        assert outcome.token_delay == 0


def test_policies_that_run_apart_come_to_the_same():
    names, searched = ["plain-4d", "odc", "bytescale"], space(gpus=4, global_batch=8)
    done: list[int] = []
    with ThreadPoolExecutor(2) as apart:
        found, _ = compare(names, searched, documents(), on_progress=done.append, apart=apart)
        with pytest.raises(UserError, match="no layout of 8 GPUs"):
            compare(names, space(shape=model_shape("llama3-70b")), documents(), apart=apart)
    alone, _ = compare(names, searched, documents())
    assert [replace(one, planning_seconds=0) for one in found] == [replace(one, planning_seconds=0) for one in alone]
    assert done == [1, 2, 3]


@pytest.mark.parametrize("context_window", [8192, 4096])
@pytest.mark.parametrize("preset", ["plain-4d", "balanced"])
def test_presets_are_as_fast_as_the_verdict_says(preset, context_window):
    searched = space(gpus=2, global_batch=4, context_window=context_window)
    found = fastest_layout(searched, documents(), preset)
    results = [*simulate_draws(found.job, documents(), 3, searched.work_prices)]
    outcome = POLICIES[preset].best(preset, searched, documents(), 3)
    assert outcome.draw_seconds == [result.seconds for result in results]
    assert outcome.tokens_per_second == pytest.approx(pooled(results).tokens_per_second)
    assert outcome.steps == 3


def test_presets_may_deal_their_head_in_every_pipeline():
    searched = replace(space(gpus=2, global_batch=4), fixed={"pp": 2})
    outcome = POLICIES["plain-4d-dealt-head"].best("plain-4d-dealt-head", searched, documents(), 1)
    assert ("pp 2" in outcome.layout, "head dealt" in outcome.layout) == (True, True)
    assert outcome.policy == "plain-4d-dealt-head"
    base = POLICIES[BASE].best(BASE, searched, documents(), 1)
    assert outcome.draw_tokens == base.draw_tokens
    assert outcome.draw_seconds != base.draw_seconds


def test_a_speedup_is_tokens_per_second_of_all_draws_and_its_spread_that_of_each():
    base = Outcome(BASE, "tp 1", 1, [10, 10], [1.0, 4.0], [2.0, 2.0], 0.0, 0.0, 0.0, 0.0, 0.0, 1)
    other = replace(base, policy="other", draw_tokens=[10, 20], draw_work=[4.0, 6.0])
    assert other.speedup(base) == 1.5
    assert other.spread(base) == (1.0, 2.0)
    assert other.speed_at_equal_work(base) == 2.5
    assert other.to_json(base).items() >= {"speedup": 1.5, "spread": (1.0, 2.0), "speed_at_equal_work": 2.5}.items()


class Timed(NamedTuple):
    """A layout in which a step takes so many seconds for documents of so many tokens, and too much memory for some."""

    layout: str
    seconds: dict[int, float]
    too_large: tuple[int, ...] = ()

    def step(self, lengths: np.ndarray) -> PricedStep:
        if (tokens := int(lengths.sum())) not in self.seconds:
            raise UserError("no plan")
        memory = 1e15 if tokens in self.too_large else 0.0
        return PricedStep(StepPrice(self.seconds[tokens], 0.0, memory), lengths, 0.0)


def test_all_draws_decide_among_layouts_that_are_near_in_the_first():
    draws = [[lengths_of(tokens)] for tokens in (1, 2, 3)]
    first, even = Timed("first", {1: 1.0, 2: 2.0, 3: 2.0}), Timed("even", {1: 1.02, 2: 1.0, 3: 1.0})
    far = Timed("far", {1: 1.2, 2: 0.1, 3: 0.1})
    found = best_of("any", [first, even, far], draws, space())
    assert (found.layout, found.draw_seconds, found.tried) == ("even", [1.02, 1.0, 1.0], 3)
    assert best_of("any", [Timed("none", {}), even, first], draws, space(), most=1).layout == "even"
    with pytest.raises(UserError, match="any finds no layout"):
        best_of("any", [Timed("in the first draw only", {1: 1.0})], draws, space())


def test_the_fastest_layout_that_fits_in_every_step_is_taken():
    draws = [[lengths_of(tokens), lengths_of(10 * tokens)] for tokens in (1, 2, 3)]
    every = (1, 2, 3, 10, 20, 30)
    fast, slow, slowest = (dict.fromkeys(every, seconds) for seconds in (1.0, 2.0, 3.0))
    trials = [Timed("fast", fast, too_large=(20,)), Timed("slow", slow), Timed("slowest", slowest)]
    found = best_of("any", trials, draws, space())
    assert (found.layout, found.draw_seconds, found.steps, found.tried) == ("slow", [4.0, 4.0, 4.0], 2, 3)
    with pytest.raises(UserError, match="any finds no layout"):
        best_of("any", trials[:1], draws, space())


def test_weights_are_kept_where_that_is_faster_and_fits():
    searched = space(gpus=2, global_batch=4)
    either, freed, kept = (
        RankPolicy(hybrid_data_parallel, pipelines=False, handlings=kinds).best("any", searched, documents(), 1)
        for kinds in (("gathered", "kept"), ("gathered",), ("kept",))
    )
    assert either.tried >= max(freed.tried, kept.tried)
    assert sum(either.draw_seconds) == min(sum(freed.draw_seconds), sum(kept.draw_seconds))
    assert "weights gathered again" in freed.layout
    assert "weights gathered again" not in kept.layout


def test_hotspa_has_its_buckets_from_the_tokens_of_the_documents():
    """64 tokens: a quarter is in documents of up to 1, half of them and three quarters in those of up to 16."""
    lengths = lengths_of(*[1] * 16, 16, 16, 16)
    assert bounds(lengths) == [1]
    assert bounds(lengths_of(*range(1, 101))) == [50, 71, 87]
    assert [len(bucket) for bucket in in_buckets(lengths, (1, 128))] == [16, 3]
    outcome = POLICIES["hotspa"].best("hotspa", space(gpus=4, global_batch=8), documents(), 1)
    longest = [int(part.split(":")[0].split()[1].replace(",", "")) for part in outcome.layout.split("; ")]
    first = batches_of_draws(documents(), space(gpus=4, global_batch=8), 1)[0][0]
    assert {*longest[:-1]} <= {*bounds(first)}
    assert longest[-1] == 8192


@pytest.mark.parametrize("pp", [2, 4])
def test_what_is_trained_is_credited_once_however_many_stages_run_it(pp):
    batches = [lengths_of(*[600, 1500, 40] * 12, 9000), lengths_of(*[700] * 30, 16_384, 3)]
    prices = make_workload(SHAPE, "h100")
    of = ranks(4, pp=pp, micro_batches=pp)
    policies = {name: policy for name, policy in POLICIES.items() if isinstance(policy, RankPolicy)}
    trials: dict[str, LayoutTrial] = {
        name: RankTrial(of, policy.plan) for name, policy in policies.items() if policy.pipelines
    }
    trials |= {"hotspa": HotSwitching((1024, 16_384), (of, of)), "hydraulis": Heterogeneous((Pipelines(of, 4, 1),))}
    for name, trial in trials.items():
        outcome = best_of(name, [trial], [batches], space())
        assert outcome.draw_tokens == [sum(int(batch.sum()) for batch in batches)], name
        assert outcome.draw_work == pytest.approx([sum(prices.document_seconds(batch).sum() for batch in batches)]), (
            name
        )
    for preset in ("plain-4d", "fixed-4d", "wlb-llm", "balanced"):
        simulated = job(preset, dp=2, pp=pp, micro_batches=4)
        plans = [*itertools.islice(StepPlanner(simulated, documents()).plans(), 2)]
        segments = np.concatenate([micro_batch.lengths for plan in plans for micro_batch in plan.micro_batches])
        result = simulate(simulated, documents(), 2, work_prices=prices)
        assert result.tokens == segments.sum(), preset
        assert result.work_seconds == pytest.approx(prices.document_seconds(segments).sum()), preset


def test_memory_counts_gradients_of_several_micro_batches_and_a_full_pipeline():
    alone = ranks(8)
    whole_gradients = 4 * parameters(SHAPE)
    assert peak_memory(alone, 4096, 1) > whole_gradients
    interleaved = ranks(4, pp=2, virtual_pp=2, schedule="interleaved_1f1b")
    filling, full = (predict_memory(interleaved.job, [65_536] * count).total for count in (2, 8))
    assert filling < full <= peak_memory(interleaved, 65_536, 1)


def test_a_micro_batch_of_few_tokens_takes_as_long_as_moving_the_weights():
    costs = job("fixed-4d").costs
    forward, backward = (costs.blocks_seconds(1, d) + costs.head_seconds(1, d) for d in ("forward", "backward"))
    bandwidth = costs.hardware.memory_bandwidth
    multiplied = gemm_flops_per_token(SHAPE) / 2
    assert forward == pytest.approx(2 * multiplied / bandwidth)
    assert backward == pytest.approx((2 + 2 * 4) * multiplied / bandwidth)  # weights, and gradients there and back
    assert costs.blocks_seconds(100_000, "forward") == pytest.approx(
        100 * costs.blocks_seconds(1000, "forward"), rel=0.01
    )
    assert costs.blocks_seconds(0, "forward") == 0.0


def test_names_are_checked_and_the_base_is_always_there():
    assert chosen("distca") == [BASE, "distca"]
    with pytest.raises(UserError, match="policy 'nobody' is unknown"):
        chosen("distca,nobody")
