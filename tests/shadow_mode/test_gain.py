"""A gain is what balanced steps take by prices that are found again, whatever the clock and wherever ranks wait."""

from math import isnan

import numpy as np
import pytest

from wlb.errors import UserError
from wlb.shadow_mode.gain import Measured, gain_of
from wlb.workload.fitted import FittedPrices

TRUE = FittedPrices(square=2e-9, token=3e-6, fixed=4e-3, r_squared=1.0)


def steps_of(count: int, ranks: int = 2, micro_batches: int = 3, width: int = 0) -> list[list[list[Measured]]]:
    """Random documents, in rows of ``width`` tokens where it is given, and the seconds of their true prices."""
    rng = np.random.default_rng(0)

    def measured() -> Measured:
        documents = np.minimum(rng.lognormal(6, 1.2, 6), width or 20_000).astype(np.int64) + 1
        computed = np.full(6, width + 1) if width else documents
        return Measured(computed, documents, TRUE.seconds(computed))

    return [[[measured() for _ in range(micro_batches)] for _ in range(ranks)] for _ in range(count)]


def waiting(steps: list[list[list[Measured]]], inside: bool) -> list[list[list[Measured]]]:
    """As a clock measures that includes waiting for the slowest rank, in every micro-batch or in the last one."""
    waited = []
    for step in steps:
        ends = max(sum(one.seconds for one in rank) for rank in step)
        slots = [max(one.seconds for one in slot) for slot in zip(*step, strict=True)]
        ranks = []
        for rank in step:
            seconds = slots if inside else [one.seconds for one in rank]
            late = 0 if inside else ends - sum(seconds)
            seconds = [*seconds[:-1], seconds[-1] + late]
            ranks.append([one._replace(seconds=own) for one, own in zip(rank, seconds, strict=True)])
        waited.append(ranks)
    return waited


@pytest.mark.parametrize("inside", [False, True])
def test_both_clocks_say_the_same(inside: bool):
    steps = steps_of(64)
    gain = gain_of(steps, waits_inside=inside)
    assert (gain.prices.square, gain.prices.token) == pytest.approx((TRUE.square, TRUE.token), rel=1e-6)
    assert gain.own == pytest.approx(gain.measured) == pytest.approx(gain.unpadded)
    assert gain.speed > 1.1
    assert gain.imbalance > 1.05
    waited = gain_of(waiting(steps, inside), waits_inside=inside, on_cuda=True)
    for name in ("imbalance", "measured", "own", "unpadded", "balanced"):
        assert getattr(waited, name) == pytest.approx(getattr(gain, name), rel=1e-3)


def test_even_micro_batches_keep_what_they_have():
    rows = [[[Measured(np.array([512]), np.array([512]), TRUE.seconds([512]))] * 2] * 2] * 8
    gain = gain_of(rows, waits_inside=False)
    assert gain.speed == pytest.approx(1)
    assert gain.imbalance == pytest.approx(1)
    assert gain.verdict == "keep what you have: balanced steps gain under 5%"


def test_padding_is_told_from_balance():
    gain = gain_of(steps_of(64, width=1000), waits_inside=False)
    assert gain.own / gain.unpadded > 1.2
    assert f"(padding {gain.own / gain.unpadded:.2f}x, " in str(gain)
    assert "train with context_window=" in gain.verdict


def test_processes_with_the_same_documents_count_as_one():
    steps = steps_of(32)
    tensor_parallel = [[rank for rank in step for _ in range(2)] for step in steps]
    twice, once = (gain_of(each, waits_inside=False) for each in (tensor_parallel, steps))
    assert twice.speed == pytest.approx(once.speed)
    assert twice.balanced == pytest.approx(once.balanced)


@pytest.mark.parametrize("on_cuda", [False, True])
def test_a_gain_that_prices_do_not_explain_is_claimed_nowhere(on_cuda: bool):
    rng = np.random.default_rng(0)
    steps = [[[one._replace(seconds=rng.random()) for one in rank] for rank in step] for step in steps_of(32)]
    gain = gain_of(steps, waits_inside=False, on_cuda=on_cuda)
    assert gain.prices.r_squared < 0.5
    assert gain.verdict.startswith("the gain is unknown: prices explain ")
    assert "x as fast" not in str(gain)
    assert isnan(gain.speed)
    unexplained = {"measured", "square", "token", "fixed", "r_squared"} | ({"imbalance"} if not on_cuda else set())
    assert {name.removeprefix("wlb_shadow/") for name in gain.values} == unexplained


def test_one_process_has_no_balance_to_gain():
    single = [
        [[one._replace(documents=one.documents[:2], computed=one.computed[:2])] * 4] for ((one, *_), _) in steps_of(64)
    ]
    timed = [[[one._replace(seconds=TRUE.seconds(one.computed)) for one in rank] for rank in step] for step in single]
    gain = gain_of(timed, waits_inside=False)
    assert (gain.speed, gain.unpadded) == (1, gain.own)  # though packing would make fewer micro-batches
    assert "1.00x as fast (padding 1.00x, no balance on one process)" in str(gain)
    assert gain.verdict.startswith("keep what you have")
    assert gain_of(steps_of(64, ranks=1, width=1000), waits_inside=False).speed > 1.2


def test_too_few_micro_batches_are_refused():
    with pytest.raises(UserError, match="at least 8 measured micro-batches"):
        gain_of(steps_of(1), waits_inside=False)
    with pytest.raises(UserError, match="no optimizer step was measured on all processes"):
        gain_of([], waits_inside=False)
