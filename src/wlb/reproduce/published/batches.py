"""Placeholder: measured batches, not simulated yet."""

from __future__ import annotations

from typing import Any

from wlb.reproduce.published.prediction import Prediction


def measured_batch_rows(document: dict[str, Any]) -> list[Prediction]:
    return [
        Prediction(
            f"measured batches, {run['config'].get('mode')}",
            run["path"],
            f"batch {index}",
            f"hao-ai-lab/DistCA {run.get('commit')} {run['path']}",
            batch["ms"] / 1e3,
            None,
            reason="measured batches are not simulated yet",
        )
        for run in document["runs"]
        for index, batch in enumerate(run["batches"])
    ]
