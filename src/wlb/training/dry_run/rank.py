"""Steps of one rank without its job: what it holds in memory, and every call it makes.

Each runs in a process of its own (``run_ranks``): PyTorch keeps meshes and layouts of tensors for as long as a process
lives, and those of one rank are wrong for another.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from wlb.documents.store.mixture import TrainedStore, open_stores
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.os_limits import usable_cores
from wlb.training.data.loader import LoadedStep
from wlb.training.data.sharded_batch import ShardedBatch
from wlb.training.dry_run.calls import Call, CallLog
from wlb.training.dry_run.fake_rank import StepWatcher, as_on_a_gpu, fake_process_group
from wlb.training.dry_run.meter import BATCHES, OPTIMIZER, WEIGHTS, MemoryMeter
from wlb.training.dry_run.synthetic_store import synthetic_store
from wlb.training.non_finite import NonFiniteSteps
from wlb.training.observe.compute_clock import KernelClock
from wlb.training.observe.imbalance import RankSteps
from wlb.training.observe.monitor import Monitor
from wlb.training.phases import RankModel, build_data, build_model, build_pipeline, take_place
from wlb.training.step import any_asked_to_end, train_step

_CPU = torch.device("cpu")
_ENTRY = "wlb.training.dry_run.rank"


class Place(NamedTuple):
    """A rank's coordinates in the mesh of the job."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class RankRun:
    """What rank ``rank`` did: the peak of its memory in bytes by kind, and its calls, step by step.

    ``rows`` are those of its micro-batches in the last step, in pipeline order. ``operators`` counts PyTorch's.
    """

    rank: int
    place: Place
    memory: dict[str, int]
    calls: tuple[tuple[Call, ...], ...]
    rows: tuple[int, ...]
    operators: int
    seconds: float


def run_ranks(config: JobConfig, ranks: Sequence[int], hardware: str, steps: Iterable[int] = (1,)) -> Iterator[RankRun]:
    """Run ``steps`` of each of ``ranks``, in the order given, as many ranks at a time as there are cores.

    Steps count from 1, and those before and between them are planned and not run. Nothing may be left to decide in
    ``config``. A ``data.store`` that cannot be opened is replaced by synthetic documents. ``hardware`` is a preset's
    name.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_ENTRY])
    workers = min(len(ranks), usable_cores())
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        yield from pool.map(partial(run_rank, config, hardware=hardware, steps=tuple(steps)), ranks)


def run_rank(config: JobConfig, rank: int, *, hardware: str, steps: Sequence[int] = (1,)) -> RankRun:
    """``run_ranks`` of one rank, in this process."""
    started = time.perf_counter()
    config = _without_side_effects(config)
    store = open_store(config)
    meter, log = MemoryMeter(), CallLog()
    fake, watcher = FakeTensorMode(allow_non_fake_inputs=True), StepWatcher(meter, log)
    with fake_process_group(rank, config.parallel.world_size), ExitStack() as modes:
        place = take_place(config, store, _CPU, hardware, lambda: fake)
        if place.job.hardware.device_type == "cuda":
            modes.enter_context(as_on_a_gpu())
        model = build_model(config, place)
        _adopt(meter, model)
        for optimizer in model.optimizers:
            modes.enter_context(mock.patch.object(optimizer, "step", _counted(meter, optimizer.step)))
        runner, fake_monitor = build_pipeline(config, model)
        monitor = _RealMonitor(config, model.config.shape, model.mesh, _CPU)
        # The pipeline starts and stops the other's clock; a GPU's measures few steps, of which this is none.
        monitor.clock = KernelClock(0) if place.job.hardware.device_type == "cuda" else fake_monitor.clock
        non_finite = NonFiniteSteps(config.training, model.mesh.rank("dp"))
        calls = []
        data = build_data(config, store, model, None)
        with data.loader, meter.watching_torch(), log.listening():
            for step in range(1, max(steps) + 1):
                planned = next(data.loader)
                if step not in steps:
                    continue
                loaded = _on_device(planned, fake)
                meter.adopt((t for b in loaded.batches for t in (b.tokens, b.labels, b.positions)), BATCHES)
                meter.forget_peak()
                with watcher:
                    any_asked_to_end(step, loaded, model.mesh, _CPU, False)
                    with fake:
                        train_step(step, loaded, config.training, model, runner, monitor, non_finite)
                calls.append(log.take())
        coordinates = Place(*map(model.mesh.rank, Place._fields))
        rows = tuple(batch.rows for batch in loaded.batches)
        seconds = time.perf_counter() - started
        return RankRun(rank, coordinates, dict(meter.peak), tuple(calls), rows, watcher.operators, seconds)


def open_store(config: JobConfig) -> TrainedStore:
    """The store of ``config``, or synthetic documents where it cannot be opened."""
    try:
        return open_stores(config.data.stores)
    except UserError:
        return synthetic_store(config)


class _RealMonitor(Monitor):
    """Exchanges rows of real numbers."""

    def exchange(self, loaded: LoadedStep, loss_share: Tensor) -> RankSteps:
        with unset_fake_temporarily():
            return super().exchange(loaded, loss_share)


def _without_side_effects(config: JobConfig) -> JobConfig:
    """``config`` without what is not part of a step: checkpoints, traces, compiling, steps planned ahead."""
    return config.changed(
        checkpoint=config.checkpoint.changed(dir=None),
        metrics=config.metrics.changed(profile=False),
        training=config.training.changed(compile=False, prefetch=1),
    )


def _adopt(meter: MemoryMeter, model: RankModel) -> None:
    on_gpu = model.job.hardware.device_type == "cuda"
    for stage, optimizer in zip(model.stages, model.optimizers, strict=True):
        meter.adopt(stage.parameters(), WEIGHTS)
        moments = (state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
        meter.adopt(moments, OPTIMIZER)
        for group in optimizer.param_groups:
            group["foreach"] = on_gpu  # as it is chosen by default, by the device of the weights


def _counted(meter: MemoryMeter, step: Callable[[], object]) -> Callable[[], object]:
    def counted() -> object:
        with meter.counting(OPTIMIZER):
            return step()

    return counted


def _on_device(loaded: LoadedStep, fake: FakeTensorMode) -> LoadedStep:
    """``loaded`` with the tensors that a device would hold."""

    def moved(batch: ShardedBatch) -> ShardedBatch:
        on_device = fake.from_tensor
        return replace(
            batch, tokens=on_device(batch.tokens), labels=on_device(batch.labels), positions=on_device(batch.positions)
        )

    return replace(loaded, batches=tuple(map(moved, loaded.batches)))
