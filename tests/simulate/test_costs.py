"""What the software around the kernels adds to a step: gathers, reductions, copies and overlap."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.simulate.jobs import SHAPE, WINDOW
from wlb.job.prices import Software
from wlb.simulate import simulated_job
from wlb.simulate.costs import JobCosts
from wlb.workload import hardware_preset

H100 = hardware_preset("h100")
FORWARD, BACKWARD = np.full((1, 1, 1, 3), 0.02), np.full((1, 1, 1, 3), 0.04)  # of a step of three micro-batches


def costs(software: Software, hardware: Any = H100, **layout: Any) -> JobCosts:
    sizes: dict[str, Any] = {"dp": 16, "micro_batches": 3, "weights": "gathered"} | layout
    return JobCosts(simulated_job(SHAPE, WINDOW, "plain-4d", hardware=hardware, software=software, **sizes))


def added(software: Software, moving: float = 0.0, **layout: Any) -> tuple[list[float], list[float]]:
    """Seconds that gathers and reductions add to each micro-batch."""
    forward, backward = costs(software, **layout).with_gathers(FORWARD, BACKWARD, moving=moving)
    return (forward - FORWARD).ravel().tolist(), (backward - BACKWARD).ravel().tolist()


def test_collectives_beside_computing_show_what_outlasts_it_and_a_share():
    of_job = costs(Software())
    shown = of_job.beside_computing(2.0, np.array([0.0, 1.0, 2.0, 5.0]))
    np.testing.assert_allclose(shown, [2.0, 1.0 + 0.4, 0.8, 0.8])
    ideal = costs(Software(), replace(H100, exposed=0.0))
    np.testing.assert_allclose(ideal.beside_computing(2.0, np.array([1.0, 5.0])), [1.0, 0.0])


def test_weights_are_gathered_as_the_software_does():
    """Our trainer gathers for every backward, and keeps weights for the next forward."""
    ours, always = added(Software()), added(Software(syncs_always=True))
    auto, kept = (added(Software(), weights=weights) for weights in ("auto", "kept"))
    assert ours[0][0] > 0
    assert ours[0][1:] == [0, 0]
    assert always[0][1] == pytest.approx(always[0][0])
    assert always[1][2] == ours[1][2]
    assert always[1][0] > ours[1][0]  # reduces gradients too
    assert kept[1] == [0, 0, 0]
    assert 0 < kept[0][0] < ours[0][0]
    assert auto == kept


def test_without_prefetch_every_gather_shows_whole():
    of_job = costs(Software(prefetch=False))
    blocks, copies = SHAPE.layers, SHAPE.layers * of_job.block_copy
    expected = float(of_job.root_gather[0]) + blocks * of_job.block_gather + copies
    assert added(Software(prefetch=False))[1] == pytest.approx([expected] * 3)
    assert added(Software())[1][0] < expected
    assert of_job.block_copy > 0
    assert costs(Software(), dp=1).block_copy == 0


def test_gathers_wait_for_keys_and_values():
    alone, beside = added(Software()), added(Software(), moving=0.04)
    assert all(b > a for a, b in zip(alone[1], beside[1], strict=True))


def test_power_changes_what_it_should():
    plain, capped = (costs(Software(), hardware).rank for hardware in (H100, H100.computing_at(0.5**0.5)))
    assert capped.blocks_seconds(4096, "forward") > plain.blocks_seconds(4096, "forward")
    assert capped.piece_seconds(0, 4096, "forward") == pytest.approx(2**0.5 * plain.piece_seconds(0, 4096, "forward"))
