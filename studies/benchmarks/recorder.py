"""What a training loop does, whichever stack it is of: which tokens every step trains, and how long they take."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_post_hook

from wlb.runtime.clock import thread_seconds

Tokens = NDArray[np.int64]


@dataclass
class MicroBatch:
    """Tokens that this rank trained, numbers made of id and position in the document, and CPU seconds of its thread.

    ``ranks`` are those that share it; none where this rank runs it alone.
    """

    tokens: Tokens
    seconds: float
    ranks: tuple[int, ...] = ()


@dataclass
class Recorder:
    """The last ``per_step`` micro-batches before every step of the optimizer, all where it is None.

    What a check ran before them is left out.
    """

    per_step: int | None
    steps: list[list[MicroBatch]] = field(default_factory=list)
    _pending: list[MicroBatch] = field(default_factory=list)

    @property
    def tokens(self) -> Tokens:
        return np.concatenate([one.tokens for step in self.steps for one in step])


def numbered(ids: Tokens, positions: Tokens) -> Tokens:
    """One number for each token, so that two runs trained the same where these are the same, whatever their order."""
    return ids.flatten() * 2**32 + positions.flatten()


def positions_of(numbers: Tokens) -> Tokens:
    return numbers % 2**32


@contextmanager
def recording(model_class: type[torch.nn.Module], per_step: int | None) -> Iterator[Recorder]:
    """Record the training of every model of this class: its calls, their backwards, and the optimizer's steps.

    A thread that waits, for another rank or for a core, is not timed.
    """
    recorder = Recorder(per_step)
    call, backward = model_class.__call__, torch.autograd.backward

    def recorded_call(model: Any, *positional: Any, **keywords: Any) -> Any:
        began = thread_seconds()
        result = call(model, *positional, **keywords)
        trained = numbered(keywords["input_ids"].numpy(), keywords["position_ids"].numpy())
        shared = keywords.get("attend")
        ranks = shared.members or () if shared else ()
        recorder._pending.append(MicroBatch(trained, thread_seconds() - began, ranks))
        return result

    def recorded_backward(*positional: Any, **keywords: Any) -> None:
        began = thread_seconds()
        backward(*positional, **keywords)
        recorder._pending[-1].seconds += thread_seconds() - began

    def stepped(*_: Any) -> None:
        recorder.steps.append(recorder._pending[-(per_step or 0) :])
        recorder._pending.clear()

    hook = register_optimizer_step_post_hook(stepped)
    with (
        mock.patch.object(model_class, "__call__", recorded_call),
        mock.patch.object(torch.autograd, "backward", recorded_backward),
    ):
        yield recorder
    hook.remove()
