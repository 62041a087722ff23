"""Documents that fill steps, and those that do not."""

from itertools import islice

import numpy as np
import pytest

from wlb.documents.order import DataConfig, DocumentStream
from wlb.errors import UserError
from wlb.simulate.filling import check_filling, global_batches


def test_documents_that_fill_no_step_and_one_that_fills_far_too_many_are_refused():
    check_filling(np.array([64 * 100]), 100, 10, steps=1)
    check_filling(np.array([99 * 100]), 100, 10, steps=99)
    check_filling(np.array([6401, *[50] * 200]), 100, 10, steps=1)  # one among many
    check_filling(np.array([10**9] * 10), 100, 10, overlong="truncate", steps=1)
    with pytest.raises(UserError, match="the documents have 99 tokens, and one step takes 100; give more documents"):
        check_filling(np.array([90, 9]), 100, 10, steps=1)
    with pytest.raises(UserError, match="the documents have 40 tokens"):
        check_filling(np.array([10**9] * 4), 100, 10, overlong="truncate", steps=1)
    refusal = "document 1 has 6401 tokens and alone fills over 64 steps of 100 tokens; leave it out, cut it, or take"
    with pytest.raises(UserError, match=refusal):
        check_filling(np.array([5, 6401]), 100, 10, steps=1)


def test_batches_are_the_same_however_often_and_far_they_are_drawn():
    lengths = np.random.default_rng(0).integers(1, 100, 200)
    config, expected = DataConfig(store="none", context_window=100), list[int]()
    stream = DocumentStream([lengths], config)
    while len(expected) < 700:
        if stream.epoch_is_over:
            stream.next_epoch()
        expected += stream.take(7)[:, 2].tolist()
    for count in (1, 3, 20, 2):
        batches = [*islice(global_batches(lengths, config, 1000), count)]
        together = np.concatenate(batches)
        assert together.tolist() == expected[: len(together)]
        ends = np.cumsum([batch.sum() for batch in batches])
        assert all(end - 100 < 1000 * (place + 1) <= end for place, end in enumerate(ends))
