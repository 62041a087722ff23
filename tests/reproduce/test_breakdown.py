"""What the breakdown varies is what it says."""

from __future__ import annotations

from dataclasses import fields

import pytest

from wlb.reproduce.breakdown import LEFT_OUT, ONE_BY_ONE, PricedJob
from wlb.simulate import SimulatedJob, simulated_job

WINDOW = 8192


def job(preset: str = "best", **changed: object) -> SimulatedJob:
    return simulated_job("7b", WINDOW, preset, tp=8, cp=2, pp=2, **changed)  # type: ignore[arg-type]


def priced(job: SimulatedJob, *, sharded: bool) -> PricedJob:
    return PricedJob(**{field.name: getattr(job, field.name) for field in fields(SimulatedJob)}, sharded=sharded)


def test_prices_are_chosen_whatever_the_packer_takes():
    best = job()
    assert best.packing_prices != best.workload
    assert priced(best, sharded=True).packing_prices == best.packing_prices
    assert priced(best, sharded=False).packing_prices == best.workload
    other = job(packing={"method": "variable_length"})
    assert other.packing_prices == other.workload
    assert priced(other, sharded=True).packing_prices == best.packing_prices


@pytest.mark.parametrize("name", [*LEFT_OUT][1:])
def test_one_thing_is_left_out(name: str):
    """A setting of packing, or sharding, or the prices; never two of them."""
    variant, best = LEFT_OUT[name], job()
    varied = job(variant.preset, **variant.changed)
    packing = {key for key, value in varied.packing.model_dump().items() if getattr(best.packing, key) != value}
    differences = [*packing]
    differences += ["sharding"] if varied.sharding != best.sharding else []
    differences += ["prices"] if variant.sharded_prices is False else []
    assert len(differences) == 1


def test_one_by_one_ends_at_best():
    assert [*ONE_BY_ONE.values()][-1] == LEFT_OUT["nothing: best"]
    last = [variant for name, variant in ONE_BY_ONE.items() if name.startswith("+")][:-1]
    assert all(variant.preset == "best" and variant.sharded_prices is False for variant in last)
