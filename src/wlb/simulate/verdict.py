"""What a job loses to imbalance, and how many more tokens per second each preset trains: one answer for all commands.

``wlb check``, ``simulate`` and ``report`` all print a ``Verdict`` that ``wlb.simulate.estimate`` makes, so the same
job and documents give the same figures everywhere. Every system trains the same corpus, with the same global batch, in
several draws (shuffles of the corpus). A speedup is tokens per second over those of the base, of all draws together;
its spread is that of the single draws. Warm-up steps do not count: a preset that delays documents starts with an empty
queue and would look fast until the queue is full.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.job.config import PRESETS
from wlb.job.job import Job
from wlb.job.memory.fit import fits
from wlb.simulate.decide import decide
from wlb.simulate.run import SimulationResult, pooled, simulate
from wlb.simulate.search import DRAWS, drawn
from wlb.workload.base import DocumentPrices

Lengths = NDArray[np.int64] | Sequence[NDArray[np.int64]]
# Of each system, the share that is done, and the tokens per second of its fastest layout so far, or 0.
Progress = Callable[[Mapping[str, tuple[float, float]]], None]

BASELINE, PER_DOCUMENT, BALANCED = "plain-4d", "per-document-4d", "balanced"  # presets
# Further systems, where the job of plain-4d was given: it keeps its weights for the step, or either is free to run in
# its own fastest layout.
KEPT, TUNED, BALANCED_TUNED = "plain-4d kept", "plain-4d tuned", "balanced tuned"
VARIANTS = {KEPT: BASELINE, TUNED: BASELINE, BALANCED_TUNED: BALANCED}
_ADVICE = {
    KEPT: "Keep plain-4d, but keep its weights for the whole step",
    TUNED: "Keep plain-4d, in its fastest layout",
    BALANCED_TUNED: "Switch to balanced, in its fastest layout",
}
LEAST_GAIN = 0.05  # that is worth a change
_WINDOWS = 256  # simulated per draw, in _FEWEST to _MOST steps
_FEWEST, _MOST = 4, 16
AS_FAST = 0.01  # presets closer than this count as equally fast
# A smaller change is the advice if it is within this share of the fastest system; from small to large.
_NEARLY, _SMALLER_STEPS = 0.02, (KEPT, PER_DOCUMENT, TUNED, BALANCED)
# How much more time a system took than predicted, as a share of the time of the other one on the same documents: from
# 0.080 less to 0.034 more in the 18 pairs of packers and samplers that ``wlb-studies validate`` compares, and up to
# 0.114 more (0.913, not 0.799; quoted) in nine other pairs of one of their sources, that nothing here was fitted to.
MOST_OPTIMISTIC, PAIRS = 0.114, 27

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
FACTORS = ("balance", "recomputation", "attention", "layout")


@dataclass(frozen=True)
class Verdict:
    """The results of every system on the same documents, one per draw (``simulate_draws``).

    ``moved`` has the winner in the layout of the base, per draw: it separates the gain from balance from the gain from
    another layout. It is empty if both have the same layout, or if the winner does not fit there.
    ``gives_checkpointing`` says that the activation checkpointing of the base was not searched for.
    """

    of_draws: Mapping[str, Sequence[SimulationResult]]
    moved: Sequence[SimulationResult] = ()
    gives_checkpointing: bool = False

    @property
    def draws(self) -> int:
        return len(self.of_draws[self.base])

    @property
    def base(self) -> str:
        """The system to compare with: plain-4d, or the first system if plain-4d is missing."""
        return BASELINE if BASELINE in self.of_draws else next(iter(self.of_draws))

    @property
    def steps(self) -> int:
        """The counted steps of each draw."""
        return self.of_draws[self.base][0].steps

    @property
    def warm_up(self) -> int:
        """The warm-up steps of each draw."""
        return usual_steps(self.systems[self.base].job.global_batch)

    @cached_property
    def systems(self) -> dict[str, SimulationResult]:
        """Each system in all draws together."""
        return {name: pooled(results) for name, results in self.of_draws.items()}

    def speed(self, system: str) -> float:
        """Tokens per second over those of the base."""
        return self.systems[system].speedup(self.systems[self.base])

    def speeds(self, system: str) -> list[float]:
        """``speed`` in each draw."""
        draws = zip(self.of_draws[system], self.of_draws[self.base], strict=True)
        return [result.speedup(base) for result, base in draws]

    def spread(self, system: str) -> tuple[float, float]:
        """The lowest and the highest of ``speeds``."""
        speeds = [*self.speeds(system), self.speed(system)]
        return min(speeds), max(speeds)

    def speed_at_equal_work(self, system: str) -> float:
        """Seconds of work (W_a + W_l) done per second, over those of the base, which skips attention where it cuts."""
        return self.systems[system].speed_at_equal_work(self.systems[self.base])

    @cached_property
    def fastest(self) -> str:
        """The fastest system that fits the memory; ``balanced`` if it is equally fast, because it delays nothing."""
        others = [name for name, system in self.systems.items() if name != self.base and fits(system.job)]
        fastest = max([self.base, *others], key=self.speed)
        as_fast = BALANCED in others and self.speed(BALANCED) >= (1 - AS_FAST) * self.speed(fastest)
        return BALANCED if as_fast else fastest

    @cached_property
    def winner(self) -> str:
        """The recommended system: the smallest change that has the gain, or the base if nothing gains enough.

        Enough is ``LEAST_GAIN``, and some gain in every draw.
        """
        nearly = (1 - _NEARLY) * self.speed(self.fastest)
        for name in (*_SMALLER_STEPS, self.fastest):
            near = name in self.systems and self.speed(name) >= nearly and fits(self.systems[name].job)
            if near and round(self.speed(name), 2) >= 1 + LEAST_GAIN and self.spread(name)[0] > 1:  # as shown
                return name
        return self.base

    def parts(self, system: str) -> dict[str, float]:
        """Where ``system`` spends its time on as many tokens as the base, as shares of the time of the base.

        The parts of the base add up to 1, those of another system to 1 / speedup.
        """
        return self._parts(self.systems[system])

    def _parts(self, result: SimulationResult) -> dict[str, float]:
        scale = self.systems[self.base].tokens_per_second * result.steps / result.tokens
        return {part: scale * sum(result.where[cause] for cause in causes) for part, causes in PARTS.items()}

    @property
    def lost(self) -> dict[str, float]:
        """The parts of the base that are lost to imbalance: waiting, bubbles, exchange."""
        parts = self.parts(self.base)
        return {part: parts[part] for part in LOST}

    @cached_property
    def factors(self) -> dict[str, float]:
        """The speedup of the winner as a product of ``FACTORS``.

        Balance replaces the losses of the base by those of the winner, measured in the layout of the base if the winner
        fits there. So it never exceeds what the base loses. Attention is below 1 if the winner trains whole documents
        and the base cuts them. Layout is the rest: other kernels and communication.
        """
        before, after = self.parts(self.base), self.parts(self.winner)
        moved = self._parts(pooled(self.moved)) if self.moved else after
        work = (one.work_seconds / one.tokens for one in (self.systems[self.winner], self.systems[self.base]))
        balanced = 1 - sum(before[part] - moved[part] for part in LOST)
        recomputing = balanced - before["recomputation"] + after["recomputation"]
        attending = recomputing + before["computing"] * (next(work) / next(work) - 1)
        times = (1.0, balanced, recomputing, attending, sum(after.values()))
        return {name: slow / fast for name, (slow, fast) in zip(FACTORS, pairwise(times), strict=True)}

    @property
    def headline(self) -> str:
        """The answer in one line."""
        if self.winner != self.base:
            usual = f"Switch to {self.winner}" if self.winner in PRESETS else _named(self.winner)
            advice = _ADVICE.get(self.winner, usual)
            return f"{advice}: {self.speed(self.winner):.2f}x the tokens per second of {self.base}."
        if len(self.systems) == 1:
            return f"{_named(self.base)} is compared with nothing."
        system = "preset" if PRESETS.keys() >= self.systems.keys() - VARIANTS.keys() else "system"
        none = f"Keep what you have: no {system} gains {LEAST_GAIN:.0%} in every shuffle"
        if self.speed(self.fastest) < 1.005:  # shown as 1.00x
            return f"{none}."
        return f"{none}; {self.fastest} has {self.speed(self.fastest):.2f}x the tokens per second of {self.base}."

    @property
    def reasons(self) -> list[str]:
        """The lines below ``headline``: how sure it is, what comes on top, and why."""
        shown = self.winner if self.winner != self.base else self.fastest
        lines = []
        if round(self.speed(shown), 2) != 1:
            (low, high), worst = self.spread(shown), 1 / (1 / self.speed(shown) + MOST_OPTIMISTIC)
            lines.append(
                f"Range: {low:.2f}x to {high:.2f}x in {self.draws} shuffles of the documents; {worst:.2f}x if "
                f"it is as far off as the worst of {PAIRS} published comparisons."
            )
        dropped = 1 - self.systems[self.base].attention_kept
        if dropped >= 0.005 and abs(self.speed_at_equal_work(shown) / self.speed(shown) - 1) >= 0.005:
            lines.append(
                f"{_named(shown)} also computes the {dropped:.0%} of attention that cutting documents drops: "
                f"{self.speed_at_equal_work(shown):.2f}x at equal work."
            )
        lines.append(f"{self.loses}.")
        if self.winner != self.base:
            lines += self._split
            smaller = [name for name in (*_SMALLER_STEPS, BALANCED_TUNED) if name in self.systems]
            others = [f"{name} {self.speed(name):.2f}x" for name in smaller if name != self.winner]
            lines += [f"Others: {', '.join(others)}."] if others else []
        if shown != self.base:
            delay, sharing = self.systems[shown].token_delay, self.systems[shown].sharing
            lines += [f"{sharing}."] if sharing else []
            lines.append(
                "No documents are deferred." if delay < 0.005 else f"On average a token waits {delay:.2f} steps."
            )
        return lines

    @property
    def loses(self) -> str:
        """How much the base loses and to what, as a clause."""
        lost = {part: max(0.0, share) for part, share in self.lost.items()}
        percents = dict(zip(lost, rounded([*lost.values()]), strict=True))
        largest_first = sorted(lost, key=lambda part: -lost[part])
        made_of = ", ".join(f"{percents[part]}% {part}" for part in largest_first if percents[part])
        return f"{self.base} loses {sum(percents.values())}% of its time to imbalance{made_of and f': {made_of}'}"

    @property
    def _split(self) -> list[str]:
        """What the speedup of the winner comes from, as at most one line."""
        layouts = [self.systems[name].job.layout for name in (self.base, self.winner)]
        placed = [(one.tp, one.pp, one.virtual_pp, one.dp_cp) for one in layouts]
        alike = not self.moved and placed[0] == placed[1]
        factors = self.factors
        if self.gives_checkpointing and self.winner not in VARIANTS:  # recomputation follows from what was given
            factors = factors | {"layout": factors["layout"] * factors["recomputation"], "recomputation": 1.0}
        more = "more" if factors["recomputation"] < 1 else "less"
        causes = (
            f"{'better' if factors['balance'] >= 1 else 'worse'} balance",
            f"{more} recomputation of activations",
            f"the attention that {self.base} drops",
            "other kernels and communication" if alike else "a different layout",
        )
        made_of = [
            f"{factor:.2f}x from {cause}"
            for factor, cause in zip(factors.values(), causes, strict=True)
            if abs(factor - 1) >= 0.005
        ]
        return [f"The {self.speed(self.winner):.2f}x is {' times '.join(made_of)}."] if len(made_of) > 1 else []

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.reasons])

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": str(self),
            "base": self.base,
            "lost": self.lost,
            "winner": self.winner,
            "speedup": self.speed(self.winner),
            "speed_at_equal_work": self.speed_at_equal_work(self.winner),
            "spread": self.spread(self.winner),
            "factors": self.factors,
            "draws": self.draws,
            "systems": [
                {"system": name}
                | result.to_json()
                | {
                    "activation_checkpointing": result.job.activation_checkpointing,
                    "weights": "kept" if result.job.layout.keeps_weights else "gathered",
                    "head": "dealt" if result.job.layout.deals_head else "last",
                    "speedup": self.speed(name),
                    "speed_at_equal_work": self.speed_at_equal_work(name),
                    "spread": self.spread(name),
                    "parts": self.parts(name),
                    "fits": fits(result.job),
                }
                for name, result in self.systems.items()
            ],
        }


def _named(system: str) -> str:
    return system if system in (*PRESETS, *VARIANTS) else f"The job {system}"


def rounded(shares: Sequence[float]) -> list[int]:
    """``shares`` in whole percent that add up to their rounded sum; the largest remainders are rounded up."""
    percents = 100 * np.asarray(shares)
    whole = np.floor(percents).astype(int)
    missing = round(percents.sum()) - int(whole.sum())
    whole[np.argsort(whole - percents, kind="stable")[:missing]] += 1
    return [int(percent) for percent in whole]


def simulate_draws(job: Job, lengths: Lengths, steps: int, work_prices: DocumentPrices) -> Iterator[SimulationResult]:
    """Simulate ``job`` on each draw of the documents: ``steps`` steps after ``usual_steps`` warm-up steps."""
    warm_up, job = usual_steps(job.global_batch), decide(job, lengths)
    for draw in range(DRAWS):
        yield simulate(drawn(job, draw), lengths, steps, warm_up=warm_up, work_prices=work_prices)


def usual_steps(global_batch: int) -> int:
    """The default number of simulated steps per draw, and of warm-up steps, for a global batch in windows."""
    return min(max(_FEWEST, _WINDOWS // global_batch), _MOST)
