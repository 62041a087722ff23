"""Presets beside published measurements: the table of published_measurements.md says what the presets give."""

from pathlib import Path
from typing import NamedTuple

import pytest

from wlb.workload import HARDWARE, ModelShape, make_workload
from wlb.workload.base import Phase
from wlb.workload.flops import attention_flops
from wlb.workload.hardware import Hardware
from wlb.workload.links import group_link

DOCUMENTED = Path(__file__).with_name("published_measurements.md")


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
    """TFLOP/s of a matrix product, or of attention over documents of ``size`` tokens, or GB/s."""
    if what.startswith("attention"):
        return attention_rate(hardware, "backward" if "backward" in what else "forward", size)
    rates = {
        "matrix product": hardware.peak_flops * hardware.gemm_efficiency / 1e12,
        "element-wise": hardware.memory_bandwidth / 1e9,
    }
    return rates[what] if what in rates else group_link(hardware, "all_gather", size, 1).bandwidth / 1e9


def attention_rate(hardware: Hardware, phase: Phase, size: int) -> float:
    """TFLOP/s of 16 heads over 16K tokens, which the published runs have (arXiv 2407.08608, section 4.1)."""
    shape = ModelShape(2048, 1, 16, 16, 128, 8192, 32_000)
    workload, documents = make_workload(shape, hardware), 16_384 // size
    seconds = documents * workload.attention_seconds(size, phase) + workload.drain_seconds(size, phase)
    return documents * float(attention_flops(shape, size, phase) / seconds) / 1e12


# Held against whole steps only (tests/studies/published), or another preset with these kernels.
WITHOUT_KERNELS = {"cpu", "h200-fa3", "h200-cudnn", "b200-cudnn", "b300", "gb200", "gb300"}


def test_the_table_is_that_of_the_presets():
    table = rows()
    assert {row.preset for row in table} == set(HARDWARE) - WITHOUT_KERNELS
    for row in table:
        rate = given(HARDWARE[row.preset], row.what, row.size)
        assert rate == pytest.approx(row.given, abs=0.51), row
        assert rate / row.published - 1 == pytest.approx(row.error, abs=0.0051), row


def test_long_documents_memory_and_rings_are_within_a_tenth():
    long = [row for row in rows() if row.what != "matrix product" and not 8 < row.size < 8192]
    assert max(abs(row.error) for row in long) <= 0.10
