"""Presets beside published measurements: the table of docs/presets.md says what the presets give."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from wlb.workload import HARDWARE
from wlb.workload.hardware import Hardware
from wlb.workload.links import group_link

DOCUMENTED = Path(__file__).parents[2] / "docs" / "presets.md"


class Row(NamedTuple):
    preset: str
    what: str
    size: int
    published: float
    given: float
    error: float


def rows() -> list[Row]:
    text = DOCUMENTED.read_text(encoding="utf-8").partition("| Preset | What | Size |")[2]
    found = []
    for line in text.splitlines()[2:]:
        if not line.startswith("|"):
            break
        preset, what, size, published, given, error, _ = (cell.strip() for cell in line.strip("|").split("|"))
        percent = float(error.replace("−", "-").removesuffix("%"))
        found.append(Row(preset.strip("`"), what, int(size or 0), float(published), float(given), percent / 100))
    return found


def given(hardware: Hardware, what: str, size: int) -> float:
    """TFLOP/s of ``size`` tokens, or GB/s."""
    filled = size / (size + hardware.attention_half_length)
    rates = {
        "matrix product": hardware.peak_flops * hardware.gemm_efficiency / 1e12,
        "attention forward": hardware.attention_forward_flops * filled / 1e12,
        "attention backward": hardware.attention_backward_flops * filled / 1e12,
        "element-wise": hardware.memory_bandwidth / 1e9,
    }
    return rates[what] if what in rates else group_link(hardware, "all_gather", size, 1).bandwidth / 1e9


def test_the_table_is_that_of_the_presets():
    table = rows()
    assert {row.preset for row in table} == set(HARDWARE) - {"cpu"}
    for row in table:
        rate = given(HARDWARE[row.preset], row.what, row.size)
        assert rate == pytest.approx(row.given, abs=0.51), row
        assert rate / row.published - 1 == pytest.approx(row.error, abs=0.0051), row


def test_long_documents_memory_and_rings_are_within_a_tenth():
    long = [row for row in rows() if row.what != "matrix product" and not 8 < row.size < 8192]
    assert max(abs(row.error) for row in long) <= 0.10
