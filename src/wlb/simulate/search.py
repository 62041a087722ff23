"""Searches the fastest layout and packing for a model on given GPUs and document lengths.

Every layout (tp, cp, pp, dp) whose worst step fits the GPUs' memory is simulated for a few steps; the fastest ones are
then simulated for more steps with each way of packing, L_max and sharding. Layouts are powers of two, tp stays inside a
node, and of the kinds of activation checkpointing a layout takes the cheapest that fits. The global batch is the same
for all. Sequential packing is not a candidate, as it cuts documents; it is simulated in the winner's layout to compare
with.

Speed is at equal work, and one price list says for all candidates of a round what work is: of a single GPU in the
first, of the first round's fastest layout in the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from wlb.documents.filling import check_filling
from wlb.errors import UserError
from wlb.job.memory.fit import fits, predicted_memory
from wlb.job.memory.layers import Checkpointing
from wlb.job.memory.step import gib
from wlb.schedules.layout import Layout
from wlb.settings import MOST_MICRO_BATCHES
from wlb.simulate.job import SimulatedJob, preset_sections, simulated_job
from wlb.simulate.rate import rate
from wlb.simulate.run import SimulationResult, simulate
from wlb.workload import Hardware, ModelShape, hardware_preset, make_workload, model_shape

T = TypeVar("T")

LENGTH_FACTORS = (1.0, 1.5, 2.0)
_SHORTEST = 1.0  # L_max of the first round, where the default of 1.5 does not fit
_SYSTEMS = ("fixed-4d", "wlb-llm", "best")
_FINALISTS = 4  # layouts that are simulated with every way of packing
_FIRST_STEPS = 2
_WINDOWS = 512  # of the steps that are simulated, unless that is few or many of them
_FEWEST, _MOST = 8, 32
_LARGEST_TP = 32
_LARGEST_CP = 32
_LARGEST_PP = 32


@dataclass(frozen=True)
class SearchSpace:
    """What is given: how many GPUs of which kind, and what they train.

    ``micro_batches`` is the global batch in context windows; ``steps`` is how many the finalists are simulated for.
    """

    gpus: int
    shape: ModelShape
    hardware: Hardware
    context_window: int
    micro_batches: int
    steps: int = 8
    warm_up: int = 0  # steps that come before these and do not count


@dataclass(frozen=True)
class SearchResult:
    """Candidates by simulated speed at equal work, fastest first; to compare with, plain-4d in the winner's layout."""

    ranking: list[SimulationResult]
    plain: SimulationResult
    layouts: int  # that fit the memory
    too_large: int  # that do not

    @property
    def winner(self) -> SimulationResult:
        return self.ranking[0]


