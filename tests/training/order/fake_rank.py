"""Steps of one rank of a job without the other ranks: its calls, and the peak of its memory.

The process group is PyTorch's fake one, which answers at once: what is received has the right size and no meaning.
Tensors are fake, so operators compute shapes and types only; ``Routes`` chooses the experts of tokens. Their device is
the CPU for a GPU's rank too, as autograd needs a PyTorch that was built for the device of its tensors; the GPU's
kernels are chosen by name.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.programs import FORKS
from tests.training.order.calls import Call, CallLog
from wlb.attention.backends import BACKENDS, cuda
from wlb.job.config import JobConfig
from wlb.models import experts
from wlb.models.experts import MixtureOfExperts, Routing
from wlb.os_limits import usable_cores
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.batch import Batch, RankSlice
from wlb.runtime.reading import make_batch
from wlb.training import trainer
from wlb.training.dry_run import find_problems
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.training.rank_model import RankModel, build_model
from wlb.training.steps import open_steps

_ON_DEVICE = ("tokens", "labels", "position_ids")
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


@dataclass(frozen=True)
class RankRun:
    """What a rank did: its calls before the first step and in each, and the peak of its memory (bytes) in the last.

    ``plan`` is that of the last step, and ``rows`` are those of the rank's micro-batches in it.
    """

    setup: tuple[Call, ...]
    steps: tuple[tuple[Call, ...], ...]
    plan: StepPlan
    rows: tuple[int, ...]
    peak: int


def run_fake_ranks(config: JobConfig, hardware: str, ranks: Sequence[int], steps: int = 1) -> dict[int, RankRun]:
    """Run the first ``steps`` steps of each of ``ranks``, on synthetic documents where there is no store.

    Each runs in a process of its own: PyTorch keeps meshes and layouts of tensors for as long as a process lives.
    """
    with ProcessPoolExecutor(min(len(ranks), usable_cores()), FORKS, max_tasks_per_child=1) as pool:
        return dict(zip(ranks, pool.map(partial(_run, config, hardware, steps), ranks), strict=True))


def _run(config: JobConfig, hardware: str, steps: int, rank: int) -> RankRun:
    checked, _ = find_problems(config, hardware)
    on_gpu = checked.job.hardware.device_type == "cuda"
    log, memory, fake = CallLog(), PeakMemory(), FakeTensorMode(allow_non_fake_inputs=True)
    watcher = StepWatcher(log)
    with fake_process_group(rank, checked.job.layout.world_size), as_on_a_gpu() if on_gpu else nullcontext():
        with watcher, fake_weights(fake):
            model = build_model(checked, torch.device("cpu"))
        job = checked.job
        runner = PipelineRunner(model.stages, job.layout, model.mesh, job.rank_micro_batches, model.execution)
        exchanged = unset_fake_temporarily()(trainer.of_all_ranks)
        for optimizer in model.optimizers:
            for group in optimizer.param_groups:
                group["foreach"] = on_gpu  # as it is chosen by the device of the weights
                for weight in group["params"]:  # as after a first step
                    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
        memory.track_external(*model.stages, *model.optimizers)
        routes, read = Routes(lambda: runner.routed), partial(make_batch, store=checked.store)
        counts = [len(log.calls)]
        with (
            routes.followed(),
            closing(open_steps(checked.store, job, config.training, share=model.share)) as loader,
            log.listening(),
            memory.without_trials(),
            mock.patch.object(trainer, "of_all_ranks", exchanged),
        ):
            for step in range(1, steps + 1):
                with watcher:
                    planned = next(loader)
                routes.begin(planned.plan, _sharing_experts(model), read)
                loaded = replace(planned, batches=tuple(_on_device(batch, fake) for batch in planned.batches))
                memory.track_external(*(getattr(batch, name) for batch in loaded.batches for name in _ON_DEVICE))
                with watcher, fake, memory:
                    trainer.train_step(step, loaded, model, runner)
                counts.append(len(log.calls))
    of_steps = tuple(tuple(log.calls[first:last]) for first, last in pairwise(counts))
    peak = sum(of_device["Total"] for of_device in memory.get_tracker_snapshot("peak").values())
    rows = tuple(len(batch.tokens) for batch in loaded.batches)
    return RankRun(tuple(log.calls[: counts[0]]), of_steps, loaded.plan, rows, peak)


def _on_device(batch: Batch, fake: FakeTensorMode) -> Batch:
    """``batch`` with the tensors that a device would hold."""
    tensors: dict[str, Any] = {name: fake.from_tensor(getattr(batch, name)) for name in _ON_DEVICE}
    return replace(batch, **tensors)


class StepWatcher(TorchDispatchMode):
    """Logs every call on plain tensors; a number read from a fake one, or inside a fake mode, is 1."""

    def __init__(self, log: CallLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor or the like: its parts come by themselves
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        read = func is torch.ops.aten._local_scalar_dense.default
        if read and (isinstance(args[0], FakeTensor) or active_fake_mode()):
            return 1.0 if args[0].is_floating_point() else 1
        self._log.see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Routes:
    """The rows that ranks of an expert-parallel group send each other, in place of those that routers would choose.

    Each rank cuts its rows by the same unequal shares. Those that arrive follow from the micro-batches of the others,
    so ranks whose micro-batches do not correspond expect other sizes. ``micro_batches`` are those of this rank.
    """

    def __init__(self, micro_batches: Callable[[], Sequence[Routing]]) -> None:
        self._micro_batches = micro_batches
        self._rows: list[list[int]] = []  # of each rank of the group, in each of its micro-batches
        self._sent: list[list[int]] = []  # by each rank to each, in the present one

    def begin(self, plan: StepPlan, group: Sequence[RankSlice], read: Callable[[MicroBatch], Batch]) -> None:
        """Begin the step of ``plan``, of which the ranks of the ``group`` run these slices."""
        self._rows = [[len(batch.tokens) // share.layout.tp for batch in share.batches(plan, read)] for share in group]

    @contextmanager
    def followed(self) -> Iterator[None]:
        forward, exchanged = MixtureOfExperts.forward, experts.exchanged_counts

        def in_micro_batch(mixture: MixtureOfExperts, x_ND: Tensor, routing: Routing) -> Tensor:
            index = next(index for index, one in enumerate(self._micro_batches()) if one is routing)
            self._sent = [_cut(mixture.active * sum(rows[index : index + 1]), len(self._rows)) for rows in self._rows]
            return forward(mixture, x_ND, routing)

        def counts(counts_E: Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int], Tensor]:
            *_, arriving = exchanged(counts_E, group)
            receive = [sent[group.rank()] for sent in self._sent]
            return self._sent[group.rank()], receive, F.pad(torch.tensor(receive)[:, None], (0, arriving.shape[1] - 1))

        with (
            mock.patch.object(MixtureOfExperts, "forward", in_micro_batch),
            mock.patch.object(experts, "exchanged_counts", counts),
            mock.patch.object(experts, "_can_group", return_value=True),
        ):
            yield


def _cut(rows: int, parts: int) -> list[int]:
    """The first part gets the least, but one row if possible: the fake group receives no rows where none are sent."""
    one = min(rows, parts)
    ends = [one * part // parts + (rows - one) * part**2 // parts**2 for part in range(parts + 1)]
    return [stop - start for start, stop in pairwise(ends)]


def _sharing_experts(model: RankModel) -> list[RankSlice]:
    """The slices of the ranks that divide the experts with this one, in the order of their group."""
    mesh, layout = model.mesh, model.checked.job.layout
    if mesh.experts is None:
        return []
    sizes = layout.pp, layout.pools, layout.pool_size, layout.tp
    ranks = np.unravel_index(dist.get_process_group_ranks(mesh.experts.get_group("ep")), sizes)
    return [replace(model.share, dp_rank=int(dp), cp_rank=int(cp)) for _, dp, cp, _ in zip(*ranks, strict=True)]


class PeakMemory(MemTracker):
    """PyTorch's tracker of all storages, without its statistics of modules, which allow one micro-batch only."""

    def _ignored(self, *_: Any, **__: Any) -> None: ...

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _ignored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def without_trials(self) -> Iterator[None]:
        """Leave out the tensors of global size on which DTensor tries operators: inside a fake mode it uses that."""
        name = "_propagate_tensor_meta_non_cached"
        original = getattr(ShardingPropagator, name)

        def tried(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(self, "_fake_mode_on_entry", object()):
                return original(*args, **kwargs)

        with mock.patch.object(ShardingPropagator, name, tried):
            yield


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of a job of which no other process exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_weights(fake: FakeTensorMode) -> Iterator[None]:
    """Give modules fake weights without values where they would get memory."""
    allocate = nn.Module.to_empty

    def to_empty(module: nn.Module, *, device: torch.device) -> nn.Module:
        with fake:
            return allocate(module, device=device)

    initialise = "wlb.training.parallel.parallelize.initialise_weights"
    with mock.patch.object(nn.Module, "to_empty", to_empty), mock.patch(initialise):
        yield


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Run the kernels that a GPU would."""
    attention = SimpleNamespace(forward=cuda.forward, backward=cuda.backward, unsupported=lambda query: None)
    norms = mock.patch.object(nn.functional, "rms_norm", lambda x, shape, weight, eps: _FusedNorm.apply(x, weight))
    with mock.patch.dict(BACKENDS, cuda=attention), norms:
        try:
            yield
        finally:
            cuda._cu_seqlens.cache_clear()  # they are fake


class _FusedNorm(torch.autograd.Function):
    """What the kernel keeps and returns, without its numbers: PyTorch composes it of several operators on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x[..., :1].to(torch.float32))  # one over the norm, of each row
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), grad.flatten(0, -2).sum(0).to(weight.dtype)
