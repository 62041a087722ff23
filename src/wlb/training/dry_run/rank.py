"""Steps of one rank without its job: what it holds in memory, and every call it makes.

Each runs in a process of its own (``run_ranks``): PyTorch keeps meshes and layouts of tensors for as long as a process
lives, and those of one rank are wrong for another.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from wlb.os_limits import usable_cores
from wlb.runtime.sharded_batch import ShardedBatch
from wlb.training.data.loader import LoadedStep
from wlb.training.dry_run.calls import Call, CallLog
from wlb.training.dry_run.fake_rank import StepWatcher, as_on_a_gpu, fake_process_group, longest_runs_of_attention
from wlb.training.dry_run.meter import BATCHES, OPTIMIZER, WEIGHTS, MemoryMeter
from wlb.training.observe.monitor import Monitor
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.training.phases import RankModel, build_loader, build_model, build_pipeline
from wlb.training.preflight import CheckedJob
from wlb.training.step import agree_to_train, train_step

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
    """What rank ``rank`` did: the peak of its memory in bytes by kind, and its calls, before the steps and in each.

    ``rows`` are those of its micro-batches in the last step, in pipeline order. ``operators`` counts PyTorch's
    without most of those that attend on the CPU (``longest_runs_of_attention``).
    """

    rank: int
    place: Place
    memory: dict[str, int]
    setup: tuple[Call, ...]
    calls: tuple[tuple[Call, ...], ...]
    rows: tuple[int, ...]
    operators: int
    seconds: float


def run_ranks(checked: CheckedJob, ranks: Sequence[int], steps: Iterable[int] = (1,)) -> Iterator[RankRun]:
    """Run ``steps`` of each of ``ranks``, in the order given, as many ranks at a time as there are cores.

    Steps count from 1, and those before and between them are planned and not run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_ENTRY])
    workers = min(len(ranks), usable_cores())
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        yield from pool.map(partial(_run_rank, _without_side_effects(checked), tuple(steps)), ranks)


def _run_rank(checked: CheckedJob, steps: tuple[int, ...], rank: int) -> RankRun:
    started = time.perf_counter()
    meter, log = MemoryMeter(), CallLog()
    fake, watcher = FakeTensorMode(allow_non_fake_inputs=True), StepWatcher(meter, log)
    on_gpu = checked.job.hardware.device_type == "cuda"
    kernels = as_on_a_gpu() if on_gpu else nullcontext()
    with fake_process_group(rank, checked.job.layout.world_size), longest_runs_of_attention(), kernels:
        with StepWatcher(MemoryMeter(), log):
            model = build_model(checked, _CPU, lambda: fake)
        setup = log.take()
        _adopt(meter, model, on_gpu)
        runner, monitor = _build_pipeline(model)
        calls = []
        with build_loader(model, None) as loader, meter.watching_torch(), log.listening():
            for step, planned in enumerate(islice(loader, max(steps)), 1):
                if step not in steps:
                    continue
                loaded = _on_device(planned, fake)
                meter.adopt((t for b in loaded.batches for t in (b.tokens, b.labels, b.positions)), BATCHES)
                meter.forget_peak()
                with watcher:
                    agree_to_train(step, loaded, model, False)
                    with fake:
                        train_step(step, loaded, model, runner, monitor)
                calls.append(log.take())
        place = Place(*map(model.mesh.rank, Place._fields))
        rows = tuple(batch.rows for batch in loaded.batches)
        seconds = time.perf_counter() - started
        return RankRun(rank, place, dict(meter.peak), setup, tuple(calls), rows, watcher.operators, seconds)


def _without_side_effects(checked: CheckedJob) -> CheckedJob:
    """``checked`` at its beginning, without what is not part of a step: checkpoints, traces, compiling."""
    config = checked.config
    config = config.changed(
        checkpoint=config.checkpoint.changed(dir=None),
        metrics=config.metrics.changed(profile=False),
        training=config.training.changed(compile=False),
    )
    return replace(checked, config=config, saved=None)


def _build_pipeline(model: RankModel) -> tuple[PipelineRunner, Monitor]:
    """With a monitor that exchanges rows of real numbers."""
    runner, monitor = build_pipeline(model)
    monitor.exchange = unset_fake_temporarily()(monitor.exchange)  # type: ignore[method-assign]
    return runner, monitor


def _adopt(meter: MemoryMeter, model: RankModel, on_gpu: bool) -> None:
    for stage, optimizer in zip(model.stages, model.optimizers, strict=True):
        meter.adopt(stage.parameters(), WEIGHTS)
        moments = (state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
        meter.adopt(moments, OPTIMIZER)
        for group in optimizer.param_groups:
            group["foreach"] = on_gpu  # as it is chosen by default, by the device of the weights


def _on_device(loaded: LoadedStep, fake: FakeTensorMode) -> LoadedStep:
    """``loaded`` with the tensors that a device would hold."""

    def moved(batch: ShardedBatch) -> ShardedBatch:
        on_device = fake.from_tensor
        return replace(
            batch, tokens=on_device(batch.tokens), labels=on_device(batch.labels), positions=on_device(batch.positions)
        )

    return replace(loaded, batches=tuple(map(moved, loaded.batches)))
