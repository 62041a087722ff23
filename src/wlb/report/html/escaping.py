"""HTML that escapes by construction: ``tag`` escapes every child and attribute that is not ``Markup`` already."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = {"meta", "br"}


class Markup(str):
    """Text that is HTML already. Only ``tag``, ``join`` and constants of this package make it."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float) -> Markup:
    """``<name attributes>children</name>``; an underscore in an attribute's name is a hyphen, a last one nothing."""
    written = ""
    for key, value in attributes.items():
        # Coordinates have two decimals: a hundredth of a pixel.
        text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        written += f' {key.rstrip("_").replace("_", "-")}="{escape(text)}"'
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Markup:
    """All parts one after another, those that are plain text escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))
