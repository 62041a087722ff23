"""Cases are timed in turns, long ones alone and short ones many at a time."""

from wlb.profiling.timing import Case, Clock, measure_in_turns


def measured(cases: dict[str, tuple[float, float]], rounds: int):
    """Timings of cases that take so long, forward and backward, the order of their calls, and what was got ready."""
    now = 0.0
    calls: list[str] = []
    ready: list[int] = []

    def case(name: str, forward: float, backward: float) -> Case:
        def advance(seconds: float) -> None:
            nonlocal now
            calls.append(name)
            now += seconds

        return Case(lambda: advance(forward), lambda _: advance(backward))

    made = {name: case(name, *seconds) for name, seconds in cases.items()}
    return measure_in_turns(made, Clock("ticks", lambda: now, get_ready=ready.append), rounds), calls, ready


def test_measuring_takes_turns_and_keeps_medians():
    timings, calls, ready = measured({"long": (1.0, 2.0), "longer": (4.0, 8.0)}, rounds=3)
    assert {name: timing.tolist() for name, timing in timings.items()} == {"long": [1.0, 2.0], "longer": [4.0, 8.0]}
    assert calls == ["long"] * 4 + ["longer"] * 4 + ["long", "long", "longer", "longer"] * 3
    assert ready == []


def test_short_calls_are_timed_after_getting_ready():
    assert measured({"short": (0.5e-6, 0.5e-6)}, rounds=2)[2] == [20, 20]
