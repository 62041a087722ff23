"""Rank 0's evaluation of all ranks' seconds: imbalance, utilisation, slow ranks, the diagnosis.

The first step of a run is left out of warnings and diagnosis: it warms up caches and allocators, and compiles.

Model FLOPs utilisation is what the model's arithmetic needs, over what the devices could do in the time, as PaLM
defines it (arXiv 2204.02311, appendix B): the operations of the model's products once forward and twice backward,
whatever an implementation recomputes, here with causal attention inside segments counted by its pairs. The peak is the
hardware preset's, in bfloat16 on a GPU and float32 on a CPU. That of a CPU is for one core, so a rank has as many as
threads.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wlb.files import replace_text
from wlb.job.config import MetricsConfig
from wlb.job.job import JobSpec
from wlb.packing.plan import StepPlan
from wlb.training.observe.diagnosis import FILE, diagnose, render
from wlb.training.observe.imbalance import Imbalance, RankSteps, imbalance_of
from wlb.training.observe.stragglers import RankName, StragglerWatch
from wlb.training.parallel.mesh import mesh_shape
from wlb.training.runtime.console import say
from wlb.training.runtime.environment import hardware_name
from wlb.workload import ModelShape, attention_flops, hardware_preset, linear_flops

_PASSES = 3.0  # one forward, and a backward of twice its operations


@dataclass(frozen=True)
class Observation:
    """What a step says about the job: see ``StepMetrics`` for the meaning."""

    mfu: float
    imbalance: Imbalance
    slow_ranks: tuple[int, ...]


class Observer:
    """Looks at every step; ``names`` are those of the ranks."""

    def __init__(self, metrics: MetricsConfig, job: JobSpec, names: Sequence[RankName], device: torch.device) -> None:
        self._metrics = metrics
        self._shape = job.shape
        self._names = names
        self._mesh_shape = mesh_shape(job.layout)
        self._micro_batches = job.micro_batches_per_rank
        self._peak = peak_flops(hardware_name(device), device) * job.layout.world_size
        self._watch = StragglerWatch(names, job.layout.pp, metrics.straggler_factor)
        self._pooled = job.pools is not None
        self._every = metrics.diagnose_every
        self._recent: deque[tuple[int, RankSteps, float]] = deque()
        self._observed = 0  # steps of this run
        self._path = metrics.dir / FILE
        self._path.unlink(missing_ok=True)  # an earlier run's

    def observe(self, step: int, plan: StepPlan, rows: RankSteps, step_seconds: float) -> Observation:
        """Take in a step that took ``step_seconds``; warns of slow ranks and writes the diagnosis when it is due."""
        self._observed += 1
        if self._observed > 1 and not np.isnan(rows["compute_seconds"]).any():
            self._recent.append((step, rows, step_seconds))
            for line in self._watch.observe(rows):
                say(f"wlb: warning: {line}")
        while self._recent and self._recent[0][0] <= step - self._every:
            self._recent.popleft()
        if self._observed % self._every == 0:
            self._write()
        return Observation(
            mfu=model_flops(self._shape, plan) / (step_seconds * self._peak),
            imbalance=imbalance_of([rows], self._mesh_shape, self._micro_batches),
            slow_ranks=tuple(sorted(self._watch.slow)),
        )

    def finish(self) -> None:
        """Write and print the diagnosis of the last steps."""
        if diagnosis := self._write():
            say(render(diagnosis))

    def _write(self) -> dict[str, Any] | None:
        if not self._recent:
            return None
        steps, rows, seconds = zip(*self._recent, strict=True)
        diagnosis = diagnose(
            rows,
            self._names,
            self._mesh_shape,
            self._micro_batches,
            last_step=steps[-1],
            step_seconds=float(np.mean(seconds)),
            straggler_factor=self._metrics.straggler_factor,
            pooled=self._pooled,
        )
        try:
            replace_text(self._path, json.dumps(diagnosis, allow_nan=False))
        except OSError as error:
            say(f"wlb: warning: {self._path} could not be written: {error.strerror}")
        return diagnosis


def model_flops(shape: ModelShape, plan: StepPlan) -> float:
    """Operations that training on the step's segments takes, over all ranks."""
    lengths = [segment.length for segment in plan.segments]
    attention = float(attention_flops(shape, lengths, "forward").sum())
    return _PASSES * (attention + float(linear_flops(shape, plan.tokens, "forward")))


def peak_flops(hardware: str, device: torch.device) -> float:
    """FLOP/s of one rank on ``device`` at best, by the preset ``hardware``."""
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    return hardware_preset(hardware).peak_flops * cores
