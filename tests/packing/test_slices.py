"""Steps of equal micro-batches, in which long documents are cut into slices."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wlb.packing.plan import PlannedMicroBatch
from wlb.packing.slices import QUERY_TILE, sliced_pipelines


class Prices:
    """Attention and everything else cost alike at 8192 tokens."""

    def document_seconds(self, lengths):
        tokens = np.asarray(lengths, np.float64)
        return 1e-6 * (tokens + tokens**2 / 8192)


def _seconds(one: PlannedMicroBatch, lengths: list[int]) -> float:
    price = Prices().document_seconds
    return float(sum(price([lengths[d] for d in one.documents])) + price(one.stop) - price(one.start))


def _tokens(one: PlannedMicroBatch, lengths: list[int]) -> int:
    return sum(lengths[document] for document in one.documents) + one.stop - one.start


@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=60),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([2_500, 20_000]),
)
def test_every_token_is_trained_once_and_slices_follow_each_other(lengths, columns, micro_batches, least):
    capacity = max(least, 2 * sum(lengths) // (columns * micro_batches))
    planned, left = sliced_pipelines(lengths, columns, micro_batches, capacity, Prices())
    assert [len(column) for column in planned] == [micro_batches] * columns
    whole = [document for column in planned for one in column for document in one.documents]
    cut: dict[int, list[tuple[int, int]]] = {one.sliced: [] for column in planned for one in column if one.sliced >= 0}
    for column in planned:
        for one, after in zip(column, [*column[1:], PlannedMicroBatch(())], strict=True):
            assert _tokens(one, lengths) <= capacity
            if one.sliced >= 0:
                cut[one.sliced].append((one.start, one.stop))
                assert one.stop == lengths[one.sliced] or (after.sliced, after.start) == (one.sliced, one.stop)
                assert one.start % QUERY_TILE == 0
    assert sorted([*whole, *cut, *left]) == list(range(len(lengths)))
    for document, pieces in cut.items():
        assert pieces[0][0] == 0
        assert pieces[-1][1] == lengths[document]


def test_micro_batches_are_even_where_one_document_has_half_of_the_work():
    lengths = [131_072, *[2_000] * 500]
    (column,), left = sliced_pipelines(lengths, 1, 16, 400_000, Prices())
    seconds = [_seconds(one, lengths) for one in column]
    assert not left
    assert max(seconds) < 1.05 * sum(seconds) / len(seconds)
    slices = [one.stop - one.start for one in column if one.sliced >= 0]
    assert len(slices) > 4
    assert slices == sorted(slices, reverse=True), "later slices attend more, so they are shorter"


def test_no_more_slices_than_micro_batches():
    """Three documents a little dearer than a share, which two slices each would make six."""
    (column,), left = sliced_pipelines([40_000, 40_000, 40_000], 1, 4, 200_000, Prices())
    assert len(column) == 4
    assert not left


def test_what_has_no_room_is_left():
    (column,), left = sliced_pipelines([1000] * 5, 1, 2, 2000, Prices())
    assert len(left) == 1
    assert [_tokens(one, [1000] * 5) for one in column] == [2000, 2000]


def test_whole_documents_have_room_before_slices_are_even():
    """Five documents in six micro-batches; all are dearer than a share."""
    lengths = [1920, 2048, 1920, 2048, 1920]
    (column,), left = sliced_pipelines(lengths, 1, 6, 2730, Prices())
    assert not left
    assert sorted(_tokens(one, lengths) for one in column) == [0, *sorted(lengths)]


def test_slices_stay_even_where_only_a_little_has_no_room():
    """Fewer slices would have room for all, in micro-batches of up to 1.5 times the mean work."""
    lengths = [426_341, *[6367] * 35]
    (column,), left = sliced_pipelines(lengths, 1, 5, 131_072, Prices())
    seconds = [_seconds(one, lengths) for one in column]
    assert len(left) == 1
    assert max(seconds) < 1.2 * np.mean(seconds)


def test_slices_are_cut_again_where_micro_batches_hold_less_than_a_document():
    lengths = [20_000, 9_000, *[500] * 60]
    (column,), left = sliced_pipelines(lengths, 1, 12, 7_000, Prices())
    assert not left
    assert max(_tokens(one, lengths) for one in column) <= 7_000
    assert sum(_tokens(one, lengths) for one in column) == sum(lengths)


@given(st.integers(1, 40_000), st.integers(1, 12), st.integers(QUERY_TILE, 9_000))
def test_a_document_has_room_if_it_fits_whole_tiles_of_its_micro_batches(length, micro_batches, max_tokens):
    (column,), left = sliced_pipelines([length], 1, micro_batches, max_tokens, Prices())
    fits = length <= max(max_tokens, micro_batches * (max_tokens // QUERY_TILE * QUERY_TILE))
    assert left == [0] * (not fits)
    assert max(_tokens(one, [length]) for one in column) <= max_tokens
