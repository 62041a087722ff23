"""No order of calls of a real job can hang, and the proof would notice one that can."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from tests.training.jobs import job
from tests.training.order.calls import COUNTS, EXPERTS, GRADIENTS, KEYS_AND_VALUES, STAGES, TENSOR_PARALLEL, Call
from tests.training.order.fake_rank import RankRun, run_fake_ranks
from tests.training.order.order import OrderError, check_order
from wlb.job.config import PRESETS
from wlb.schedules.operations import HEAD

NOWHERE = Path("/nowhere")
MIXTURE = {"experts": 8, "experts_per_token": 2, "expert_hidden": 16, "shared_expert_hidden": 8, "router": "sigmoid"}


@cache
def runs_of(
    preset: str,
    hardware: str,
    checkpointing: str,
    layout: tuple[tuple[str, int], ...],
    seed: int = 0,
    tied: bool = False,
    steps: int = 2,  # later ones gather weights in another order than the first
    packing: tuple[tuple[str, Any], ...] = (),
) -> dict[int, RankRun]:
    """The ranks of a job; with ``ep`` in its layout, of a mixture of experts, whose first block of two is dense."""
    parallel: dict[str, Any] = dict(layout)
    if parallel.get("virtual_pp", 1) > 1:
        parallel["schedule"] = "interleaved_1f1b"
    stages = parallel.get("pp", 1) * parallel.get("virtual_pp", 1)
    ranks = parallel.get("dp", 1) * parallel.get("cp", 1)
    model: dict[str, Any] = {"layers": stages, "heads": 4, "kv_heads": 4, "vocab_size": 64, "tied_embeddings": tied}
    training: dict[str, Any] = {"activation_checkpointing": checkpointing}
    if "ep" in parallel:
        model |= MIXTURE | {"layers": max(2, stages), "first_dense_layers": int(stages == 1)}
        training |= {"router_z_loss": 0.001}
    config = job(
        NOWHERE,
        preset,
        model=model,
        data={"seed": seed},
        parallel=parallel,
        packing={"global_batch": 2 * ranks * parallel.get("pp", 1), **dict(packing)},
        training=training,
    )
    return run_fake_ranks(config, hardware, range(config.parallel.layout.world_size), steps)


def calls_of(*job: Any, **settings: Any) -> dict[int, list[Call]]:
    runs = runs_of(*job, **settings)
    return {rank: [call for calls in (run.setup, *run.steps) for call in calls] for rank, run in runs.items()}


def layout(**sizes: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sizes.items())


LEVEL = ("balanced", "h100", "none", layout(dp=2, cp=2))
FEW = layout(global_batch=2)
SLICES = layout(global_batch=2, grouping="slices", rank_micro_batches=2)
ROUNDS = layout(global_batch=1, grouping="level", max_length_factor=1.0)
# Two groups of two ranks, which run different numbers of rounds.
LEVEL_EXPERTS = ("balanced", "h100", "none", layout(dp=4, ep=2), 0, False, 2, ROUNDS)


@pytest.mark.parametrize(
    ("job", "purposes"),
    [
        (LEVEL, {GRADIENTS}),
        (("plain-4d", "h100", "full", layout(dp=2, tp=2, ep=4), 0, False, 1, FEW), {TENSOR_PARALLEL, EXPERTS}),
        pytest.param(  # slices run the same stages and exchanges
            ("plain-4d", "h100", "keep_attention", layout(cp=2, pp=2, ep=2), 0, False, 2, FEW),
            {STAGES, KEYS_AND_VALUES, EXPERTS},
            marks=pytest.mark.exhaustive,
        ),
        (
            ("balanced", "h100", "none", layout(dp=2, pp=2, pool=2, ep=2), 0, True, 1, SLICES),
            {STAGES, KEYS_AND_VALUES, EXPERTS},
        ),
        (LEVEL_EXPERTS, {COUNTS, EXPERTS}),
    ],
    ids=["balanced", "pools that share experts", "1F1B", "slices", "level rounds"],
)
def test_every_call_of_a_job_can_be_made(job, purposes):
    calls = calls_of(*job)
    assert check_order(calls) == sum(map(len, calls.values())) + creations(calls)
    assert all(purposes <= {call.purpose for call in of_rank} for of_rank in calls.values())
    for run in runs_of(*job).values():
        used = {call.group for calls in run.steps for call in calls}
        assert used <= {call.group for call in run.setup}, "a communicator that did not exist before the first step"


def test_pipelines_that_deal_a_head_differently_can_make_every_call():
    dealt = layout(dp=2, pp=2, pool=1, head="dealt")
    job = "balanced", "h100", "none", dealt, 1, True, 2, layout(global_batch=2, grouping="slices", rank_micro_batches=3)
    calls = calls_of(*job)
    assert check_order(calls) == sum(map(len, calls.values())) + creations(calls)
    plans = [run.plan.operations for rank, run in sorted(runs_of(*job).items()) if rank < 2]
    heads = [{one for of_rank in plan[dp] for one in of_rank if one.kind == HEAD} for dp, plan in enumerate(plans)]
    assert {one.stage for one in heads[0]} == {one.stage for one in heads[1]} == {0, 1}
    assert heads[0] != heads[1]


def test_ranks_that_share_experts_run_as_many_rounds_and_other_ranks_another_number():
    calls = calls_of(*LEVEL_EXPERTS)
    counts = [sum(call.purpose == COUNTS for call in calls[rank]) for rank in sorted(calls)]
    assert counts[0] == counts[1] != counts[2] == counts[3]


def test_the_ends_of_a_pipeline_can_sum_the_gradients_of_tied_embeddings():
    """Interleaved schedules never create the communicator of a pipeline, and the ends are two of its three ranks."""
    calls = calls_of("plain-4d", "h100", "none", layout(pp=3, virtual_pp=2, dp=2), tied=True, steps=1)
    assert check_order(calls) == sum(map(len, calls.values())) + creations(calls)

    def warms(call: Call) -> bool:
        return call.operation == "all_reduce" and len(call.members) == 3

    assert all(sum(map(warms, of_rank)) == 1 for of_rank in calls.values())
    unwarmed = {rank: [call for call in of_rank if not warms(call)] for rank, of_rank in calls.items()}
    with pytest.raises(OrderError, match=r"rank 0 at send to rank 4 .* of 3\) waits for rank 2, rank 2 at all_gather"):
        check_order(unwarmed)


@st.composite
def layouts(draw):
    """Sizes of every dimension, of eight ranks at most, and the kind of output head."""
    sizes: dict[str, Any] = {}
    for name in draw(st.permutations(["pp", "dp", "cp", "tp"])):
        room = 8 // math.prod(sizes.values())
        sizes[name] = draw(
            st.sampled_from([size for size in (1, 2, 3, 4) if size <= room and (name, size) != ("tp", 3)])
        )
    if sizes["pp"] > 1:
        sizes["virtual_pp"] = draw(st.sampled_from([1, 2]))
        sizes["head"] = draw(st.sampled_from(["last", "dealt"]))
    if draw(st.booleans()):  # a mixture of experts
        dp, cp = sizes["dp"], sizes["cp"]
        together = [size for size in (1, 2, 4, 8) if dp * cp % size == 0 and (cp % size == 0 or size % cp == 0)]
        sizes["ep"] = sizes["tp"] * draw(st.sampled_from(together))
    return layout(**sizes)


# The same proof on plans and layouts that nobody has chosen.
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@settings(max_examples=examples(5), deadline=None)
@given(
    preset=st.sampled_from(list(PRESETS)),
    checkpointing=st.sampled_from(["none", "keep_attention", "full"]),
    sizes=layouts(),
    seed=st.integers(0, 1000),
    tied=st.booleans(),
)
def test_every_call_of_any_job_can_be_made(preset, checkpointing, sizes, seed, tied):
    calls = calls_of(preset, "h100", checkpointing, sizes, seed, tied)
    assert check_order(calls) == sum(map(len, calls.values())) + creations(calls)


@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_a_call_that_one_rank_leaves_out_is_found(data):
    calls = calls_of(*data.draw(st.sampled_from([LEVEL, LEVEL_EXPERTS])))
    rank = data.draw(st.sampled_from(sorted(calls)))
    left_out = data.draw(st.integers(0, len(calls[rank]) - 1))
    shortened = calls | {rank: calls[rank][:left_out] + calls[rank][left_out + 1 :]}
    with pytest.raises(OrderError, match=r"rank \d"):
        check_order(shortened)


def test_ranks_that_send_before_they_receive_wait_for_each_other():
    def message(operation: str, peer: int, batch: int | None) -> Call:
        return Call(operation, "activations of stages", "1", (0, 1), peer, ("float32", 8), 0, batch)

    def exchange(batch: int | None) -> dict[int, list[Call]]:
        return {rank: [message("send", 1 - rank, batch), message("receive", 1 - rank, batch)] for rank in (0, 1)}

    assert check_order(exchange(batch=0)) == 2 * 2 + 2
    with pytest.raises(
        OrderError, match=r"rank 0 at send to rank 1 .* waits for rank 1, rank 1 at .* waits for rank 0"
    ):
        check_order(exchange(batch=None))


def test_groups_in_different_orders_and_different_sizes_are_found():
    def collective(group: str, elements: int = 8) -> Call:
        return Call("all_gather", "gathering weights", group, (0, 1), None, ("float32", elements), 0)

    a, b = collective("a"), collective("b")
    assert check_order({0: [a, b], 1: [a, b]}) == 2 * 2 + 2 * 2
    with pytest.raises(OrderError, match=r"waits for"):
        check_order({0: [a, b], 1: [b, a]})
    with pytest.raises(OrderError, match=r"all_gather of \('float32', 8\).* rank 1 at .*16"):
        check_order({0: [a], 1: [collective("a", 16)]})


def creations(calls: dict[int, list[Call]]) -> int:
    """First calls of communicators, which wait for all their members."""
    alone = {"send", "receive"}
    return sum(
        len({call.group for call in of_rank if call.batch is not None or call.operation not in alone})
        for of_rank in calls.values()
    )
