"""Measures the micro-batches of a loop that trains as it is: the documents of each, and its seconds on this process.

A micro-batch takes from its batch, or the model's forward, to the next one or to the optimizer's step. On a CPU these
are CPU seconds of the training thread, which has none while it waits. On CUDA they lie between two events, which are
read a step later so that nothing waits for them, and include waiting for other processes.

There is no collective call. Every so many steps a process leaves what it measured in the store of the process group,
and the first process takes it once all have. So processes may train different numbers of batches, or end at different
times: none waits for another, but for the first one, a few seconds at the end.
"""

from __future__ import annotations

import inspect
import pickle
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from wlb.errors import UserError
from wlb.shadow_mode.gain import Measured, ShadowGain, Step, gain_of
from wlb.shadow_mode.lengths import fields_of, read_lengths
from wlb.workload import ModelShape, model_shape
from wlb.workload.model_json import shape_of_config
from wlb.workload.profile import write_profile

_MOST_DOCUMENTS, _LEAST_STEPS = 2**15, 16  # of which the last ones are kept
_MOST_OPEN = 2**10  # micro-batches without an optimizer's step
_MOST_WAITING = 16  # times that steps were sent, while those of other processes do not come
_LAST_WAIT = 5.0  # seconds, of the first process for what others measured
_NUMBERS = count()  # of shadows: the same one has the same number on every process


