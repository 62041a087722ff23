"""A published measurement beside what the simulator predicts for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """One measurement of ``table``, in seconds; ``run`` and ``row`` say which of it, ``source`` who measured.

    Without ``predicted_seconds`` there is a ``reason``: what the publication does not say. ``assumed`` is what had to
    be taken for granted where it does not. ``kind`` groups measurements across tables. ``measured_seconds`` is None
    where what was published cannot be converted to seconds, and then so is the prediction.
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
