"""Numbers as people write them: whole ones, and of tokens also 131_072, 128K or 1M (K is 1024 and M is 1024 K)."""

from __future__ import annotations

import re
from operator import index
from typing import Any

from wlb.errors import UserError

MOST_TOKENS = 2**31 - 1  # of a document, a window, a batch
_UNITS = {"": 1, "K": 1024, "M": 1024**2}
_WRITTEN = re.compile(r"(\d+(?:_\d+)*)([KM]?)", re.ASCII | re.IGNORECASE)
_LONGEST = 40  # characters of what is no number that an error shows
_MOST_DIGITS = 20  # of a whole number: more than any count has, and int() refuses thousands


def parse_count(text: str) -> int | None:
    """The number that ``text`` says in the digits 0 to 9; None for anything else, such as digits of other scripts."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def whole_number(value: Any) -> int | None:
    """``value`` as a plain ``int``, where it is one or converts to one as NumPy's integers do, and is no ``bool``."""
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def positive_integer(name: str, value: Any) -> int:
    """``value`` as a plain ``int``. Raises ``UserError`` where it is none of at least 1."""
    if (number := whole_number(value)) is None or number < 1:
        raise UserError(f"{name} = {value!r} is not a whole number of at least 1")
    return number


def parse_tokens(text: str) -> int:
    """The number of tokens that ``text`` says, from 1 to 2**31 - 1. Raises ``UserError`` for anything else."""
    written = _WRITTEN.fullmatch(text.strip())
    if written is not None and len(text) <= _LONGEST:
        tokens = int(written[1]) * _UNITS[written[2].upper()]
        if 1 <= tokens <= MOST_TOKENS:
            return tokens
    raise UserError(
        f"{text[:_LONGEST]!r} is not a number of tokens from 1 to {MOST_TOKENS}; write it as 131072, 128K or 1M"
    )
