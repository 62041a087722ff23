"""Parses whole numbers, and numbers of tokens such as 131_072, 128K or 1M (K is 1024, M is 1024 K)."""

import re
from operator import index
from typing import Any

from wlb.errors import UserError

MOST_TOKENS = 2**31 - 1  # of a document, a window, a batch
_UNITS = {"": 1, "K": 1024, "M": 1024**2}
_WRITTEN = re.compile(r"(\d+(?:_\d+)*)([KM]?)", re.ASCII | re.IGNORECASE)
_LONGEST = 40  # characters of wrong input that an error shows
_MOST_DIGITS = 20  # more than any count has; int() refuses thousands of digits


def parse_count(text: str) -> int | None:
    """The whole number in ``text``; None for anything but the digits 0 to 9, such as digits of other scripts."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def whole_number(value: Any) -> int | None:
    """``value`` as a plain ``int`` if it is an integer, such as one of NumPy, and not a ``bool``; else None."""
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def check_whole(name: str, value: Any, least: int = 1) -> int:
    """``value`` of ``name`` as a plain ``int``. Raises ``UserError`` unless it is a whole number >= ``least``."""
    if (number := whole_number(value)) is None or number < least:
        raise UserError(f"{name} = {value!r} is not a whole number >= {least}; give one")
    return number


def parse_tokens(text: str) -> int:
    """The number of tokens in ``text``, from 1 to 2**31 - 1. Raises ``UserError`` for anything else."""
    written = _WRITTEN.fullmatch(text.strip())
    if written is not None and len(text) <= _LONGEST:
        tokens = int(written[1]) * _UNITS[written[2].upper()]
        if 1 <= tokens <= MOST_TOKENS:
            return tokens
    raise UserError(
        f"{text[:_LONGEST]!r} is not a number of tokens from 1 to {MOST_TOKENS}; write it as 131072, 128K or 1M"
    )
