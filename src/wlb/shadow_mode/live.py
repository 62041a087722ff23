"""Measures the micro-batches of a loop that trains as it is: the documents of each, and its seconds on this process.

A micro-batch takes from its batch, or the model's forward, to the next one or to the optimizer's step: CPU seconds of
the training thread, or on CUDA the time between two events, read once they are done, which includes waiting for others.

Measuring never stops the loop, and makes no collective call. Every so many steps a process leaves its last steps in the
store of the process group, where a step later the first process takes those that all have left, by their number. It
alone ever waits for others, at the end of the loop.
"""

from __future__ import annotations

import inspect
import pickle
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakSet

from wlb.errors import UserError
from wlb.shadow_mode.gain import Measured, ShadowGain, Step, gain_of
from wlb.shadow_mode.lengths import fields_of, read_lengths
from wlb.workload import ModelShape, model_shape
from wlb.workload.model_json import shape_of_config
from wlb.workload.profile import write_profile

_MOST_DOCUMENTS, _LEAST_STEPS = 2**14, 8  # of all processes, of which the last ones are kept
_MOST_OPEN = 2**10  # micro-batches of a step
_LAST_WAIT = 5.0  # seconds
_NUMBERS = count()  # of shadows: the same one has the same number on every process


def _at_no_risk(measure: Callable[..., None]) -> Callable[..., None]:
    """``measure``, which prints its failure instead of raising it, and then measures nothing more."""

    @wraps(measure)
    def guarded(self: Shadow, *arguments: Any) -> None:
        try:
            if not self._stopped:
                measure(self, *arguments)
        except Exception as error:
            self._stopped, self._open, self._running, self._kept = True, [], [], {}
            what = " ".join(f"{type(error).__name__}: {error}".split())
            with suppress(Exception):
                print(f"wlb shadow: process {self._rank}: {what}; nothing is measured from here on", flush=True)

    return guarded


