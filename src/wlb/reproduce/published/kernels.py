"""Placeholder: kernels, not priced yet."""

from __future__ import annotations

from typing import Any

from wlb.reproduce.published.prediction import Prediction


def kernel_rows(document: dict[str, Any]) -> list[Prediction]:
    return [
        Prediction(
            name,
            "",
            f"row {index}",
            f"{table['repo']} {table['commit']} {table['path']}",
            None,
            None,
            reason="kernels are not priced yet",
        )
        for name, table in document["kernels"].items()
        for index, _ in enumerate(table["rows"])
    ]
