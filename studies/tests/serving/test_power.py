"""Watts over the clock: known at both ends, steeper above the transition, least energy for the same work there."""

import numpy as np
import pytest

from wlb.workload import hardware_preset, make_workload
from wlb_studies.serving.power import POWER, TRANSITION_CLOCK


@pytest.mark.parametrize("name", POWER)
def test_power_over_the_clock(name: str):
    power, clocks = POWER[name], np.linspace(0.01, 1.0, 100)
    watts = np.array([power.watts(clock) for clock in clocks])
    assert watts[0] == pytest.approx(power.idle_watts, rel=0.1)
    assert watts[-1] == pytest.approx(power.full_watts)
    rise = np.diff(watts)
    below = clocks[1:] < TRANSITION_CLOCK
    np.testing.assert_allclose(rise[below], rise[0])
    assert np.all(np.diff(rise[~below]) > 0)
    assert clocks[(watts / clocks).argmin()] == pytest.approx(TRANSITION_CLOCK, abs=0.01)


def test_a_slower_clock_slows_arithmetic_and_nothing_else():
    hardware = hardware_preset("h100")
    half = hardware.computing_at(0.5)
    assert make_workload("7b", half).attention_seconds([4096], "forward")[0] == pytest.approx(
        2 * make_workload("7b", hardware).attention_seconds([4096], "forward")[0]
    )
    assert (half.memory_bandwidth, half.node_bandwidth) == (hardware.memory_bandwidth, hardware.node_bandwidth)
    assert hardware.computing_at(1.0) == hardware
