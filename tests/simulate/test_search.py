"""The search finds the layout that is fastest of all, of every preset by itself."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product
from statistics import fmean
from typing import Any, get_args

import numpy as np
import pytest

from tests.simulate.jobs import SHAPE, WINDOW, documents
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.config import PRESETS
from wlb.job.job import Job
from wlb.job.memory.fit import fits, largest_factor
from wlb.job.planner import StepPlanner
from wlb.schedules.layout import Layout, Weights
from wlb.simulate import decide as decide_module
from wlb.simulate import search, simulated_job
from wlb.simulate.decide import Choice, Packed, by_memory, decide
from wlb.simulate.rate import rate, simulate_steps
from wlb.simulate.search import drawn, fastest_layout, least_seconds
from wlb.simulate.space import SearchSpace, search_space
from wlb.workload import hardware_preset, make_workload
from wlb.workload.base import Checkpointing

SMALL = replace(hardware_preset("h100"), memory_bytes=16e9)
STEPS, DRAWS, WARM_UP = 4, 3, 4


def jobs_in_all_layouts(space: SearchSpace, preset: str, lengths: np.ndarray) -> Iterator[Job]:
    """Every job that fits, found without the search: each layout with each kind of activation checkpointing."""
    sizes = [size for size in range(1, space.gpus + 1) if space.gpus % size == 0]
    handlings: tuple[Weights, ...] = ("kept", "gathered")
    for tp, cp, pp, stages, weights in product(sizes, sizes, sizes, (1, 2, 4, 8), handlings):
        dp, rest = divmod(space.gpus, tp * cp * pp)
        if rest or not dp or space.hardware.node_size % tp or space.shape.kv_heads % tp or (pp == 1 and stages > 1):
            continue
        if pp > 1 and weights == "gathered":
            continue
        layout = Layout(tp, cp, pp, dp, stages, "interleaved_1f1b" if stages > 1 else "1f1b", weights)
        if preset != "balanced" and (space.global_batch % dp or space.global_batch // dp < pp):
            continue
        for kind in get_args(Checkpointing):
            with suppress(UserError):
                job = simulated_job(
                    space.shape,
                    space.context_window,
                    preset,
                    hardware=space.hardware,
                    packing={"global_batch": space.global_batch},
                    activation_checkpointing=kind,
                    **vars(layout),
                )
                if job.packing.reads("max_length_factor") and not job.packing.is_balanced:
                    room = largest_factor(job)
                    if room is None:
                        continue
                    job = job.with_length_factor(min(float(job.packing.max_length_factor), room))
                job = decide(job, lengths)
                if fits(job):
                    yield job


def of_draws(job: Job, space: SearchSpace, lengths: np.ndarray) -> float:
    prices, warm_up = (
        make_workload(space.shape, space.hardware),
        WARM_UP if job.packing.max_delay else 0,  # as the search rates jobs whose documents may wait
    )
    return fmean(rate(drawn(job, n), lengths, STEPS, prices, warm_up).work_rate for n in range(DRAWS))


def random_space(seed: int) -> tuple[SearchSpace, str, np.ndarray]:
    random = np.random.default_rng(seed)
    gpus, windows = int(random.choice([4, 8, 16])), int(random.choice([8, 16, 32]))
    window = int(random.choice([4096, 16_384, 65_536, 131_072]))
    model = str(random.choice(["550m", "qwen2.5-7b", "llama3-8b", "30b"]))
    memory = float(random.choice([40e9, 80e9, 141e9]))
    hardware = replace(hardware_preset("h100"), memory_bytes=memory, node_size=int(random.choice([4, 8])))
    lengths = sample_lengths(4000, window, seed, median_fraction=float(random.choice([1 / 128, 1 / 16])))
    preset = [*PRESETS][seed % len(PRESETS)]
    return search_space(model, gpus, window, hardware=hardware, batch_tokens=windows * window), preset, lengths


@pytest.mark.parametrize(
    ("preset", "gpus"), [("plain-4d", 4), ("balanced", 2), pytest.param("balanced", 4, marks=pytest.mark.exhaustive)]
)
def test_no_step_takes_less_than_the_bound(preset: str, gpus: int):
    """On the same documents, in every layout: the search stops where the bound falls behind what it has."""
    lengths = documents(800)
    space = search_space(SHAPE, gpus, WINDOW, hardware=SMALL, batch_tokens=4 * WINDOW)
    for job in jobs_in_all_layouts(space, preset, lengths):
        plan = next(StepPlanner(job, lengths).plans())
        whole = replace(plan, ranks=(plan.micro_batches,))
        if job.packing.assignment == "arrival":  # undo the dealing
            whole = replace(plan, ranks=(tuple(chain(*zip(*plan.ranks, strict=True))),))
        assert least_seconds(job, [Packed.of_plan(whole)]) <= float(simulate_steps([plan], job).seconds[0])


def test_ranks_share_a_dealt_head_in_the_bound():
    dealt = simulated_job(SHAPE, WINDOW, "balanced", pp=2, dp=2, head="dealt", stage_blocks=(4, 4))
    packed = Packed([np.array([WINDOW])])
    (blocks,), (head,) = packed.blocks_and_heads(dealt)
    assert least_seconds(dealt, [packed]) == pytest.approx((blocks + head) / 4)


@pytest.mark.parametrize(
    ("window", "device", "given", "expected"),
    [
        (8192, "h100", None, [1]),
        (1024, "h100", None, [1, 2, 4, 8, 16]),  # a GPU waits for the host
        (1024, "cpu", None, [1]),
        (1024, "h100", 2, [2]),
    ],
)
def test_small_micro_batches_may_have_several_windows(window, device, given, expected, monkeypatch):
    monkeypatch.setattr("wlb.workload.costs._HOST_SECONDS", 1e-3)
    tokens = None if given is None else given * window
    space = search_space(SHAPE, 4, window, hardware=device, batch_tokens=16 * window, micro_batch_tokens=tokens)
    assert search._micro_batch_windows(space) == expected


def test_sizes_that_are_fixed_are_kept():
    space = search_space(SHAPE, 8, WINDOW, batch_tokens=16 * WINDOW, fixed={"tp": 2, "pp": 2})
    for rated in fastest_layout(space, documents(), "balanced").ranking:
        assert (rated.job.layout.tp, rated.job.layout.pp, rated.job.layout.world_size) == (2, 2, 8)


def test_a_schedule_that_is_fixed_is_that_of_every_layout():
    space = search_space(SHAPE, 8, WINDOW, batch_tokens=16 * WINDOW, fixed={"pp": 2, "schedule": "1f1b"})
    for preset in ("plain-4d", "balanced"):
        layouts = [rated.job.layout for rated in fastest_layout(space, documents(), preset).ranking]
        assert {(layout.pp, layout.virtual_pp, layout.schedule) for layout in layouts} == {(2, 1, "1f1b")}


def test_of_a_layout_that_is_given_something_comes_back_though_it_does_not_fit():
    tiny = replace(SMALL, memory_bytes=1e6)
    sizes = {"tp": 1, "cp": 1, "pp": 1, "dp": 2}
    space = search_space(SHAPE, 2, WINDOW, hardware=tiny, batch_tokens=16 * WINDOW, fixed=sizes)
    for preset in ("plain-4d", "balanced"):
        job = fastest_layout(space, documents(), preset).job
        assert not fits(job)
        assert job.activation_checkpointing == "full"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((SHAPE, 0, WINDOW), "gpus = 0"), ((SHAPE, 8, 2**25), "smaller than one context window of 33554432")],
)
def test_mistakes_are_named_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message):
        search_space(*arguments, batch_tokens=2**22)


def test_gpus_that_no_layout_divides_are_told_from_memory_that_is_too_small():
    space = search_space(SHAPE, 37, WINDOW, batch_tokens=16 * WINDOW, fixed={"cp": 1})
    with pytest.raises(UserError, match=r"37 GPUs with cp = 1 cannot share a step of 16 windows .* another number"):
        fastest_layout(space, documents(), "wlb-llm")
    tiny = replace(SMALL, memory_bytes=1e6)
    with pytest.raises(UserError, match=r"no layout of 2 GPUs with 0.* GiB each fits this model"):
        fastest_layout(search_space(SHAPE, 2, WINDOW, hardware=tiny, batch_tokens=16 * WINDOW), documents(), "wlb-llm")


# `make test` tries two of the paper's systems, quick to try in all layouts, and below plain-4d; `test-all` all jobs.
QUICK = (7, 28)


@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(30) if seed not in QUICK)]
)
def test_no_layout_is_faster_than_the_one_found_by_more_than_a_hundredth(seed: int):
    space, preset, lengths = random_space(seed)
    while not (rates := {j: of_draws(j, space, lengths) for j in jobs_in_all_layouts(space, preset, lengths)}):
        with pytest.raises(UserError, match="no layout of"):
            fastest_layout(space, lengths, preset)
        seed += 30
        space, preset, lengths = random_space(seed)
    found = fastest_layout(space, lengths, preset).job
    assert fits(found)
    assert of_draws(found, space, lengths) >= 0.99 * max(rates.values())


@pytest.mark.parametrize("preset", ["plain-4d", pytest.param("per-document-4d", marks=pytest.mark.exhaustive)])
def test_gpus_need_not_be_a_power_of_two(preset: str):
    lengths = sample_lengths(2000, 65_536, 0)
    space = search_space("550m", 6, 65_536, batch_tokens=6 * 65_536)
    rates = [of_draws(job, space, lengths) for job in jobs_in_all_layouts(space, preset, lengths)]
    assert of_draws(fastest_layout(space, lengths, preset).job, space, lengths) >= 0.99 * max(rates)


def test_a_layout_that_is_unlucky_in_one_step_of_many_windows_is_rated_on_more():
    """The draw decides by 5% in the first step, though it has 64 windows."""
    space = search_space("550m", 32, 131_072, hardware="a100", batch_tokens=2**23)
    layout = fastest_layout(space, sample_lengths(20_000, 131_072, 9), "per-document-4d").job.layout
    assert (layout.tp, layout.cp, layout.pp, layout.virtual_pp, layout.dp) == (4, 2, 1, 1, 4)


def test_a_layout_that_is_lucky_in_the_first_draw_only_is_not_the_fastest(monkeypatch: pytest.MonkeyPatch):
    lengths = sample_lengths(4000, 32_768, 0)
    space = search_space("550m", 8, 32_768, batch_tokens=2**18)
    fastest, second, *_ = fastest_layout(space, lengths, "per-document-4d").ranking
    rated, simulated = search._rated, decide_module._simulated

    def is_lucky(job: Job) -> bool:
        return job.layout == second.job.layout

    def in_first_draw(choice: Choice, *given: Any) -> Choice:
        found = simulated(choice, *given)
        return found._replace(seconds=found.seconds / (1.03 if is_lucky(by_memory(choice.job)) else 1))

    def in_others(job: Job, *given: Any) -> search.Rated:
        return rated(job, *given)._replace(work_rate=0.8 if is_lucky(job) else rated(job, *given).work_rate)

    monkeypatch.setattr(decide_module, "_simulated", in_first_draw)
    monkeypatch.setattr(search, "_rated", in_others)
    assert fastest_layout(space, lengths, "per-document-4d").job == fastest.job
