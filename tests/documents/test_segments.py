import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.documents.segments import OverlongReport, Segment, split_overlong
from wlb.errors import UserError

segments_of = st.lists(st.builds(Segment, st.integers(0, 1000), st.integers(0, 50), st.integers(0, 300)), max_size=30)


def split(segments, limit, policy="split"):
    pieces, report = split_overlong(np.array(segments, np.int64).reshape(-1, 3), limit, policy)
    return [*map(Segment._make, pieces.tolist())], report


def tokens_of(segments):
    return [(s.document, t) for s in segments for t in range(s.start, s.start + s.length)]


@given(segments_of, st.integers(1, 80))
def test_split_keeps_every_token_in_order(segments, limit):
    result, report = split(segments, limit)
    assert tokens_of(result) == tokens_of(segments)
    assert all(s.length <= limit for s in result)
    overlong = [s for s in segments if s.length > limit]
    assert report == OverlongReport(len(overlong), sum(-(-s.length // limit) for s in overlong), 0)


@given(segments_of, st.integers(1, 80))
def test_truncate_keeps_the_first_tokens_and_drop_removes_exactly_the_overlong(segments, limit):
    over = [s.length for s in segments if s.length > limit]
    result, report = split(segments, limit, "truncate")
    assert result == [Segment(s.document, s.start, min(s.length, limit)) for s in segments]
    assert report == OverlongReport(len(over), len(over), sum(length - limit for length in over))
    result, report = split(segments, limit, "drop")
    assert result == [s for s in segments if s.length <= limit]
    assert report == OverlongReport(len(over), 0, sum(over))


@given(segments_of, st.integers(1, 80), st.integers(0, 30), st.sampled_from(["split", "truncate", "drop"]))
def test_reports_of_batches_add_up(segments, limit, cut, policy):
    whole, report = split(segments, limit, policy)
    first, one = split(segments[:cut], limit, policy)
    second, two = split(segments[cut:], limit, policy)
    assert first + second == whole
    assert one + two == report


def test_mistakes_are_named_with_limit_and_remedy():
    with pytest.raises(
        UserError, match=r"document 1042 has 9000 tokens, over the context window of 4096; .*: split, truncate, drop"
    ):
        split([Segment(1, 0, 5), Segment(1042, 0, 9000)], 4096, "error")
    with pytest.raises(UserError, match="'wrap' is unknown; choose from split"):
        split([], 4, "wrap")
    with pytest.raises(UserError, match="limit on document length is 0"):
        split([], 0)


def test_millions_of_pieces_are_refused_and_other_policies_are_not():
    segments = [Segment(7, 0, 2**31 - 1), Segment(8, 0, 9)]
    with pytest.raises(UserError, match=r"make 536870915 pieces, .* document 7, has 2147483647 tokens; raise"):
        split(segments, 4)
    assert split(segments, 4, "truncate")[0] == [Segment(7, 0, 4), Segment(8, 0, 4)]
