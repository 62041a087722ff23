"""A published measurement beside what the simulator predicts for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wlb.errors import UserError

# What reading or pricing a row raises where the row has another form than its table's.
ODD = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError)


@dataclass(frozen=True)
class Prediction:
    """One measurement of ``table``, in seconds; ``run`` and ``row`` say which of it, ``source`` who measured.

    Without ``predicted_seconds`` there is a ``reason``: what the publication does not say. ``assumed`` is what had to
    be taken for granted where it does not. ``kind`` groups measurements across tables. ``measured_seconds`` is None
    where what was published cannot be converted to seconds, and then so is the prediction. What is ``left_out`` of
    statistics says why.
    """

    table: str
    run: str
    row: str
    source: str
    measured_seconds: float | None
    predicted_seconds: float | None
    reason: str | None = None
    assumed: str | None = None
    kind: str | None = None
    left_out: str | None = None


def why(error: Exception) -> str:
    """The reason that stands in place of a prediction, for one of ``ODD``."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyError):
        return f"its {error.args[0]} is not published"
    return f"it does not have its table's format: {error}"


def source_of(row: Mapping[str, Any]) -> str:
    """Repository, commit and path."""
    return " ".join(str(row.get(name) or f"{name}?") for name in ("repo", "commit", "path"))
