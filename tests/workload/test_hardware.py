"""Rates of a device in the type that a job computes in."""

from dataclasses import replace

import pytest

from wlb.workload import HARDWARE, hardware_preset
from wlb.workload.hardware import BLACKWELL_KERNELS, HOPPER_KERNELS


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_wider_types_take_more_bytes_and_more_time(name):
    in_type = [hardware_preset(name).computing_in(dtype) for dtype in ("bfloat16", "float32", "float64")]
    assert [rates.bytes_per_value for rates in in_type] == [2, 4, 8]
    peaks = [rates.peak_flops for rates in in_type]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[2]
    shares = [rates.attention.forward_flops / rates.peak_flops for rates in in_type]
    assert shares == pytest.approx([shares[0]] * 3)
    own = {2: "bfloat16", 4: "float32"}[hardware_preset(name).bytes_per_value]
    assert hardware_preset(name).computing_in(own) == hardware_preset(name)


def test_presets_named_after_kernels_attend_with_them():
    for name in ("h100-fa3", "h200-fa3", "h200-cudnn", "b200-cudnn", "b200-fa4"):
        device, kernels = name.split("-")
        plain, own = hardware_preset(device), hardware_preset(name)
        of_device = BLACKWELL_KERNELS if device == "b200" else HOPPER_KERNELS
        assert own == replace(plain, attention=of_device[kernels]) != plain
