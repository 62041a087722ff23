"""Measures the micro-batches of an unchanged training loop: their documents, and their seconds on this process.

A micro-batch lasts from its batch, or the forward of the model, to the next one or to the optimizer step. We measure
CPU seconds of the training thread. On CUDA we measure the time between two events, which includes waiting for others.

Measuring never stops the loop and calls no collective. Every so many steps a process puts its last steps into the store
of the process group. One step later the first process reads the steps that all processes have stored. Only the first
process ever waits for the others, at the end of the loop.
"""

import inspect
import pickle
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from itertools import count
from math import inf, isnan
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from wlb.errors import UserError
from wlb.runtime.clock import Clock, clock_of
from wlb.shadow_mode.fields import fields_of, lengths_of
from wlb.shadow_mode.gain import Measured, ShadowGain, Step, gain_of
from wlb.token_count import check_whole
from wlb.workload import ModelShape, model_shape
from wlb.workload.model_json import shape_of_config
from wlb.workload.profile import write_profile

_MOST_DOCUMENTS, _LEAST_STEPS = 2**14, 8  # kept documents of all processes, and kept steps
_MOST_OPEN = 2**10  # micro-batches of a step
_LAST_WAIT = 5.0  # seconds
_NO_BATCH = object()
_THREAD_TIME = Clock("CPU seconds of the training thread", lambda: time.thread_time())
_NUMBERS = count()  # numbers shadows in order of creation, which is the same on every process


