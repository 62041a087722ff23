"""The search ranks what fits, by simulated speed at equal work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulate.jobs import SHAPE, WINDOW, documents
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.memory.fit import fits
from wlb.simulate.search import explanation, layout_of, packing_of, search, search_space
from wlb.workload import hardware_preset

SMALL = replace(hardware_preset("h100"), memory_bytes=16e9)


@pytest.fixture(scope="module")
def found():
    space = search_space(SHAPE, 4, WINDOW, hardware=SMALL, batch_tokens=8 * WINDOW, steps=2)
    progress: list[tuple[int, int]] = []
    lengths = sample_lengths(2000, WINDOW, median_fraction=1 / 32)
    result = search(space, lengths, on_progress=lambda done, of: progress.append((done, of)))
    assert [done for done, _ in progress] == [*range(1, len(progress) + 1)]
    assert progress[-1][0] <= progress[-1][1]
    return result


def test_everything_ranked_uses_all_gpus_and_fits(found):
    assert found.layouts > 5
    speeds = [result.speed_at_equal_work(found.plain) for result in found.ranking]
    assert speeds == sorted(speeds, reverse=True)
    for result in found.ranking:
        assert result.job.layout.world_size == 4
        assert result.job.packing.micro_batches == 8
        assert fits(result.job)
        assert result.job.packing.method != "sequential"


def test_every_system_is_tried(found):
    packings = [result.job.packing for result in found.ranking]
    assert {packing.method for packing in packings} == {"fixed_greedy", "variable_length", "makespan"}


def test_plain_is_the_winners_layout(found):
    assert layout_of(found.plain.job) == layout_of(found.winner.job)
    assert packing_of(found.plain.job) == "sequential, per_sequence"


def test_the_explanation_adds_up(found):
    saved = sum(seconds for _, seconds in explanation(found.winner, found.plain))
    scale = found.winner.work_seconds / found.plain.work_seconds
    assert saved == pytest.approx(found.plain.mean_step_seconds * scale - found.winner.mean_step_seconds)


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs():
    tight = replace(SMALL, memory_bytes=1e9)
    space = search_space(SHAPE, 1, WINDOW, hardware=tight, batch_tokens=WINDOW)
    with pytest.raises(UserError, match=r"no layout of 1 GPUs with 0.931 GiB each .* the best needs"):
        search(space, documents())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((SHAPE, 0, WINDOW), "gpus = 0"), ((SHAPE, 8, 2**25), "holds no window of 33554432")],
)
def test_mistakes_are_named_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message):
        search_space(*arguments)


def test_gpus_that_no_layout_divides_are_told_from_memory_that_is_too_small():
    with pytest.raises(UserError, match=r"no layout of 3 GPUs divides a global batch of 16 windows .* another number"):
        search(search_space(SHAPE, 3, WINDOW, batch_tokens=16 * WINDOW), documents())
    tiny = replace(SMALL, memory_bytes=1e6)
    with pytest.raises(UserError, match=r"with 0.* GiB each fits .*tried, the best needs [0-9.]+ GiB\)"):
        search(search_space(SHAPE, 2, WINDOW, hardware=tiny, batch_tokens=16 * WINDOW), documents())