class Shadow:
    """What balanced steps would gain, measured on the loop that trains with ``loader_or_model``, as ``wlb.shadow``.

    Every process makes one. Of a loader it yields the batches, unchanged, and has the attributes. ``gain`` is what was
    found last, on the first process. Once it is made it raises nothing: a failure is printed, and ends the measuring.

    Args:
        every: Optimizer steps between reports: a line on stdout, and values for the active W&B run.
        lengths: Tokens of each document of a batch (of a model: its arguments by name), as a function of it, where its
            fields do not say them.
        tensorboard: A ``SummaryWriter`` for the values.
        profile: A file for the fitted prices, which ``wlb check --profile`` takes.
        model: That of the profile: a name, ``ModelShape`` or Hugging Face config; by default that of the model watched.

    Raises:
        UserError: ``every`` is below 1; ``model`` has no known shape, or is missing for a ``profile``.
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
        from torch import nn

        while isinstance(loader_or_model, nn.Module) and hasattr(loader_or_model, "module"):
            loader_or_model = loader_or_model.module  # that of DDP
        self._loader, self._every, self._lengths = loader_or_model, every, lengths
        self._tensorboard, self._profile, self._shape = tensorboard, profile, _shape_of(model, loader_or_model)
        if every < 1 or (profile and self._shape is None):
            raise UserError(f"give every >= 1, which is {every}, and the model of the profile, which is {model}")
        self.gain: ShadowGain | None = None
        self._began: tuple[Any, Any] | None = None  # documents, and the clock
        self._open: list[tuple[Any, Any, Any]] = []  # micro-batches of this step: documents, and the clock twice
        self._running: list[list[tuple[Any, Any, Any]]] = []  # steps that the device may not have done
        self._kept: dict[tuple[int, int], list[Measured]] = {}  # steps, by pass over the loader and number in it
        self._passes = self._of_pass = self._steps = 0
        self._rank = self._processes = 0  # not known before the first micro-batch
        self._number, self._wait = next(_NUMBERS), _LAST_WAIT
        self._stopped = self._on_cuda = self._waits_inside = False
        self._hooks: list[Any] = []
        if isinstance(loader_or_model, nn.Module):
            self._names = inspect.signature(loader_or_model.forward)
            watch = loader_or_model.register_forward_pre_hook
            self._hooks = [watch(self._forward_begins, with_kwargs=True, prepend=True), self._before_steps()]

    def __iter__(self) -> Iterator[Any]:
        hook, wait = self._before_steps(), 0.0  # nothing waits where the loop is left early
        try:
            for batch in self._loader:
                self._begin(batch)
                yield batch
                self._end()
            wait = self._wait
        finally:
            hook.remove()
            self._conclude(wait)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, as with a copy of the model, measures nothing."""
        return {"_loader": self._loader, "_stopped": True, "_wait": 0.0, "_hooks": [], "gain": self.gain}

    def close(self) -> ShadowGain | None:
        """Report on all steps, write the profile and let go of the model; a pass over a loader does so at its end."""
        for hook in self._hooks:
            hook.remove()
        self._conclude(self._wait)
        return self.gain

    def _before_steps(self) -> Any:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        _LIVE.add(self)
        return register_optimizer_step_pre_hook(self._step)

    @_at_no_risk
    def _forward_begins(self, module: Any, positional: Any, keywords: Any) -> None:
        from torch import compiler, is_grad_enabled

        if module.training and is_grad_enabled() and not compiler.is_compiling():
            self._begin({**self._names.bind_partial(*positional, **keywords).arguments, **keywords})

    @_at_no_risk
    def _begin(self, batch: Any) -> None:
        self._end()
        if not self._processes:
            self._join()
        fields = fields_of(batch) if self._lengths is None else {"lengths": self._lengths(batch)}
        if self._on_cuda:  # copied without waiting, and read when the step is done
            fields = {
                kind: a.to("cpu", non_blocking=True) if hasattr(a, "is_cuda") else a for kind, a in fields.items()
            }
        self._began = fields if self._on_cuda else read_lengths(fields), self._clock()

    @_at_no_risk
    def _end(self) -> None:
        if self._began is not None:
            self._open.append((*self._began, self._clock()))
            self._began = None
        if len(self._open) > _MOST_OPEN:
            raise UserError(f"no torch optimizer made a step in {_MOST_OPEN} micro-batches")

    @_at_no_risk
    def _step(self, optimizer: Any, *_: Any) -> None:
        """Called before each; the first of several optimizers ends the step."""
        for shadow in _LIVE:
            shadow._end()  # before what this one plans
        if self._open:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._waits_inside = any(type(one).__name__ in ("DTensor", "FlatParameter") for one in parameters)
            self._running.append(self._open)
            self._open, self._steps = [], self._steps + 1
            self._read()
            if self._rank and self._steps % self._every == 0:
                self._leave()
            elif not self._rank and self._steps > self._every and (self._steps - 1) % self._every == 0:
                self._report(0.0)

    @_at_no_risk
    def _conclude(self, wait: float) -> None:
        self._began = None
        self._read()
        self._running, self._passes, self._of_pass = [], self._passes + 1, 0
        if self._rank:
            self._leave()
        elif gain := self._report(wait):
            self._say(gain.verdict)
            if self._profile:
                self._write_profile(gain, self._profile)

    def _join(self) -> None:
        """Find out where the loop runs, and with which other processes."""
        import torch
        import torch.distributed as dist

        self._on_cuda, self._processes = torch.cuda.is_available() and torch.cuda.is_initialized(), 1
        if dist.is_available() and dist.is_initialized():
            self._rank, store = dist.get_rank(), getattr(dist.group.WORLD, "get_group_store", None)
            if store is None:
                self._say("this torch does not give its store; the first process is measured alone")
                self._stopped = self._rank > 0
            else:
                self._store = dist.PrefixStore(f"wlb/shadow/{self._number}", store())
                self._processes = dist.get_world_size()

    def _clock(self) -> Any:
        if not self._on_cuda:
            return time.thread_time()
        from torch.cuda import Event

        event = Event(enable_timing=True)
        event.record()
        return event

    def _read(self) -> None:
        """Read the steps that the device has done, and forget the first where there are enough."""
        while self._running and (not self._on_cuda or self._running[0][-1][2].query()):
            self._kept[self._passes, self._of_pass] = [_measured(*one) for one in self._running.pop(0)]
            self._of_pass += 1
        documents = sum(len(one.documents) for step in self._kept.values() for one in step)
        while len(self._kept) > _LEAST_STEPS and documents > _MOST_DOCUMENTS / self._processes:
            documents -= sum(len(one.documents) for one in self._kept.pop(next(iter(self._kept))))

    def _leave(self) -> None:
        left: Any = pickle.dumps((self._passes, self._kept))
        with suppress(RuntimeError):  # the first process has ended, and the store with it
            self._store.set(str(self._rank), left)

    def _taken(self, wait: float) -> list[Step]:
        """The steps that all processes have left; it waits so long for all to end their pass."""
        keys, left, until = [str(rank) for rank in range(1, self._processes)], [], time.monotonic() + wait
        while keys:
            left = [pickle.loads(self._store.get(key)) for key in keys] if self._store.check(keys) else []
            if left and all(passes >= self._passes for passes, _ in left):
                break
            if time.monotonic() >= until:
                self._wait -= wait  # not another time
                break
            time.sleep(0.1)
        kept = [self._kept, *(steps for _, steps in left)]
        everywhere = set(self._kept).intersection(*kept) if len(kept) > len(keys) else set()
        return [[steps[number] for steps in kept] for number in sorted(everywhere)]

    def _report(self, wait: float) -> ShadowGain | None:
        """Print and log what balanced steps would gain, where that is known."""
        try:
            gain = gain_of(self._taken(wait), waits_inside=self._waits_inside, on_cuda=self._on_cuda)
        except UserError as error:
            self._say(f"step {self._steps}: no gain is known, as {error}")
            return None
        self.gain = gain
        self._say(f"step {self._steps}, the last {gain.steps}: {gain}")
        if self._tensorboard is not None:
            for name, value in gain.values.items():
                self._tensorboard.add_scalar(name, value, self._steps)
        if run := getattr(sys.modules.get("wandb"), "run", None):
            run.log(gain.values, commit=False)  # with what the loop logs next, whose steps stay as they are
        return gain

    def _write_profile(self, gain: ShadowGain, path: str | Path) -> None:
        import torch

        assert self._shape is not None
        profile = gain.prices.profile(
            self._shape,
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


_LIVE: WeakSet[Shadow] = WeakSet()


def _measured(documents: Any, begin: Any, end: Any) -> Measured:
    on_cpu = isinstance(begin, float)
    computed, without_padding = documents if on_cpu else read_lengths(documents)
    return Measured(computed, without_padding, end - begin if on_cpu else begin.elapsed_time(end) / 1000)


def _shape_of(model: Any, watched: Any) -> ModelShape | None:
    """That of ``model`` or, where it is None and the config of what is ``watched`` says it, of that."""
    try:
        given = getattr(watched, "config", None) if model is None else model
        if given is None or isinstance(given, ModelShape | str):
            return model_shape(given) if isinstance(given, str) else given
        return shape_of_config(given)
    except Exception as error:
        if model is None:
            return None
        raise UserError(f"model has no known shape: {error}; give a name, a ModelShape or a config") from error
