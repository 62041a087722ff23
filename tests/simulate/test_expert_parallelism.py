"""Mixtures of experts under expert parallelism: prices, lock step, plans of whole groups, memory and the search."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.jobs import ROUTED, SHAPE, WINDOW, documents
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.job.memory.fit import fits, predicted_memory
from wlb.job.planner import StepPlanner
from wlb.job.prices import LevelPrices, Software
from wlb.packing.level import level_groups
from wlb.packing.plan import StageRanks, StepPlan
from wlb.schedules.layout import Layout
from wlb.sharding import price_shards
from wlb.sharding.latency import Phases, Priced
from wlb.simulate import simulate_steps, simulated_job
from wlb.simulate.costs import JobCosts
from wlb.simulate.decide import Packed, by_memory, decide, holds, pool_choices
from wlb.simulate.level import LevelSteps
from wlb.simulate.rate import rate
from wlb.simulate.search import fastest_layout, least_seconds
from wlb.simulate.space import search_space
from wlb.simulate.step import Steps
from wlb.workload import HARDWARE, Costs, ModelShape
from wlb.workload.links import group_link
from wlb.workload.phases import segment_seconds

H100 = HARDWARE["h100"]


def routed_job(preset: str = "plain-4d", shape: ModelShape = ROUTED, **settings: Any) -> Job:
    return simulated_job(shape, WINDOW, preset, **{"micro_batches": 2} | settings)


def level_job(dp: int = 8, ep: int = 4, **settings: Any) -> Job:
    packing = {"grouping": "level", "global_batch": 16}
    return decide(routed_job("balanced", dp=dp, ep=ep, packing=packing, **settings), documents())


def plans_of(one: Job, steps: int = 3) -> list[StepPlan]:
    return [*islice(StepPlanner(one, documents()).plans(), steps)]


def test_experts_on_other_gpus_exchange_tokens_and_share_weights():
    alone, spread = (JobCosts(routed_job(dp=2, cp=2, pp=2, tp=2, ep=ep)) for ep in (1, 4))
    link = group_link(H100, "all_to_all", 4, stride=1)
    received = 1000 * 2 * ROUTED.hidden * 2 / 2 * 3 / 4  # tokens x experts x values x bytes / tp, but a rank's own
    assert alone.rank.expert_seconds(1000) == 0
    assert spread.rank.expert_seconds(1000) == pytest.approx(2 * 7 * float(link.seconds(received)))
    wide = Costs(ROUTED, H100, tp=2, ep=16)
    between = group_link(H100, "point_to_point", 16, stride=1)
    reached = 1 - (1 / 2) ** 2  # the other node, by one of two experts or both
    assert wide.expert_seconds(1000) == pytest.approx(2 * 7 * float(between.seconds(1000 * reached * ROUTED.hidden)))
    assert spread.block_gather < alone.block_gather
    assert spread.optimizer.tolist() == pytest.approx(alone.optimizer.tolist())
    assert spread.rank.own_weights < alone.rank.own_weights


def test_the_busiest_gpu_counts_and_an_overlapped_exchange_does_not():
    even, uneven, hidden = (
        Costs(ROUTED, H100, ep=4, expert_imbalance=most, exposed_exchange=shown)
        for most, shown in ((1.0, 1.0), (1.5, 1.0), (1.0, 0.25))
    )
    more = uneven.blocks_seconds(4096) - even.blocks_seconds(4096)
    products = 3 * 2.0 * 7 * 3 * 1024 * 2 * (512 + 550) / (H100.peak_flops * H100.gemm_efficiency)
    assert more == pytest.approx(0.5 * 4096 * products)
    assert even.blocks_seconds(0, routed=4096) > 0 == even.blocks_seconds(0)  # experts of others' tokens
    assert hidden.expert_seconds(4096) == pytest.approx(even.expert_seconds(4096) / 4)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"dp": 32, "ep": 32}, "ep = 32 does not divide the model's 16 experts; choose a divisor"),
        ({"dp": 2, "ep": 4}, r"ep = 4 does not divide the 2 GPUs of a pipeline stage \(dp x cp x tp\)"),
        ({"dp": 4, "cp": 3, "ep": 2}, "cp = 3 and the 2 ranks that share experts .* do not divide each other"),
        ({"dp": 2, "tp": 8, "ep": 4}, "ep = 4 is no multiple of tp = 8"),
        ({"dp": 4, "ep": 4, "shape": SHAPE}, "ep = 4 shares experts, and the model has none"),
        ({"dp": 8, "ep": 4, "preset": "balanced", "pool": 2}, "pool = 2 splits the 4 ranks that share experts"),
        ({"dp": 2, "pp": 2, "ep": 2, "schedule": "planned"}, "'planned' orders the operations of each pool of cp = 1"),
    ],
)
def test_groups_that_cannot_share_experts_are_refused(layout: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message) as refused:
        routed_job(**layout)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("preset", ["plain-4d", "per-document-4d", "wlb-llm"])
@pytest.mark.parametrize(("layout", "pools"), [({"dp": 8, "ep": 4}, 4), ({"dp": 4, "cp": 2, "tp": 2, "ep": 8}, 2)])
def test_pools_that_share_experts_are_in_lock_step_in_every_micro_batch(preset, layout, pools):
    one = routed_job(preset, **layout)
    plan = plans_of(one, 8)[-1]
    steps = Steps.of_plans([plan], JobCosts(one))
    ranks = Priced.of(steps.shards, one.costs)
    for phase, own, head in zip(steps.stages, ranks.blocks, ranks.head, strict=True):
        seconds = (own + head).reshape(-1, pools, 2)
        np.testing.assert_allclose(phase[0, ::pools, 0], seconds.max(axis=1))
        assert (phase[0, :, 0] == np.repeat(phase[0, ::pools, 0], pools, axis=0)).all()
    alone = replace(one, layout=replace(one.layout, ep=1))
    free = Steps.of_plans([plan], JobCosts(alone))
    assert steps.where["dp ranks"][0] > 0 < steps.where["expert exchange"][0]
    assert free.where["expert exchange"][0] == 0


def test_experts_see_the_tokens_of_all_ranks_of_their_group():
    """The rank with few tokens waits for the others, and computes its share of their experts."""
    one = routed_job("per-document-4d", dp=4, ep=4)
    steps = simulate_steps([plans_of(one, 1)[0]], one)
    assert isinstance(steps, Steps)
    tokens = steps.shards.tokens.copy()
    tokens[0, 0] //= 2
    uneven = Steps.of_shards(steps.shards._replace(tokens=tokens), JobCosts(one))
    forward, mean = uneven.blocks.forward[0, :, :, 0], tokens[0, :, :, 0].mean(axis=0)
    expected = [one.costs.blocks_seconds(tokens[0, rank, :, 0], "forward", mean) for rank in range(4)]
    np.testing.assert_allclose(forward, expected)
    assert (forward[0] < forward[1]).all()


@settings(max_examples=20, deadline=None)
@given(
    ep=st.sampled_from([2, 4, 8]), tp=st.sampled_from([1, 2]), dp=st.sampled_from([8, 16]), seed=st.integers(0, 10**6)
)
def test_level_rounds_train_every_document_once_on_whole_groups(ep: int, tp: int, dp: int, seed: int):
    lengths = sample_lengths(600, WINDOW, seed)
    packing = {"grouping": "level", "global_batch": 16}
    one = decide(routed_job("balanced", dp=dp, tp=tp, ep=ep, packing=packing), lengths)
    trained, together = list[int](), one.layout.ep_ranks
    for plan in islice(StepPlanner(one, lengths, epochs=1).plans(), 3):
        table = plan.table
        trained += table[:, 0].tolist()
        np.testing.assert_array_equal(table[:, 1:], np.column_stack([0 * table[:, 0], lengths[table[:, 0]]]))
        for part in plan.micro_batches:
            groups = np.unique(np.array(part.ranks) // together)
            assert part.ranks == tuple((groups[:, None] * together + np.arange(together)).ravel().tolist())
            assert part.tokens <= one.max_tokens * len(part.ranks) / one.layout.pool_size + len(part.ranks)
        rounds = [[place for place, part in enumerate(plan.micro_batches) if rank in part.ranks] for rank in range(dp)]
        for first in range(0, dp, together):  # all ranks of a group have the same rounds, and so the same last one
            assert rounds[first]
            assert rounds[first : first + together] == [rounds[first]] * together
    assert len(trained) == len(set(trained))
    assert fits(one)


def test_exchange_and_experts_are_paid_again_by_a_backward_that_recomputes():
    """By hand: the exchange of the fullest rank, experts of the mean one, on ranks with other numbers of tokens."""
    costs = {kind: Costs(ROUTED, H100, tp=2, ep=8, expert_imbalance=1.1, recomputed=kind) for kind in ("none", "full")}
    shards = price_shards([[4000, 90, 7]], 4, "per_document", costs["none"])
    tokens = shards.tokens.copy()
    tokens[0, 0] += 500
    uneven = shards._replace(tokens=tokens)
    none, full = (Priced.of(uneven, one, together=lambda seconds: seconds).blocks for one in costs.values())
    exchange = costs["none"].expert_seconds(tokens.max())
    without = Priced.of(uneven, replace(costs["none"], exposed_exchange=0.0), together=lambda seconds: seconds).blocks
    np.testing.assert_allclose(none.forward - without.forward, exchange)
    np.testing.assert_allclose(none.backward - without.backward, exchange)
    np.testing.assert_allclose(full.backward - none.backward, none.forward)


def test_collectives_of_experts_are_of_every_ep_th_gpu():
    one = routed_job(dp=16, tp=2, ep=16, micro_batches=1)
    experts = 7 / 8 * 3 * 1024 * 16 * 512 / 16  # of a mean block, on a GPU
    others = JobCosts(replace(one, layout=replace(one.layout, ep=1)))
    rest = others.rank.own_weights / 8 / 2 - 7 / 8 * 3 * 1024 * 16 * 512 / 2
    of_experts, of_others = group_link(H100, "all_gather", 2, 16), group_link(H100, "all_gather", 16, 2)
    expected = of_experts.seconds(4 * experts / 2) + of_others.seconds(4 * rest * 15 / 16)
    assert JobCosts(one).block_reduction == pytest.approx(float(expected))


def test_groups_of_ranks_are_planned_as_one_rank():
    slow = tuple(1.0 - 0.1 * (rank == 5) for rank in range(16))
    one = replace(level_job(dp=16, ep=4), speeds=slow)
    assert one.stage_ranks == StageRanks(4, 2, 1, (1.0, 0.9, 1.0, 1.0), 4)
    prices = cast(LevelPrices, one.packing_prices)
    assert prices.max_tokens == -(-one.max_tokens // 4)
    free = routed_job("balanced", dp=16, ep=4)
    assert {choice.layout.pool_size for _, choice in pool_choices(free, documents())} == {4, 8, 16}
    huge = level_groups([80 * 2**14, 100, 100], 2**14, prices, StageRanks(100, 1, together=6))
    assert max(len(group.ranks) for group in huge) == 85 * 6


@pytest.mark.parametrize("window", [2048, 8192])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_bound_of_a_mixture_holds_for_long_micro_batches(window: int, checkpointing: str):
    lengths = sample_lengths(3000, window, 0)
    settings: dict[str, Any] = {"activation_checkpointing": checkpointing, "packing": {"global_batch": 64}}
    one = simulated_job("qwen3-30b-a3b", window, "balanced", dp=16, ep=8, **settings)
    plan = next(StepPlanner(replace(one.with_pools("even", 8, 1), layout=Layout()), lengths).plans())
    work = float(segment_seconds(one.work_prices, plan.table).sum())
    bound = least_seconds(one, [Packed.of_plan(plan, whole=True)]) / work
    for _, choice in pool_choices(one, lengths):
        if holds(choice):
            rated = rate(by_memory(choice), lengths, 1, one.work_prices)
            assert bound <= 1.02 / rated.work_rate, choice.layout  # other documents are in its step


def by_events(one: Job, plan: StepPlan) -> float:
    """When the last rank is done, layer by layer: all ranks of a round meet at both all-to-alls of every layer."""
    layers, clocks = one.shape.layers, np.zeros(one.layout.dp_cp)
    rounds: dict[int, Phases] = {}
    for places, costs, shards in one.level_shards(plan.micro_batches):
        priced = Priced.of(shards, costs, together=lambda seconds: seconds)
        for number, place in enumerate(places):
            both = [blocks[number] / layers for blocks in priced.blocks], [head[number] for head in priced.head]
            rounds[place] = both  # type: ignore[assignment]
    for place, part in enumerate(plan.micro_batches):
        ranks, ((forward, backward), (head, head_backward)) = list(part.ranks), rounds[place]
        for own in (*[forward] * layers, head, head_backward, *[backward] * layers):
            clocks[ranks] = (clocks[ranks].max() if own is forward or own is backward else clocks[ranks]) + own
            clocks[ranks] = clocks[ranks].max()
    return float(clocks.max())


@pytest.mark.parametrize(("ep", "checkpointing"), [(2, "none"), (4, "full"), (8, "keep_attention")])
def test_rounds_take_what_events_take(ep: int, checkpointing: str):
    one = level_job(dp=16, ep=ep, activation_checkpointing=checkpointing)
    for plan in plans_of(one):
        steps = LevelSteps.of_plans([plan], JobCosts(one))
        bare = replace(steps, modelled=steps.modelled - {"weight gathers"})
        assert bare.ends.max() == pytest.approx(by_events(one, plan), rel=1e-9)
        np.testing.assert_allclose(sum(steps.where.values()), steps.seconds)


def test_rounds_are_level_and_leave_the_lock_step_behind():
    one, plain = level_job(dp=16, ep=4), routed_job(dp=16, ep=4, micro_batches=1)
    level = [float(simulate_steps([plan], one).imbalance["dp"][0]) for plan in plans_of(one)]
    assert max(level) < 1.1
    rates = [rate(job, documents(), 3, job.work_prices).tokens_per_second for job in (plain, one)]
    assert rates[1] > rates[0]


def test_memory_has_own_experts_and_shards_of_their_states():
    def parts(ep: int) -> dict[str, int]:
        return predicted_memory(routed_job(dp=8, ep=ep, weights="kept")).parts

    alone, spread = parts(1), parts(8)
    experts = 7 * 3 * 1024 * 16 * 512
    assert spread["weights"] == pytest.approx(alone["weights"], rel=1e-3)  # sharded over all GPUs either way
    assert alone["gathered weights"] - spread["gathered weights"] == pytest.approx(2 * experts * 7 / 8, rel=1e-3)
    assert spread["gradients"] < alone["gradients"]
    even, uneven = (
        predicted_memory(routed_job(dp=8, ep=8, software=Software(expert_imbalance=most))).parts["activations"]
        for most in (1.0, 1.5)
    )
    assert even < uneven


def choices(preset: str, **sizes: int) -> Iterator[int]:
    space = search_space(
        ROUTED, 8, WINDOW, hardware=replace(H100, memory_bytes=6.2e9), batch_tokens=16 * WINDOW, fixed=sizes
    )
    yield from (one.job.layout.ep for one in fastest_layout(space, documents(), preset).ranking)


@pytest.mark.parametrize("preset", ["plain-4d", "balanced"])
def test_every_system_searches_its_own_ep(preset: str):
    assert next(choices(preset, ep=2)) == 2
    assert next(choices(preset)) > 1