def usual_steps(global_batch: int) -> int:
    """How many steps of so many context windows are simulated where nobody says, and how many warm up before them."""
    return min(max(_FEWEST, _WINDOWS // global_batch), _MOST)


def search_space(
    model: str | ModelShape,
    gpus: int,
    context_window: int,
    *,
    hardware: str | Hardware = "h100",
    batch_tokens: int = 2**24,
    steps: int = 8,
) -> SearchSpace:
    """A search space by names; the global batch is as many whole windows as ``batch_tokens`` holds."""
    if gpus < 1:
        raise UserError(f"gpus = {gpus} is below 1; raise it")
    micro_batches = batch_tokens // context_window
    if micro_batches < 1:
        raise UserError(f"a global batch of {batch_tokens} tokens holds no window of {context_window}; raise it")
    if micro_batches > MOST_MICRO_BATCHES:
        raise UserError(
            f"a global batch of {batch_tokens} tokens holds {micro_batches} windows of {context_window}, over "
            f"{MOST_MICRO_BATCHES}; lower it"
        )
    return SearchSpace(
        gpus,
        model_shape(model) if isinstance(model, str) else model,
        hardware_preset(hardware) if isinstance(hardware, str) else hardware,
        context_window,
        micro_batches,
        steps,
        usual_steps(micro_batches),
    )


def search(
    space: SearchSpace, lengths: NDArray[np.int64], *, on_progress: Callable[[int, int], None] = lambda done, of: None
) -> SearchResult:
    """Simulate and rank; ``on_progress`` gets how many simulations are done, and of how many.

    Raises ``UserError`` where no layout fits the memory, and where the documents do not fill one step.
    """
    jobs, too_large = layouts(space)
    if not jobs and not too_large:
        raise UserError(
            f"no layout of {space.gpus} GPUs divides a global batch of {space.micro_batches} windows of "
            f"{space.context_window} tokens: tp, cp and pp are powers of two of at most {space.hardware.node_size}, "
            f"{_LARGEST_CP} and {_LARGEST_PP} that suit the model, and dp divides the windows and leaves each rank at "
            "least pp of them; give another number of GPUs or another global batch"
        )
    if not jobs:
        raise UserError(
            f"no layout of {space.gpus} GPUs with {gib(space.hardware.memory_bytes)} GiB each fits this model and "
            f"window of {space.context_window} tokens (of {len(too_large)} tried, the best needs "
            f"{gib(min(too_large))} GiB); give more GPUs or a shorter window"
        )
    check_filling(lengths, space.micro_batches * space.context_window, space.context_window, steps=space.steps)
    finals = min(len(jobs), _FINALISTS)
    expected = len(jobs) + finals * len([*_ways_of_packing(jobs[0])]) + 1
    done = 0

    def counted(result: T) -> T:
        nonlocal done
        done += 1
        on_progress(done, expected)
        return result

    single = make_workload(space.shape, space.hardware)
    rates = [counted(rate(job, lengths, _FIRST_STEPS, single).work_rate) for job in jobs]
    first = [jobs[index] for index in sorted(range(len(jobs)), key=lambda index: -rates[index])]
    work_prices = first[0].work_prices

    def run(job: SimulatedJob) -> SimulationResult:
        return counted(simulate(job, lengths, space.steps, warm_up=space.warm_up, work_prices=work_prices))

    ways = [way for job in first[:finals] for way in _ways_of_packing(job)]
    candidates = [candidate for way in ways if (candidate := fitted(way)) is not None]
    ranking = sorted(map(run, candidates), key=lambda result: -result.work_rate)
    plain = run(packed_as(ranking[0].job, "plain-4d"))
    return SearchResult(ranking, plain, len(jobs), len(too_large))


def layout_of(job: SimulatedJob) -> str:
    """A layout in one line."""
    layout = job.layout
    interleaved = f" x {layout.virtual_pp} stages" if layout.virtual_pp > 1 else ""
    return f"tp {layout.tp} cp {layout.cp} pp {layout.pp}{interleaved} dp {layout.dp}"


def packing_of(job: SimulatedJob) -> str:
    """Packing and sharding in one line."""
    packing = job.packing
    factor = f", L_max {packing.length_factor:g}" if packing.has_length_factor else ""
    own = "" if packing.assignment == "arrival" else ", arranged"
    return f"{packing.method}{factor}{own}, {job.sharding.strategy}"


def explanation(winner: SimulationResult, other: SimulationResult) -> list[tuple[str, float]]:
    """What the winner saves, by cause, in seconds for as much work as its step does; largest saving first.

    Negative where the winner pays more.
    """
    scale = winner.work_seconds / winner.steps / (other.work_seconds / other.steps)
    saved = [(cause, seconds * scale - winner.where[cause]) for cause, seconds in other.where.items()]
    return sorted(saved, key=lambda row: -row[1])


def layouts(space: SearchSpace) -> tuple[list[SimulatedJob], list[int]]:
    """Jobs that fit the memory, one a layout, and the bytes that the others would need."""
    fitting: list[SimulatedJob] = []
    too_large: list[int] = []
    for layout in meshes(space):
        micro_batches, rest = divmod(space.micro_batches, layout.dp)
        if rest or micro_batches < layout.pp:
            continue
        job = job_on(space, "best", layout, micro_batches)
        if job is None:
            continue
        fits_so = fitted(job) or fitted(job.with_length_factor(_SHORTEST))
        if fits_so is not None:
            fitting.append(fits_so)
        else:
            least = replace(job.with_length_factor(_SHORTEST), activation_checkpointing="full")
            too_large.append(predicted_memory(least).total)
    return fitting, too_large


def meshes(space: SearchSpace, largest_cp: int = _LARGEST_CP) -> Iterator[Layout]:
    """All tp inside a node, cp and pp that are powers of two and divide the GPUs, dp being the rest of them.

    A pipeline comes with one stage a rank, and with two. Whether a model, or a global batch, can be cut that way is not
    asked.
    """
    tps, cps, pps = (
        [2**exponent for exponent in range(most.bit_length())]
        for most in (min(space.hardware.node_size, _LARGEST_TP), largest_cp, _LARGEST_PP)
    )
    for tp, cp, pp in product(tps, cps, pps):
        dp, rest = divmod(space.gpus, tp * cp * pp)
        if rest or not dp:
            continue
        yield Layout(tp, cp, pp, dp)
        if pp > 1:
            yield Layout(tp, cp, pp, dp, virtual_pp=2, schedule="interleaved_1f1b")


def job_on(space: SearchSpace, system: str, layout: Layout, micro_batches: int) -> SimulatedJob | None:
    """The job of ``system`` on one of ``meshes``, with so many micro-batches a rank; None where it cannot be so."""
    hardware, sizes = space.hardware, vars(layout)
    try:
        return simulated_job(
            space.shape, space.context_window, system, hardware=hardware, micro_batches=micro_batches, **sizes
        )
    except UserError:
        return None


def fitted(job: SimulatedJob) -> SimulatedJob | None:
    """``job`` with the cheapest activation checkpointing that fits, or None."""
    for kind in get_args(Checkpointing):  # cheapest first
        candidate = replace(job, activation_checkpointing=kind)
        if fits(candidate):
            return candidate
    return None


def _ways_of_packing(job: SimulatedJob) -> Iterator[SimulatedJob]:
    for system in _SYSTEMS:
        packed = packed_as(job, system)
        if not packed.packing.has_length_factor:
            yield packed
            continue
        for factor in LENGTH_FACTORS:
            yield packed.with_length_factor(factor)


def packed_as(job: SimulatedJob, system: str) -> SimulatedJob:
    """``job`` under another system of ``wlb.job.config.PRESETS``, with as many micro-batches."""
    packing, sharding = preset_sections(system, {"micro_batches": job.packing.micro_batches})
    return replace(job, packing=packing, sharding=sharding)
