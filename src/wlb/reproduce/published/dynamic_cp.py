"""Placeholder: Megatron's dynamic context parallelism, not simulated yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wlb.reproduce.published.metrics import seconds_of_step
from wlb.reproduce.published.prediction import Prediction
from wlb.reproduce.published.whole_steps import source_of


def dynamic_cp_rows(rows: Sequence[dict[str, Any]]) -> list[Prediction]:
    return [
        Prediction(
            row["table"],
            "",
            f"{row.get('policy')}, {row.get('gpus')} GPUs",
            source_of(row),
            seconds_of_step(row),
            None,
            reason="dynamic context parallelism is not simulated yet",
        )
        for row in rows
    ]
