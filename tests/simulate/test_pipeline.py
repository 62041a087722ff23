import numpy as np
import pytest

from wlb.errors import UserError
from wlb.simulate.pipeline import pipeline_makespan, pipeline_makespans


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (1, 5), (2, 2), (4, 8), (8, 8), (4, 2)])
def test_equal_times_give_the_textbook_makespan(schedule, pp, micro_batches):
    forward, backward = np.full((pp, micro_batches), 1.0), np.full((pp, micro_batches), 2.5)
    expected = (micro_batches + pp - 1) * 3.5
    assert pipeline_makespan(schedule, forward, backward) == pytest.approx(expected)


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank():
    pp, micro_batches, virtual_stages = 4, 8, 2
    forward = np.full((pp * virtual_stages, micro_batches), 1.0)
    expected = micro_batches * virtual_stages * 3 + (pp - 1) * 3
    assert pipeline_makespan("interleaved_1f1b", forward, 2 * forward, virtual_stages) == expected


def test_unknown_schedule_lists_the_choices():
    with pytest.raises(UserError, match="1f1b, interleaved_1f1b, gpipe"):
        pipeline_makespan("zb", np.ones((2, 2)), np.ones((2, 2)))


def test_a_batch_is_priced_like_its_members():
    rng = np.random.default_rng(0)
    forward, backward = rng.random((2, 3, 5, 4, 8))
    together = pipeline_makespans("1f1b", forward, backward)
    assert together.shape == (3, 5)
    assert together[1, 2] == pipeline_makespan("1f1b", forward[1, 2], backward[1, 2])
