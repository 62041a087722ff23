"""One verdict: what it is made of, which preset it names, and when it says to keep what one has."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.documents.synthetic import sample_lengths
from wlb.simulate import CAUSES, SimulationResult
from wlb.simulate.estimate import Estimate, estimate
from wlb.simulate.space import search_space
from wlb.simulate.verdict import BALANCED, BASELINE, FACTORS, LOST, PARTS, PER_DOCUMENT, Verdict, rounded

WINDOW = 8192
LENGTHS = sample_lengths(2000, WINDOW, seed=1)


@pytest.fixture(scope="module")
def found() -> Estimate:
    space = search_space("550m", 4, WINDOW, LENGTHS, batch_tokens=16 * WINDOW, fixed={"cp": 2, "tp": 1})
    return estimate(space, LENGTHS, (BASELINE, BALANCED, PER_DOCUMENT), 4, source="lengths.json")


def with_speeds(results: Mapping[str, SimulationResult], speeds: Mapping[str, Sequence[float]]) -> Verdict:
    """Draws in which each system has these speeds over the baseline."""
    return Verdict(
        {
            name: [
                replace(results[name], step_tokens=[1000], step_work_seconds=[1.0], step_seconds=[1 / speed])
                for speed in of_draws
            ]
            for name, of_draws in ({BASELINE: [1.0] * 3} | dict(speeds)).items()
        }
    )


def test_parts_are_the_whole_step(found: Estimate):
    assert sorted(cause for causes in PARTS.values() for cause in causes) == sorted(CAUSES)
    verdict = found.verdict
    assert verdict.draws == 3
    assert {len(result.step_seconds) for result in verdict.systems.values()} == {12}
    for name in verdict.systems:
        assert sum(verdict.parts(name).values()) == pytest.approx(1 / verdict.speed(name))
        low, high = verdict.spread(name)
        assert low <= verdict.speed(name) <= high


def test_factors_multiply_to_the_speed_and_balance_gives_no_more_than_is_lost(found: Estimate):
    verdict = found.verdict
    assert [*verdict.factors] == [*FACTORS]
    assert prod(verdict.factors.values()) == pytest.approx(verdict.speed(verdict.winner))
    assert verdict.factors["balance"] <= 1 / (1 - sum(verdict.parts(verdict.base)[part] for part in LOST)) + 1e-9


@pytest.mark.parametrize(
    ("of_another", "of_balanced", "winner"),
    [
        ([1.2] * 3, [1.4] * 3, BALANCED),
        ([1.2] * 3, [1.23] * 3, BALANCED),
        ([1.2] * 3, [1.22] * 3, PER_DOCUMENT),  # a smaller change with nearly all of the gain
        ([1.2] * 3, [1.1] * 3, PER_DOCUMENT),
        ([1.06, 1.3, 1.2], [1.1] * 3, PER_DOCUMENT),
        ([0.9] * 3, [0.8] * 3, BASELINE),
        ([1.04] * 3, [1.03] * 3, BASELINE),
        ([1.046] * 3, [1.0] * 3, PER_DOCUMENT),  # it is shown as 1.05x, and 5% is enough
        ([0.99, 1.3, 1.2], [1.1] * 3, BASELINE),
    ],
)
def test_the_smallest_change_with_the_gain_wins_if_it_gains_enough_in_every_draw(
    found: Estimate, of_another, of_balanced, winner
):
    verdict = with_speeds(found.verdict.systems, {PER_DOCUMENT: of_another, BALANCED: of_balanced})
    assert verdict.winner == winner
    assert verdict.headline.startswith("Keep what you have" if winner == BASELINE else f"Switch to {winner}")


def test_a_speed_is_that_of_all_draws_together(found: Estimate):
    verdict = with_speeds(found.verdict.systems, {BALANCED: [1.3, 1.1, 1.2], PER_DOCUMENT: [1.0] * 3})
    assert verdict.speed(BALANCED) == pytest.approx(3 / (1 / 1.3 + 1 / 1.1 + 1 / 1.2))
    assert verdict.spread(BALANCED) == pytest.approx((1.1, 1.3))
    assert verdict.headline == "Switch to balanced: 1.19x the tokens per second of plain-4d."
    assert verdict.reasons[0].startswith("Range: 1.10x to 1.30x in 3 shuffles of the documents; 1.05x if it is as far")


def test_what_is_printed_is_tokens_over_seconds():
    """Of random jobs, searched for and given: every speedup is a quotient of the tokens and seconds beside it."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        window, gpus = int(random.choice([4096, 16_384])), int(random.choice([2, 4]))
        lengths = sample_lengths(1500, window, seed, median_fraction=float(random.choice([1 / 64, 1 / 8])))
        fixed: list[dict[str, int | str]] = [{}, {"dp": gpus, "cp": 1, "pp": 1, "tp": 1}, {"weights": "gathered"}]
        space = search_space("550m", gpus, window, lengths, batch_tokens=8 * window, fixed=fixed[seed])
        said = estimate(space, lengths, (BASELINE, PER_DOCUMENT, BALANCED), 2, source="x").to_json()
        rates = {row["system"]: row["tokens"] / row["steps"] / row["mean_step_seconds"] for row in said["systems"]}
        for row in said["systems"]:
            assert row["speedup"] == pytest.approx(rates[row["system"]] / rates[BASELINE])
            assert row["tokens_per_second"] == pytest.approx(rates[row["system"]])
        shown = said["speedup"] if said["winner"] != BASELINE else max(row["speedup"] for row in said["systems"])
        assert f"{shown:.2f}x the tokens per second of plain-4d" in said["verdict"] or round(shown, 2) == 1
        assert said["gpu_hours_a_day"] == pytest.approx(24 * gpus * (1 - 1 / said["speedup"]))


def test_nothing_is_recommended_where_little_is_gained():
    """Documents of one length: packing them otherwise gains nothing."""
    lengths = sample_lengths(400, WINDOW, 0) * 0 + WINDOW
    space = search_space("7b", 4, WINDOW, lengths, batch_tokens=8 * WINDOW)
    found = estimate(space, lengths, (BASELINE, BALANCED), 2, source="lengths.json")
    assert found.verdict.winner == BASELINE
    assert not found.config
    assert not found.gpu_hours_a_day
    assert "Keep what you have" in str(found.verdict)


def test_a_system_that_delays_is_as_fast_later_on():
    """As many documents wait at the end as at the beginning, so it is not fast because the dear ones still wait."""
    sizes = {"dp": 2, "pp": 2, "cp": 2, "tp": 8}
    space = search_space("7b", 64, WINDOW, LENGTHS, batch_tokens=4 * WINDOW, fixed=sizes)
    early, late = (
        estimate(space, LENGTHS, [BALANCED], steps, source="x").verdict.systems[BALANCED].work_rate
        for steps in (16, 64)
    )
    assert early == pytest.approx(late, rel=0.02)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_percentages_add_up(shares: list[float]):
    percents = rounded(shares)
    assert sum(percents) == round(100 * sum(shares))
    assert all(abs(percent - 100 * share) < 1 for percent, share in zip(percents, shares, strict=True))
