"""What a job loses to imbalance, and how much faster each preset runs it: one answer for all commands.

``wlb check``, ``simulate`` and ``report`` all print a ``Verdict`` that ``wlb.simulate.estimate`` makes, so the same
job and documents give the same figures everywhere. Every system trains the same documents in several draws (shuffles
of the corpus). A figure is the median of the draws, with its spread. Warm-up steps do not count: a preset that delays
documents starts with an empty queue and would look fast until the queue is full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.job.config import PRESETS
from wlb.job.job import Job
from wlb.job.memory.fit import fits
from wlb.simulate.decide import decide
from wlb.simulate.run import SimulationResult, simulate
from wlb.simulate.search import DRAWS, drawn
from wlb.workload.base import DocumentPrices

Lengths = NDArray[np.int64] | Sequence[NDArray[np.int64]]
Progress = Callable[[str, int], None]  # a system, and its steps just done

BASELINE, PER_DOCUMENT, BALANCED = "plain-4d", "per-document-4d", "balanced"  # presets
LEAST_GAIN = 0.05  # that is worth a change
_WINDOWS = 256  # simulated per draw, in _FEWEST to _MOST steps
_FEWEST, _MOST = 4, 16
AS_FAST = 0.01  # presets closer than this count as equally fast

_OF_WEIGHTS = ("weight gathers", "gradient reduction", "optimizer")
# Groups of ``wlb.simulate.CAUSES``. The first three are lost to imbalance and to what balancing costs (``LOST``).
PARTS = {
    "waiting for slower ranks": ("dp ranks", "cp ranks"),
    "uneven micro-batches and pipeline bubbles": ("bubbles", "stages", "micro-batches"),
    "exchange of keys and values": ("cp exchange",),
    "other communication and optimizer": ("tp collectives", "expert exchange", "stage transfers", *_OF_WEIGHTS),
    "recomputation": ("recomputation",),
    "computing": ("compute",),
}
LOST = tuple(PARTS)[:3]
FACTORS = ("balance", "recomputation", "layout")


@dataclass(frozen=True)
class Verdict:
    """The results of every system on the same documents, in several draws.

    ``moved`` has the winner in the layout of the base, per draw: it separates the gain from balance from the gain from
    another layout. It is empty if both have the same layout, or if the winner does not fit there.
    """

    draws: Sequence[Mapping[str, SimulationResult]]
    moved: Sequence[SimulationResult] = ()

    @property
    def names(self) -> list[str]:
        return [*self.draws[0]]

    @property
    def base(self) -> str:
        """The system to compare with: plain-4d, or the first system if plain-4d is missing."""
        return BASELINE if BASELINE in self.names else self.names[0]

    @property
    def steps(self) -> int:
        """The counted steps of each draw."""
        return self.draws[0][self.base].steps

    @property
    def warm_up(self) -> int:
        """The warm-up steps of each draw."""
        return usual_steps(self.draws[0][self.base].job.global_batch)

    def speeds(self, system: str, base: str | None = None) -> list[float]:
        """Speedup over ``base`` for the same work (seconds of W_a + W_l), one value per draw."""
        return [draw[system].speed_at_equal_work(draw[base or self.base]) for draw in self.draws]

    def speed(self, system: str, base: str | None = None) -> float:
        """The median of ``speeds``."""
        return median_low(self.speeds(system, base))

    def spread(self, system: str) -> tuple[float, float]:
        """The lowest and the highest of ``speeds``."""
        speeds = self.speeds(system)
        return min(speeds), max(speeds)

    @cached_property
    def systems(self) -> dict[str, SimulationResult]:
        """Each system in its median draw; the base in the median draw of the fastest system."""
        return {name: self.draws[self._median_draw(name)][name] for name in self.names}

    @cached_property
    def fastest(self) -> str:
        """The fastest system that fits the memory; ``balanced`` if it is equally fast, because it delays nothing."""
        others = [name for name in self.names if name != self.base and fits(self.draws[0][name].job)]
        fastest = max([self.base, *others], key=self.speed)
        as_fast = BALANCED in others and self.speed(BALANCED) >= (1 - AS_FAST) * self.speed(fastest)
        return BALANCED if as_fast else fastest

    @property
    def winner(self) -> str:
        """The recommended system: the fastest if it gains ``LEAST_GAIN`` and gains in every draw, else the base."""
        as_shown = round(self.speed(self.fastest), 2)  # never 1.05x that is under 5%
        worth_it = as_shown >= 1 + LEAST_GAIN and self.spread(self.fastest)[0] > 1
        return self.fastest if worth_it else self.base

    def token_delay(self, system: str) -> float:
        """How many steps a token waits, mean over all tokens of all draws."""
        return mean_delay([draw[system] for draw in self.draws])

    def parts(self, system: str) -> dict[str, float]:
        """Where ``system`` spends its time on the work of a mean step of the base, as shares of the time of the base.

        The parts of the base add up to 1, those of another system to 1 / speedup.
        """
        draw = self.draws[self._median_draw(system)]
        return _parts(draw[system], draw[self.base])

    @property
    def lost(self) -> dict[str, float]:
        """The parts of the base that are lost to imbalance: waiting, bubbles, exchange."""
        parts = self.parts(self.base)
        return {part: parts[part] for part in LOST}

    @cached_property
    def factors(self) -> dict[str, float]:
        """The speedup of the winner as a product of ``FACTORS``.

        Balance replaces the losses of the base by those of the winner, measured in the layout of the base if the winner
        fits there. So it never exceeds what the base loses. Layout is the rest: other kernels and communication.
        """
        place = self._median_draw(self.winner)
        base = self.draws[place][self.base]
        before, after = _parts(base, base), self.parts(self.winner)
        moved = _parts(self.moved[place], base) if self.moved else after
        balanced = 1 - sum(before[part] - moved[part] for part in LOST)
        recomputing = balanced - before["recomputation"] + after["recomputation"]
        factors = 1 / balanced, balanced / recomputing, recomputing / sum(after.values())
        return dict(zip(FACTORS, factors, strict=True))

    @property
    def loses(self) -> str:
        """How much the base loses and to what, as a clause."""
        lost = {part: max(0.0, share) for part, share in self.lost.items()}
        percents = dict(zip(lost, rounded([*lost.values()]), strict=True))
        largest_first = sorted(lost, key=lambda part: -lost[part])
        made_of = ", ".join(f"{percents[part]}% {part}" for part in largest_first if percents[part])
        return f"{self.base} loses {sum(percents.values())}% of its time to imbalance{made_of and f': {made_of}'}"

    @property
    def runs(self) -> str:
        """How fast the winner runs, and why, as a sentence."""
        low, high = self.spread(self.winner)
        range_ = f"{low:.2f}x to {high:.2f}x in {len(self.draws)} shuffles of the documents"
        named = f'preset = "{self.winner}"' if self.winner in PRESETS else f"The job {self.winner}"
        over = ""
        if PER_DOCUMENT in self.names and PER_DOCUMENT not in (self.winner, self.base):
            over = f" and {self.speed(self.winner, PER_DOCUMENT):.2f}x as fast as {PER_DOCUMENT}"
        delay = self.token_delay(self.winner)
        waits = "No document waits for a later step" if delay < 0.005 else f"On average a token waits {delay:.2f} steps"
        return (
            f"{named} trains the same documents {self.speed(self.winner):.2f}x as fast as {self.base} ({range_})"
            f"{over}.{self._split} {waits}."
        )

    @property
    def _split(self) -> str:
        """What the speedup of the winner comes from, as a sentence after a space."""
        layout = "a different layout (tp, cp, pp, dp)"
        if not self.moved and self._one_layout:
            layout = "other kernels and communication"
        more = "more" if self.factors["recomputation"] < 1 else "less"
        causes = ("better balance", f"{more} recomputation of activations", layout)
        made_of = [
            (factor, cause)
            for factor, cause in zip(self.factors.values(), causes, strict=True)
            if abs(factor - 1) >= 0.005
        ]
        if len(made_of) < 2:
            return f" The speedup comes from {made_of[0][1]}." if made_of else ""
        product = " times ".join(f"{factor:.2f}x from {cause}" for factor, cause in made_of)
        return f" The {self.speed(self.winner):.2f}x is {product}."

    @property
    def headline(self) -> str:
        """One line that answers."""
        if self.winner == self.base:
            return "Keep what you have"
        return f"Switch to {self.winner}: {self.speed(self.winner):.2f}x as fast as {self.base}"

    @property
    def reasons(self) -> list[str]:
        """Why, line by line."""
        return [str(self)]

    def __str__(self) -> str:
        if self.winner != self.base:
            return f"{self.loses}. {self.runs}"
        found = ""
        if self.speed(self.fastest) >= 1.005:  # not 1.00x
            (low, high), speed = self.spread(self.fastest), self.speed(self.fastest)
            found = f" The fastest, {self.fastest}, runs {speed:.2f}x as fast ({low:.2f}x to {high:.2f}x)."
        none = "Keep what you have: no preset" if PRESETS.keys() >= {*self.names} else "No system"
        return (
            f"{self.loses}. {none} is at least {LEAST_GAIN:.0%} faster and faster in each of {len(self.draws)} "
            f"shuffles of the documents.{found}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": str(self),
            "base": self.base,
            "lost": self.lost,
            "winner": self.winner,
            "speed_at_equal_work": self.speed(self.winner),
            "spread": self.spread(self.winner),
            "factors": self.factors,
            "draws": len(self.draws),
            "systems": [
                {"system": name}
                | result.to_json()
                | {
                    "activation_checkpointing": result.job.activation_checkpointing,
                    "speed_at_equal_work": self.speed(name),
                    "spread": self.spread(name),
                    "token_delay": self.token_delay(name),
                    "parts": self.parts(name),
                    "fits": fits(result.job),
                }
                for name, result in self.systems.items()
            ],
        }

    @property
    def _one_layout(self) -> bool:
        base, winner = (self.draws[0][name].job.layout for name in (self.base, self.winner))
        return all(getattr(base, size) == getattr(winner, size) for size in ("tp", "pp", "virtual_pp", "dp_cp"))

    def _median_draw(self, system: str) -> int:
        speeds = self.speeds(self.fastest if system == self.base else system)
        return speeds.index(median_low(speeds))


def _parts(result: SimulationResult, base: SimulationResult) -> dict[str, float]:
    scale = base.work_rate / (result.work_seconds / result.steps)
    return {part: scale * sum(result.where[cause] for cause in causes) for part, causes in PARTS.items()}


def mean_delay(draws: Sequence[SimulationResult]) -> float:
    """How many steps a token waits, mean over all tokens of ``draws``."""
    return sum(draw.token_delay * draw.tokens for draw in draws) / sum(draw.tokens for draw in draws)


def rounded(shares: Sequence[float]) -> list[int]:
    """``shares`` in whole percent that add up to their rounded sum; the largest remainders are rounded up."""
    percents = 100 * np.asarray(shares)
    whole = np.floor(percents).astype(int)
    missing = round(percents.sum()) - int(whole.sum())
    whole[np.argsort(whole - percents, kind="stable")[:missing]] += 1
    return [int(percent) for percent in whole]


def verdict_of(of_draws: Mapping[str, Sequence[SimulationResult]], moved: Sequence[SimulationResult] = ()) -> Verdict:
    """The verdict on systems, each with one result per draw (``simulate_draws``)."""
    return Verdict(
        [dict(zip(of_draws, results, strict=True)) for results in zip(*of_draws.values(), strict=True)], moved
    )


def simulate_draws(
    job: Job,
    lengths: Lengths,
    steps: int,
    work_prices: DocumentPrices,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> list[SimulationResult]:
    """Simulate ``job`` on each draw of the documents: ``steps`` steps after ``usual_steps`` warm-up steps."""
    warm_up = usual_steps(job.global_batch)
    job = decide(job, lengths)
    return [
        simulate(drawn(job, draw), lengths, steps, warm_up=warm_up, work_prices=work_prices, on_progress=on_progress)
        for draw in range(DRAWS)
    ]


def usual_steps(global_batch: int) -> int:
    """The default number of simulated steps per draw, and of warm-up steps, for a global batch in windows."""
    return min(max(_FEWEST, _WINDOWS // global_batch), _MOST)
