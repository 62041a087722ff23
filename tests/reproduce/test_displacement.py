"""Displacement against placing documents by hand."""

from __future__ import annotations

import numpy as np

from wlb.documents.order import shuffled
from wlb.reproduce.displacement import displacement

LENGTHS = np.array([30, 10, 20, 40, 50, 50])
TOKENS = [100, 100]


def test_arrival_order_is_no_displacement():
    order, room = shuffled(6, 0, 0).tolist(), 0
    steps: list[list[int]] = [[], []]
    for document in order:
        room += LENGTHS[document]
        steps[int(room > 100)].append(document)
    assert displacement(steps, TOKENS, LENGTHS, 0) == (0.0, 0.0, 0.0)


def test_a_late_document_counts_with_its_tokens():
    lengths, tokens = np.full(8, 50), [100, 100, 100, 100]
    order = shuffled(8, 3, 0).tolist()
    late = [order[1:3], order[3:5], order[5:7], [order[7], order[0]]]  # the first three steps late, others early by one
    found = displacement(late, tokens, lengths, 3)
    assert found.longest == 3
    assert found.moved == 1 / 8
    assert found.mean_steps == (3 + 3) / 8  # documents 2, 4 and 6 of the order come a step early


def test_documents_of_later_epochs_have_places_after_the_first():
    lengths = np.full(4, 50)
    first, second = (shuffled(4, 1, epoch) + 4 * epoch for epoch in (0, 1))
    steps = [first[:2].tolist(), first[2:].tolist(), second[:2].tolist(), second[2:].tolist()]
    assert displacement(steps, [100] * 4, lengths, 1) == (0.0, 0.0, 0.0)
