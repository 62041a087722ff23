"""How blocks are dealt to pipeline stages."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from wlb.errors import UserError
from wlb.schedules.layout import Layout, split_layers
from wlb.workload.shapes import ModelShape


def _shape(layers: int, vocab_size: int = 256) -> ModelShape:
    return ModelShape(128, layers, 4, 4, 32, 352, vocab_size)


@given(st.integers(1, 130), st.integers(1, 64), st.integers(1, 2_000_000))
def test_every_block_has_one_stage_and_every_stage_a_block(layers: int, stages: int, vocab_size: int) -> None:
    assume(layers >= stages)
    split = split_layers(_shape(layers, vocab_size), Layout(pp=stages))
    assert [block for stage in split for block in stage] == list(range(layers))
    assert len(split) == stages
    assert min(len(stage) for stage in split) >= 1
    sizes = [len(stage) for stage in split[:-1]]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    sizes = [len(stage) for stage in split_layers(_shape(layers, vocab_size=1), Layout(pp=stages))]
    assert max(sizes) - min(sizes) <= 1


def test_a_large_vocabulary_takes_blocks_from_the_last_stage() -> None:
    # A block has 200,704 weights here; a head of two blocks' weights leaves the last of four stages short of two.
    split = split_layers(_shape(30, vocab_size=2 * 200_704 // 128), Layout(pp=4))
    assert [len(stage) for stage in split] == [8, 8, 8, 6]
    assert all(left.stop == right.start for left, right in pairwise(split))


def test_fewer_blocks_than_stages_is_refused() -> None:
    with pytest.raises(UserError, match=r"3 layers, fewer than the 4 pipeline stages; lower pp or"):
        split_layers(_shape(3), Layout(pp=4))
