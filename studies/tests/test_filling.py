"""Documents of studies: cut where windows end, and no more than steps take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.packing.registry import make_packer
from wlb.workload import make_workload
from wlb_studies.filling import cut_at_windows, documents_for

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 20))
def test_documents_cut_at_windows_are_whole_and_end_with_every_window(lengths: list[int], window: int):
    pieces = cut_at_windows([Segment(document, 0, length) for document, length in enumerate(lengths)], window)
    for document, length in enumerate(lengths):
        own = [piece for piece in pieces if piece.document == document]
        assert [piece.start for piece in own] == [0, *np.cumsum([piece.length for piece in own])[:-1]]
        assert sum(piece.length for piece in own) == length
    ends = set(np.cumsum([piece.length for piece in pieces]).tolist())
    assert set(range(window, sum(lengths) + 1, window)) <= ends


def test_sequential_and_balanced_train_the_same_segments_of_documents_that_are_cut():
    lengths = np.random.default_rng(0).integers(1, 700, 60)
    documents, _ = documents_for(lengths, 4, 256, overlong="cut")
    workload = make_workload("tiny", "cpu")
    plain, balanced = (
        make_packer(name, micro_batches=4, context_window=256, workload=workload).plan(documents)
        for name in ("sequential", "balanced")
    )
    together = list(zip(plain, balanced, strict=False))
    assert len(together) > 10
    for left, right in together:
        assert sorted(left.segments) == sorted(right.segments)


def test_one_document_that_fills_far_too_many_steps_is_refused_if_it_is_taken():
    documents_for(np.array([5] * 40 + [10**6]), 10, 10, steps=1)  # one that comes too late to be taken
    with pytest.raises(UserError, match="document 1 has 6401 tokens and alone fills over 64 steps of 100 tokens"):
        documents_for(np.array([5, 6401]), 10, 10, steps=1)