class Shadow:
    """What balanced steps would gain, measured on the loop that trains with ``loader_or_model``, as ``wlb.shadow``.

    Every process makes one. Of a loader it yields the batches, unchanged, and has the attributes. ``gain`` is what was
    found last, on the first process.

    Args:
        every: Optimizer steps between reports: a line on stdout, and values for the active W&B run.
        lengths: Tokens of each document of a batch (of a model: its arguments by name), as a function of it, where its
            fields do not say them.
        tensorboard: A directory, or a writer, for the values.
        profile: A file for the fitted prices, which ``wlb check --profile`` takes.
        model: That of the profile: a name that ``wlb`` knows, a ``ModelShape`` or a Hugging Face config.

    Raises:
        UserError: ``every`` is below 1; there is a ``profile`` without ``model``; a batch does not say its lengths.
    """

    def __init__(
        self,
        loader_or_model: Any,
        *,
        every: int = 100,
        lengths: Callable[[Any], Any] | None = None,
        tensorboard: Any = None,
        profile: str | Path | None = None,
        model: Any = None,
    ) -> None:
        import torch
        import torch.distributed as dist
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        while isinstance(loader_or_model, torch.nn.Module) and hasattr(loader_or_model, "module"):
            loader_or_model = loader_or_model.module  # that of DDP
        self._loader, self._every, self._lengths = loader_or_model, every, lengths
        self._tensorboard, self._profile = tensorboard, profile
        self._model = model or getattr(loader_or_model, "config", None)
        if every < 1 or (profile and self._model is None):
            raise UserError(f"give every >= 1, which is {every}, and the model of the profile, which is {self._model}")
        self.gain: ShadowGain | None = None
        self._began: tuple[Any, Any] | None = None  # documents, and the clock
        self._open: list[tuple[Any, Any, Any]] = []  # micro-batches of this step: documents, and the clock twice
        self._unread: list[list[tuple[Any, Any, Any]]] = []  # steps
        self._ended = 0  # steps
        self._passes = self._sent = 0  # over the loader, and how often steps were sent in this one
        self._own: deque[list[list[Measured]]] = deque(maxlen=_MOST_WAITING)  # what the first process would have sent
        self._steps: deque[Step] = deque()
        self._rank, self._processes = 0, 1
        if dist.is_available() and dist.is_initialized():
            self._rank, self._processes = dist.get_rank(), dist.get_world_size()
            self._store = dist.PrefixStore(f"wlb/shadow/{next(_NUMBERS)}", dist.distributed_c10d._get_default_store())
        self._on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._waits_inside = False
        self._hooks = [register_optimizer_step_pre_hook(self._step_ends)]
        if isinstance(loader_or_model, torch.nn.Module):
            names = inspect.signature(loader_or_model.forward)

            def forward_begins(module: Any, positional: Any, keywords: Any) -> None:
                if module.training and torch.is_grad_enabled():
                    self._begin({**names.bind_partial(*positional, **keywords).arguments, **keywords})

            self._on_cuda = next(loader_or_model.parameters()).is_cuda
            self._hooks.append(
                loader_or_model.register_forward_pre_hook(forward_begins, with_kwargs=True, prepend=True)
            )

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch in self._loader:
                self._begin(batch)
                yield batch
                self._end()
        finally:
            self.conclude()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def conclude(self) -> ShadowGain | None:
        """Report on all steps so far and write the profile; every pass over a loader ends with it."""
        self._began = None
        self._exchange(len(self._unread), _LAST_WAIT)
        self._own.clear()
        self._passes, self._sent = self._passes + 1, 0
        if self._steps and self._report() and self.gain:
            self._say(self.gain.verdict)
            if self._profile:
                self._write_profile(self.gain, self._profile)
        return self.gain

    def close(self) -> ShadowGain | None:
        """Conclude, and measure nothing from now on."""
        for hook in self._hooks:
            hook.remove()
        return self.conclude()

    def _begin(self, batch: Any) -> None:
        self._end()
        if self._lengths is not None:
            documents: Any = (np.asarray(self._lengths(batch), np.int64),) * 2
        elif self._on_cuda:  # copied without waiting, and read when it has come
            fields = fields_of(batch).items()
            documents = {kind: a.to("cpu", non_blocking=True) if hasattr(a, "is_cuda") else a for kind, a in fields}
        else:
            documents = read_lengths(fields_of(batch))
        self._began = documents, self._clock()

    def _end(self) -> None:
        if self._began is not None:
            self._open.append((*self._began, self._clock()))
            self._began = None
        if len(self._open) > _MOST_OPEN:
            self._say(f"{_MOST_OPEN} micro-batches without a step of a torch optimizer are not counted")
            self._open.clear()

    def _clock(self) -> Any:
        if not self._on_cuda:
            return time.thread_time()
        from torch.cuda import Event

        event = Event(enable_timing=True)
        event.record()
        return event

    def _step_ends(self, optimizer: Any, *_: Any) -> None:
        """Called before every optimizer's step; the first of several optimizers ends the step."""
        self._end()
        if not self._open:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._waits_inside = any(type(one).__name__ in ("DTensor", "FlatParameter") for one in parameters)
        self._unread.append(self._open)
        self._open, self._ended = [], self._ended + 1
        due = self._ended % self._every == 0
        if self._exchange(len(self._unread) - self._on_cuda if due else 0):  # the newest may still run on the device
            self._report()

    def _exchange(self, steps: int, wait: float = 0.0) -> bool:
        """Send so many steps, and take what all processes have sent; whether there is any, on the first process."""
        before, until = len(self._steps), time.monotonic() + wait
        if steps:
            measured = [[_measured(*one) for one in step] for step in self._unread[:steps]]
            del self._unread[:steps]
            if self._rank == 0:
                self._own.append(measured)
            else:
                rows: Any = pickle.dumps(measured)
                with suppress(RuntimeError):  # the first process has ended, and the store with it
                    self._store.set(f"{self._passes} {self._sent} {self._rank}", rows)
            self._sent += 1
        while self._own:
            oldest = f"{self._passes} {self._sent - len(self._own)}"
            keys = [f"{oldest} {rank}" for rank in range(1, self._processes)]
            while keys and not self._store.check(keys):
                if time.monotonic() >= until:
                    return len(self._steps) > before
                time.sleep(0.05)
            rows = [pickle.loads(self._store.get(key)) for key in keys]
            self._steps += zip(self._own.popleft(), *rows, strict=False)
            for key in keys:
                self._store.delete_key(key)
        return len(self._steps) > before

    def _report(self) -> bool:
        """Print and log what balanced steps would gain; False where that is not known."""
        documents = [sum(len(one.documents) for rank in step for one in rank) for step in self._steps]
        while len(self._steps) > _LEAST_STEPS and sum(documents[-len(self._steps) :]) > _MOST_DOCUMENTS:
            self._steps.popleft()
        try:
            gain = self.gain = gain_of(self._steps, waits_inside=self._waits_inside, waits_measured=self._on_cuda)
        except UserError as error:
            self._say(f"step {self._ended}: no gain is known, as {error}")
            return False
        self._say(f"step {self._ended}, the last {gain.steps}: {gain}")
        if isinstance(self._tensorboard, str | Path):
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self._tensorboard))
        if self._tensorboard is not None:
            for name, value in gain.values.items():
                self._tensorboard.add_scalar(name, value, self._ended)
        if run := getattr(sys.modules.get("wandb"), "run", None):
            run.log(gain.values, commit=False)
        return True

    def _write_profile(self, gain: ShadowGain, path: str | Path) -> None:
        import torch

        shape = model_shape(self._model) if isinstance(self._model, str) else self._model
        if not isinstance(shape, ModelShape):
            shape = shape_of_config(shape)
        profile = gain.prices.profile(
            shape,
            machine=torch.cuda.get_device_name() if self._on_cuda else platform.processor() or platform.machine(),
            versions={"torch": torch.__version__},
            dtype="as trained",
            clock="events around micro-batches" if self._on_cuda else "CPU seconds of the training thread",
            threads=torch.get_num_threads(),
        )
        write_profile(profile, path)
        self._say(f"prices are in {path}")

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(f"wlb shadow: {text}", flush=True)


def _measured(documents: Any, begin: Any, end: Any) -> Measured:
    computed, trained = read_lengths(documents) if isinstance(documents, dict) else documents
    if isinstance(begin, float):
        return Measured(computed, trained, end - begin)
    end.synchronize()
    return Measured(computed, trained, begin.elapsed_time(end) / 1000)
