"""Numbers as people write them, those of tokens with binary units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import in_turn
from wlb.errors import UserError
from wlb.token_count import MOST_TOKENS, parse_count, parse_tokens


@in_turn(
    ("text", "tokens"), [("131_072", 131072), (" 4096 ", 4096), ("128K", 131072), ("128k", 131072), ("3m", 3 << 20)]
)
def test_units_are_binary(text, tokens):
    assert parse_tokens(text) == tokens


@in_turn("text", ["", "-1", "+1", " 1", "1_0", "１", "٣", "²", "9" * 21])
def test_counts_are_written_in_plain_digits(text):
    assert parse_count(text) is None
    assert parse_count("0012") == 12


@given(st.integers(1, MOST_TOKENS))
def test_plain_numbers_stay(tokens):
    assert parse_tokens(str(tokens)) == tokens


@in_turn(
    "text", ["", "K", "0K", "-1K", "1.5K", "128KB", "128 K", "1e5", "1__0", "2048M", "2147483648", "²", "٣", "9" * 99]
)
def test_anything_else_is_refused_by_name(text):
    message = "is not a number of tokens from 1 to 2147483647; write it as 131072, 128K"
    with pytest.raises(UserError, match=message) as error:
        parse_tokens(text)
    assert repr(text[:40]) in str(error.value)
