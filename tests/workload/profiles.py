"""Profiles as if measured: of any seconds, or of what the analytic workload says."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.workload import ModelShape, make_workload
from wlb.workload.base import Phase
from wlb.workload.profile import Measurements, PrefixMeasurements, WorkloadProfile

PHASES: tuple[Phase, Phase] = ("forward", "backward")
PREFIX = PrefixMeasurements(
    queries=(16, 32), keys=(64, 128), forward_seconds=((1, 2), (3, 4)), backward_seconds=((1, 2), (3, 4))
)


def profile_of(
    shape: ModelShape, attention: Measurements, linear: Measurements, prefix: PrefixMeasurements = PREFIX
) -> WorkloadProfile:
    return WorkloadProfile(
        machine="a test",
        versions={"torch": "2.13.0"},
        dtype="float32",
        clock="none",
        threads=1,
        model=shape,
        attention=attention,
        linear=linear,
        prefix_attention=prefix,
    )


def analytic_profile(
    shape: ModelShape, hardware: str = "cpu", tokens: Sequence[int] = (64, 512, 4096), times: float = 1.0
) -> WorkloadProfile:
    """What measuring would give if everything took so many ``times`` what the analytic workload says."""
    workload, sizes = make_workload(shape, hardware), np.array(tokens)
    attention, linear = (
        _measured(tokens, [times * price(sizes, phase) for phase in PHASES])
        for price in (workload.attention_seconds, workload.linear_seconds)
    )
    queries, keys = np.meshgrid(sizes, sizes, indexing="ij")
    prefix = [
        times * (workload.piece_seconds(keys, keys + queries, phase) - workload.attention_seconds(queries, phase))
        for phase in PHASES
    ]
    forward, backward = (tuple(map(tuple, table.tolist())) for table in prefix)
    table = PrefixMeasurements(
        queries=tuple(tokens), keys=tuple(tokens), forward_seconds=forward, backward_seconds=backward
    )
    return profile_of(shape, attention, linear, table)


def _measured(tokens: Sequence[int], seconds: list[NDArray[np.float64]]) -> Measurements:
    forward, backward = (tuple(of_phase.tolist()) for of_phase in seconds)
    return Measurements(tokens=tuple(tokens), forward_seconds=forward, backward_seconds=backward)
