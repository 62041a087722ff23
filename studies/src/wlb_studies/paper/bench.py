"""The paper's systems and ours on one job and the same documents.

One corpus serves all context windows of an experiment, because a corpus does not change with the window. Without a
file it is synthetic (``wlb.documents.synthetic``) with the 128K parameters; for longer windows its tail extends to the
longest window.

The paper's systems get global batches from a data loader: full windows. Plain-4D trains each window as it is; the
others repack its documents (Algorithm 1 and section 7.1). By then the loader has cut documents that do not fit in a
window, for all systems alike. ``cut_by_loader`` does the same, so every system computes the same attention.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.documents.lengths import read_lengths
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.simulate import SimulationResult, simulate
from wlb.simulate.search import fastest_layout
from wlb.simulate.space import search_space
from wlb.workload import hardware_preset
from wlb_studies.experiment import Settings
from wlb_studies.paper.jobs import PaperJob

# The paper runs interleaved 1F1B (section 6) with "several chunks of layers" on each rank (section 2.1), and as many
# micro-batches as pipeline ranks (section 7.1). Assumed: two chunks.
CHUNKS = 2
SCHEDULE = {"schedule": "interleaved_1f1b", "virtual_pp": CHUNKS}
ASSUMED = (
    f"interleaved 1F1B as in the paper, balanced in planned order; {CHUNKS} chunks on each rank (assumed); H100 "
    f"preset, without limit of memory where the layout is given; WLB-LLM with L_max 1.5 windows and 2 outlier queues "
    f"as in the paper, whose thresholds are assumed"
)
# Layouts are given, whether or not activations fit. Only balanced would pack for the memory that there is.
_ROOMY = replace(hardware_preset("h100"), memory_bytes=1e14)

_128K = 131_072
_DOCUMENTS = 100_000
# The sampler's defaults at 128K, in tokens.
_MEDIAN_TOKENS = _128K / 128
_TAIL_START_TOKENS = _128K / 16


class Documents(NamedTuple):
    """Lengths in tokens, and their origin."""

    lengths: NDArray[np.int64]
    source: str


def corpus(settings: Settings, longest: int = _128K) -> Documents:
    """The lengths in the user's file, or synthetic ones of up to ``longest`` tokens."""
    if settings.lengths is not None:
        lengths = read_lengths(settings.lengths)
        return Documents(lengths[lengths > 0], settings.lengths)
    fractions = {"median_fraction": _MEDIAN_TOKENS / longest, "tail_start_fraction": _TAIL_START_TOKENS / longest}
    lengths = sample_lengths(_DOCUMENTS, longest, settings.seed, **fractions)
    return Documents(lengths, f"synthetic, {_DOCUMENTS:,} documents of up to {longest:,} tokens, seed {settings.seed}")


def grown_corpus(settings: Settings, context_window: int) -> Documents:
    """Synthetic documents whose lengths grow with the window."""
    lengths = sample_lengths(_DOCUMENTS, context_window, settings.seed)
    return Documents(lengths, f"synthetic, {_DOCUMENTS:,} documents for {context_window:,} tokens")


def cut_by_loader(lengths: NDArray[np.int64], context_window: int, seed: int) -> NDArray[np.int64]:
    """Pieces of documents in random order that fill one window after another, without the last, partial window.

    Raises ``UserError`` if the documents do not fill a window.
    """
    ends = np.cumsum(np.random.default_rng(seed).permutation(lengths))
    whole = int(ends[-1]) // context_window * context_window
    if whole == 0:
        raise UserError(f"the documents hold {ends[-1]} tokens, less than one window of {context_window}; give more")
    cuts = np.union1d(ends[ends <= whole], np.arange(0, whole + 1, context_window))
    pieces: NDArray[np.int64] = np.diff(cuts)
    return pieces


class Bench:
    """One job's documents and number of steps; ``run`` and ``fastest`` take what differs between systems."""

    def __init__(self, job: PaperJob, documents: Documents, steps: int, settings: Settings) -> None:
        self._job = job
        self.steps = steps
        self.lengths = cut_by_loader(documents.lengths, job.context_window, settings.seed)

    def fastest(self, preset: str, schedules: Sequence[str] = ("auto",), **sizes: int) -> SimulationResult:
        """Simulate ``preset`` in its fastest layout of these ``sizes``, on as many GPUs with the same global batch."""
        job, layout = self._job, self._job.layout
        windows = layout.dp * (job.rank_micro_batches or layout.pp)
        found = []
        for schedule in schedules:
            space = search_space(
                job.model,
                layout.world_size,
                job.context_window,
                batch_tokens=windows * job.context_window,
                fixed={"schedule": schedule, **sizes},
            )
            space = replace(space, settings={"data": self.job(preset).data})
            found.append(fastest_layout(space, self.lengths, preset, draws=1))
        return self.simulate(max((one.ranking[0] for one in found), key=lambda one: one.tokens_per_second).job)

    def run(self, preset: str, **settings: Any) -> SimulationResult:
        """Simulate the job under ``preset``; ``settings`` go to ``simulated_job``."""
        return self.simulate(self.job(preset, **settings))

    def speedup(self, result: SimulationResult) -> float:
        """Speedup over Plain-4D, in tokens/s."""
        return result.tokens_per_second / self.plain.tokens_per_second

    @cached_property
    def plain(self) -> SimulationResult:
        return self.run("plain-4d")

    def simulate(self, job: Job) -> SimulationResult:
        return simulate(job, self.lengths, self.steps)

    def job(self, preset: str, **settings: Any) -> Job:
        """The job under ``preset``, on documents in the order of the loader and with memory without limit."""
        job = self._job.under(preset, **({"virtual_pp": CHUNKS, "hardware": _ROOMY} | settings))
        return replace(job, data=job.data.changed(shuffle=False))
