"""The file that the GPU suite writes, what it prints of it, and how far predictions are from what it measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from parts.gpu.setting import Comparison, Result, Row, Setting
from parts.measurement import machine, versions

DIGITS = 5  # of a number in the file


class Report:
    """Grows section by section, and is written anew after each."""

    def __init__(self, setting: Setting, out: Path) -> None:
        self.failed = False
        self._out = out
        self._console = Console(width=160)
        self._comparisons: list[Comparison] = []
        self._content: dict[str, Any] = {
            "machine": machine() | _device(setting),
            "versions": versions("wlb-llm", "numpy", "torch", "triton"),
            "setting": asdict(setting) | {"dtype": str(setting.dtype)},
            "sections": {},
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        self._write()
        self._console.print(self._content["machine"] | self._content["versions"])

    def add(self, name: str, seconds: float, result: Result) -> None:
        self.failed = self.failed or result.problem is not None
        self._comparisons += result.comparisons
        self._content["sections"][name] = {"seconds": seconds, "problem": result.problem, "rows": result.rows}
        self._content["comparisons"] = [asdict(comparison) for comparison in self._comparisons]
        self._content["errors"] = _errors(self._comparisons)
        if result.profile is not None:
            self._content["profile"] = result.profile.model_dump(mode="json", exclude_none=True)
        self._write()
        self._show(f"{name}, {seconds:.0f} s" + (f": {result.problem}" if result.problem else ""), result.rows)

    def conclude(self) -> None:
        self._show("errors of predictions, as shares of what was measured", self._content["errors"])
        self._console.print(f"results: {self._out}")

    def _write(self) -> None:
        self._out.write_text(json.dumps(_rounded(self._content)) + "\n", encoding="utf-8")

    def _show(self, title: str, rows: Sequence[Row]) -> None:
        """A table of whatever the rows have, but for lists."""
        table = Table(title=title)
        flat = [dict(_cells(row)) for row in rows]
        for heading in flat[0] if flat else ():
            table.add_column(heading, justify="right")
        for cells in flat:
            table.add_row(*cells.values())
        self._console.print(table)


def _errors(comparisons: Iterable[Comparison]) -> list[Row]:
    """Median, 90th percentile and worst error of every workload on every kind of work, over measured seconds."""
    return [
        {"what": comparison.what, "workload": name, "count": len(predicted)} | _summary(predicted, comparison.measured)
        for comparison in comparisons
        for name, predicted in comparison.predicted.items()
    ]


def _summary(predicted: list[float], measured: list[float]) -> dict[str, float]:
    shares = np.abs(np.array(predicted) / np.array(measured) - 1)
    return {"median": float(np.median(shares)), "p90": float(np.quantile(shares, 0.9)), "worst": float(shares.max())}


def _device(setting: Setting) -> dict[str, str]:
    if setting.device == "cpu":
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": f"{properties.total_memory / 2**30:.0f}",
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def _cells(row: Row) -> Iterator[tuple[str, str]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _cells({f"{key}, {name}": inner for name, inner in value.items()})
        elif not isinstance(value, list):
            yield key, f"{value:.4g}" if isinstance(value, float) else str(value)