def _at_no_risk(measure: Callable[..., None]) -> Callable[..., None]:
    """``measure`` that prints a failure instead of raising it, and then stops measuring."""

    @wraps(measure)
    def guarded(self: "Shadow", *arguments: Any) -> None:
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
    """Measures one loader or model, for ``shadow``, which has the arguments; itself a loader where it wraps one."""

    def __init__(
        self, watched: Any, every: int, lengths: Any, tensorboard: Any, profile: str | Path | None, model: Any
    ) -> None:
        while isinstance(watched, nn.Module) and hasattr(watched, "module"):
            watched = watched.module  # inside DDP
        self._loader, self._is_model = watched, isinstance(watched, nn.Module)
        self._every, self._lengths, self._tensorboard, self._profile = every, lengths, tensorboard, profile
        self._shape = _shape_of(model, watched)
        self._check_arguments()
        self.gain: ShadowGain | None = None
        self._began: tuple[Any, Any] | None = None  # documents, and the clock
        self._open: list[tuple[Any, Any, Any]] = []  # micro-batches of this step: documents, begin and end
        self._running: list[list[tuple[Any, Any, Any]]] = []  # steps that the device may not have finished
        self._kept: dict[tuple[int, int], list[Measured]] = {}  # steps, by pass over the loader and number in it
        self._passes = self._of_pass = self._steps = 0
        self._rank = self._processes = 0  # unknown before the first micro-batch
        self._number, self._wait = next(_NUMBERS), _LAST_WAIT
        self._stopped = self._on_cuda = self._waits_inside = False
        self._hooks: list[Any] = []
        _LIVE.add(self)
        if self._is_model:
            self._names = inspect.signature(getattr(watched, "_orig_mod", watched).forward)  # compiled
            began = watched.register_forward_pre_hook(self._forward_begins, with_kwargs=True, prepend=True)
            self._hooks = [began, register_optimizer_step_pre_hook(self._step)]

    def _check_arguments(self) -> None:
        if not (self._is_model or hasattr(self._loader, "__iter__") or hasattr(self._loader, "__getitem__")):
            kind = type(self._loader).__name__
            raise UserError(f"wlb.shadow got a {kind}; give the loader of your loop, or the model")
        check_whole("every", self._every)
        if self._lengths is not None and not callable(self._lengths):
            raise UserError(f"lengths is a {type(self._lengths).__name__}; give a function of the batch")
        if self._tensorboard is not None and not hasattr(self._tensorboard, "add_scalar"):
            kind = type(self._tensorboard).__name__
            raise UserError(f"tensorboard is a {kind} without add_scalar; give a SummaryWriter")
        if self._profile and self._shape is None:
            known = "a name such as llama3-8b or a Hugging Face config"
            raise UserError(f"profile needs the shape of a model; give model, {known}")

    def in_place(self) -> Any:
        """The loader itself, in a class that measures its passes; this shadow where there is no such class."""
        loader, kind = self._loader, getattr(type(self._loader), "_unmeasured", type(self._loader))
        if self._is_model or not hasattr(kind, "__iter__"):
            return self
        try:  # not by assignment, as Accelerate's loaders have a property of this name
            vars(object)["__class__"].__set__(loader, self._measuring(kind))
        except Exception as error:  # whatever the class of the loader does to classes derived from it
            if isinstance(loader, DataLoader):  # a wrapper of it would not be sharded
                sealed = f"no class derives from that of the loader ({error})"
                raise UserError(f"{sealed}; give wlb.shadow the model") from error
            return self
        return loader

    def _measuring(self, kind: Any) -> Any:
        """A class derived from ``kind``, with its name, whose passes are measured."""
        watching = self

        class MeasuredLoader(kind):
            __slots__ = ()
            _unmeasured = kind  # another shadow of the loader ends this one
            gain = property(lambda _: watching.gain)

            def __iter__(self) -> Iterator[Any]:
                return watching._passed(self, super().__iter__())

            def __reduce_ex__(self, protocol: Any) -> Any:  # a copy measures nothing
                made, arguments, *state = super().__reduce_ex__(protocol)
                made, *arguments = (kind if part is MeasuredLoader else part for part in (made, *arguments))
                return (_new if made.__name__ == "__newobj__" else made, tuple(arguments), *state)

            if "_is_accelerate_prepared" not in getattr(self._loader, "__dict__", ()):

                @property
                def _is_accelerate_prepared(self) -> Any:  # what ``accelerator.prepare`` asks first
                    right = "wlb.shadow(accelerator.prepare(loader))"
                    raise UserError(f"accelerator.prepare makes another loader, which is not measured; call {right}")

        return wraps(kind, updated=())(MeasuredLoader)

    def __iter__(self) -> Iterator[Any]:
        if self._is_model:
            raise UserError("wlb.shadow watches a model here, which has no batches; loop over your loader")
        return self._passed(self._loader, iter(self._loader))

    def _passed(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        return self._measured_pass(loader, batches) if torch.is_grad_enabled() else batches  # else it evaluates

    def _measured_pass(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        hook = register_optimizer_step_pre_hook(self._step)
        wait, left = 0.0, inf  # no process waits if the loop ends early
        with suppress(Exception):
            left = len(loader)
        try:
            while (batch := next(batches, _NO_BATCH)) is not _NO_BATCH:
                self._begin(batch)
                left -= 1
                wait = 0.0 if left else self._wait  # Lightning never asks for one more
                yield batch
                self._end()
            wait = self._wait
        finally:
            hook.remove()
            self._conclude(wait)

    def __len__(self) -> int:
        return len(self._loader)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made for example with a copy of the model, measures nothing."""
        kept = {name: getattr(self, name) for name in ("_loader", "_is_model", "gain")}
        return kept | {"_stopped": True, "_wait": 0.0, "_hooks": []}

    def close(self) -> ShadowGain | None:
        """Report on all steps, write the profile and release the model; a pass over a loader ends with this."""
        for hook in self._hooks:
            hook.remove()
        self._conclude(self._wait)
        return self.gain

    @_at_no_risk
    def _forward_begins(self, module: Any, positional: Any, keywords: Any) -> None:
        if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._begin({**self._names.bind_partial(*positional, **keywords).arguments, **keywords})

    @_at_no_risk
    def _begin(self, batch: Any) -> None:
        self._end()
        if not self._processes:
            self._join()
        fields = fields_of(batch) if self._lengths is None else {"lengths": self._lengths(batch)}
        if self._on_cuda:  # copy without waiting, and read when the step is done
            tensors = {kind: field for kind, field in fields.items() if isinstance(field, torch.Tensor)}
            fields |= {kind: tensor.to("cpu", non_blocking=True) for kind, tensor in tensors.items()}
        self._began = fields if self._on_cuda else lengths_of(fields), self._clock.mark()

    @_at_no_risk
    def _end(self) -> None:
        if self._began is not None:
            self._open.append((*self._began, self._clock.mark()))
            self._began = None
        if len(self._open) > _MOST_OPEN:
            raise UserError(f"no torch optimizer stepped in {_MOST_OPEN} micro-batches; shadow mode needs one")

    @_at_no_risk
    def _step(self, optimizer: Any, *_: Any) -> None:
        """Called before each optimizer step; the first of several optimizers ends the step."""
        for shadow in _LIVE:
            shadow._end()  # so that their clocks do not run while this one plans
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
            if self._profile and self._shape:
                self._write_profile(gain, self._shape, self._profile)

    def _join(self) -> None:
        """Find the device of the loop, and the other processes."""
        self._on_cuda, self._processes = torch.cuda.is_available() and torch.cuda.is_initialized(), 1
        self._clock = clock_of(torch.device("cuda" if self._on_cuda else "cpu"), _THREAD_TIME)
        if dist.is_available() and dist.is_initialized():
            self._rank, store = dist.get_rank(), getattr(dist.group.WORLD, "get_group_store", None)
            if store is None:
                self._say("this torch does not expose its store, so only the first process is measured")
                self._stopped = self._rank > 0
            else:
                self._store = dist.PrefixStore(f"wlb/shadow/{self._number}", store())
                self._processes = dist.get_world_size()

    def _read(self) -> None:
        """Read the steps that the device has finished, and drop the oldest if there are enough."""
        while self._running and (not self._on_cuda or self._running[0][-1][2].query()):
            self._kept[self._passes, self._of_pass] = [self._measured(*one) for one in self._running.pop(0)]
            self._of_pass += 1
        documents = sum(len(one.documents) for step in self._kept.values() for one in step)
        while len(self._kept) > _LEAST_STEPS and documents > _MOST_DOCUMENTS / self._processes:
            documents -= sum(len(one.documents) for one in self._kept.pop(next(iter(self._kept))))

    def _measured(self, documents: Any, begin: Any, end: Any) -> Measured:
        computed, without_padding = lengths_of(documents) if self._on_cuda else documents
        return Measured(computed, without_padding, self._clock.between(end, begin))

    def _leave(self) -> None:
        left: Any = pickle.dumps((self._passes, self._kept))
        with suppress(RuntimeError):  # the first process has ended, and the store with it
            self._store.set(str(self._rank), left)

    def _taken(self, wait: float) -> list[Step]:
        """The steps that all processes have stored; waits up to ``wait`` seconds for all to end their pass."""
        keys, left, until = [str(rank) for rank in range(1, self._processes)], [], time.monotonic() + wait
        while keys:
            left = [pickle.loads(self._store.get(key)) for key in keys] if self._store.check(keys) else []
            if left and all(passes >= self._passes for passes, _ in left):
                break
            if time.monotonic() >= until:
                self._wait -= wait  # wait only once
                break
            time.sleep(0.1)
        kept = [self._kept, *(steps for _, steps in left)]
        everywhere = set(self._kept).intersection(*kept) if len(kept) > len(keys) else set()
        return [[steps[number] for steps in kept] for number in sorted(everywhere)]

    def _report(self, wait: float) -> ShadowGain | None:
        """Print and log the gain of balanced steps, if it is known."""
        try:
            gain = gain_of(self._taken(wait), waits_inside=self._waits_inside, on_cuda=self._on_cuda)
        except UserError as error:
            self._say(f"step {self._steps}: the gain is unknown, because {error}")
            return None
        self.gain = gain
        self._say(f"step {self._steps}, the last {gain.steps}: {gain}")
        if self._tensorboard is not None:
            for name, value in gain.values.items():
                self._tensorboard.add_scalar(name, value, self._steps)
        if run := getattr(sys.modules.get("wandb"), "run", None):
            run.log(gain.values, commit=False)  # joins the next log of the loop, so its step numbers stay
        return gain

    def _write_profile(self, gain: ShadowGain, shape: ModelShape, path: str | Path) -> None:
        if isnan(gain.speed):
            return self._say(f"{path} is not written, because its prices would explain too little")
        profile = gain.prices.profile(
            shape,
            machine=torch.cuda.get_device_name() if self._on_cuda else platform.processor() or platform.machine(),
            versions={"torch": torch.__version__},
            dtype="as trained",
            clock=self._clock.name,
            threads=torch.get_num_threads(),
        )
        write_profile(profile, path)
        return self._say(f"prices are in {path}")

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(f"wlb shadow: {text}", flush=True)


_LIVE: WeakSet[Shadow] = WeakSet()


def _new(kind: Any, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def _shape_of(model: Any, watched: Any) -> ModelShape | None:
    """The shape of ``model``, or if that is None the shape in the config of ``watched``, if any."""
    if isinstance(model, ModelShape | str):
        return model_shape(model) if isinstance(model, str) else model
    try:
        return shape_of_config(watched.config if model is None else model)
    except Exception as error:
        if model is None:
            return None
        raise UserError(f"model has no known shape: {error}; give a name, a ModelShape or a config") from error
