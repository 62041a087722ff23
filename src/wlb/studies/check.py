"""What ``wlb check`` and the page of ``wlb serve`` answer, by one engine: a job in its fastest layout, and its verdict.

Read lengths, choose the job (``in_fastest_layout``), simulate the presets that are ``CHECKED``
(``wlb.simulate.verdict.judge``), and say it with ``Checked``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.documents.filling import check_filling
from wlb.documents.lengths import assumed_window, described_window, read_encoder_tokens
from wlb.documents.store.sources import StoreSource, names_store
from wlb.errors import UserError
from wlb.report.predicted import recommended_config
from wlb.simulate import SimulatedJob
from wlb.simulate.search import layout_of, packed_as, search_space, usual_steps
from wlb.simulate.verdict import BASELINE, BEST, ELASTIC, PARTS, Verdict
from wlb.studies.policies.ours import SystemPolicy
from wlb.terminal import listed, number_of, tell
from wlb.two_cores import on_two_cores
from wlb.workload.phases import DocumentPhases, encoder_seconds

ENCODER_PARAMETERS = "675M"  # of the vision encoder of Qwen2-VL (arXiv 2409.12191, section 2.1)
CHECKED = (BASELINE, BEST, ELASTIC)  # presets that are simulated: what most trainers do, and ours
_BATCH_TOKENS = 2**22


class AskedJob(NamedTuple):
    """A job under preset ``best``, what it is priced by, and what was ``assumed`` of it, empty if nothing."""

    job: SimulatedJob
    priced_by: dict[str, str | int]
    assumed: str


class Checked(NamedTuple):
    """The verdict on a job, and the configuration of the preset that it names, as TOML."""

    asked: AskedJob
    verdict: Verdict
    config: str

    @property
    def gpu_hours_a_day(self) -> float:
        """Those that the winner saves."""
        return 24 * self.asked.job.layout.world_size * self.verdict.given_back

    def to_json(self) -> dict[str, Any]:
        return self.verdict.to_json() | {
            "gpu_hours_a_day": self.gpu_hours_a_day,
            "assumed": self.asked.assumed,
            "config": self.config,
        }


def in_fastest_layout(
    model: str, hardware: str, gpus: int, context_window: int | None, lengths: NDArray[np.int64]
) -> AskedJob:
    """The job on documents of ``lengths`` tokens, 4M tokens a step, in the layout in which plain-4d is fastest.

    A ``context_window`` that is None becomes ``wlb.documents.lengths.assumed_window``. Raises ``UserError`` for an
    unknown model or hardware, and where no layout of ``gpus`` fits the memory.
    """
    window, assumed = (context_window, "") if context_window is not None else window_of(lengths)
    windows = max(1, _BATCH_TOKENS // window)
    while windows > 1 and windows * window > int(lengths.sum()):
        windows //= 2
    space = search_space(model, gpus, window, hardware=hardware, batch_tokens=windows * window, steps=1)
    check_filling(lengths, windows * window, window, steps=usual_steps(windows))  # before the search takes its time
    job = packed_as(SystemPolicy(BASELINE).fastest(BASELINE, space, lengths, on_two_cores)[0], BEST)
    assumed += f"{gpus} GPUs in the layout in which {BASELINE} is fastest"
    return AskedJob(job, {"model": model, "hardware": hardware}, assumed)


def window_of(lengths: NDArray[np.int64]) -> tuple[int, str]:
    """``assumed_window``, and how to say that."""
    window = assumed_window(lengths)
    return window, f"{described_window(window, lengths)}; "


def with_phases(job: SimulatedJob, lengths: StoreSource | None, encoders: Sequence[str] | None = None) -> SimulatedJob:
    """``job`` with the phases of documents that ``lengths`` has columns for; ``encoders`` as ``--encoder`` has them."""
    columns = {} if lengths is None else read_encoder_tokens(lengths)
    sizes = dict.fromkeys(columns, ENCODER_PARAMETERS)
    for one in encoders or ():
        name, _, size = one.partition("=")
        if name not in columns:
            known = ", ".join(f"{column}_tokens" for column in columns) or "none"
            raise UserError(f"--encoder {one}: {lengths} has no column {name}_tokens (of such columns it has {known})")
        sizes[name] = size
    if not columns:
        return job
    priced = ", ".join(f"{name}_tokens as an encoder of {size} parameters" for name, size in sizes.items())
    tell(f"wlb: note: {lengths}: {priced} (--encoder NAME=PARAMETERS)")
    tp, hardware = job.layout.tp, job.hardware
    seconds = {name: encoder_seconds(columns[name], _parameters(size), hardware, tp) for name, size in sizes.items()}
    return replace(job, phases=DocumentPhases(seconds))


def _parameters(size: str) -> float:
    scale = {"M": 1e6, "B": 1e9}.get(size[-1:], 1.0)
    try:
        number = scale * float(size.rstrip("MB"))
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise UserError(f"an encoder of {size!r} parameters is no number over 0; write it as 675M")
    return number


def checked(asked: AskedJob, verdict: Verdict, model: str, source: str, name: str | None = None) -> Checked:
    """``verdict`` with the configuration for the documents of ``source``, which is called ``name`` if that is given."""
    store = source if names_store(source) else None
    config = recommended_config(verdict, model, name or source, store)
    return Checked(asked, verdict, config)


def about(verdict: Verdict, asked: AskedJob) -> list[str]:
    """Which job was simulated, what was assumed of it and for how many steps: what stands below a verdict."""
    job, base = asked.job, verdict.systems[verdict.base]
    priced_by = {name: value for name, value in asked.priced_by.items() if name not in ("tp", "cp")}  # in the layout
    passes = max(system.epochs for system in verdict.systems.values())
    lines = [
        f"{listed(priced_by)}: {layout_of(job)}; "
        f"{number_of(job.packing.micro_batches, 'micro-batch')} of {job.context_window:,} tokens a step",
        f"assumed: {asked.assumed}" if asked.assumed else "",
        f"simulated: {number_of(base.steps, 'step')}, after {verdict.warm_up} that warm up"
        + (f"; the documents fill fewer and are repeated, {passes} passes over them began" if passes > 1 else ""),
    ]
    return [line for line in lines if line]


def columns_of(verdict: Verdict) -> dict[str, list[str]]:
    """The table of a verdict: what each system's time goes to, as shares of the base's, its speed and its delay."""
    systems = verdict.systems
    parts = {name: verdict.parts(name) for name in systems}
    rows = {part: [_percent(parts[name][part]) for name in systems] for part in PARTS}
    rows["together"] = [_percent(sum(parts[name].values())) for name in systems]
    rows["speed at equal work"] = [f"{verdict.speed(name):.2f}x" for name in systems]
    rows["token delay, steps"] = [f"{system.token_delay:.2f}" for system in systems.values()]
    columns = zip(systems, zip(*rows.values(), strict=True), strict=True)
    return {f"of a step of {verdict.base}": [*rows]} | {name: [*cells] for name, cells in columns}


def _percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:.1%}"  # never -0.0%
