"""Cases are timed in turns, long ones alone and short ones many at a time."""

from __future__ import annotations

from wlb.profiling.timing import Case, Effort, ProcessClock, measure_in_turns


class Ticks(ProcessClock):
    """A clock that the cases set; ``prepared`` are the numbers of calls that it got ready for."""

    name = "ticks"

    def __init__(self) -> None:
        self.now = 0.0
        self.prepared: list[int] = []

    def get_ready(self, case, calls):
        self.prepared.append(calls)

    def mark(self):
        return self.now


def measured(clock: Ticks, cases: dict[str, tuple[float, float]], rounds: int):
    """Timings of cases that take so long, forward and backward, and the order of their calls."""
    calls: list[str] = []

    def case(name: str, forward: float, backward: float) -> Case:
        def advance(seconds: float) -> None:
            calls.append(name)
            clock.now += seconds

        return Case(lambda: advance(forward), lambda _: advance(backward))

    made = {name: case(name, *seconds) for name, seconds in cases.items()}
    return measure_in_turns(made, clock, Effort(0.0, fewest_rounds=rounds), lambda done, total: None), calls


def test_measuring_takes_turns_and_keeps_medians():
    clock = Ticks()
    timings, calls = measured(clock, {"long": (1.0, 2.0), "longer": (4.0, 8.0)}, rounds=3)
    assert (timings["long"].forward, timings["long"].backward, timings["longer"].both) == (1.0, 2.0, 12.0)
    assert calls == ["long", "long", "longer", "longer"] * 4
    assert clock.prepared == []


def test_short_calls_are_timed_after_getting_ready():
    clock = Ticks()
    measured(clock, {"short": (0.5e-6, 0.5e-6)}, rounds=2)
    assert clock.prepared == [20, 20]
