"""Two checks for any loop: that packing does not change the gradient, and that work is as balanced as planned.

``check_packing`` trains one packed micro-batch and its documents one at a time, and compares loss and gradients: a
wrong mask, positions that do not restart, or a loss that is a mean of means shows at once. ``BalanceMonitor`` holds
what was predicted of each step beside the seconds that every rank computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from wlb.errors import UserError
from wlb.packing.plan import StepPlan
from wlb.runtime.collectives import gathered_rows
from wlb.training.observe.compute_clock import thread_seconds

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}  # of the gradient
_QUANTISED = TOLERANCE[torch.bfloat16]
_LOSS_TOLERANCE = 1e-5  # at least: Hugging Face takes the loss in float32, whatever the parameters are


@dataclass(frozen=True)
class PackingCheck:
    """Loss, and norm of the difference of gradients over the norm of the gradient: packed, and one at a time."""

    packed_loss: float
    single_loss: float
    gradient_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        tolerance = max(self.tolerance, _LOSS_TOLERANCE) * max(1e-12, abs(self.single_loss))
        close = abs(self.packed_loss - self.single_loss) <= tolerance
        return close and self.gradient_error <= self.tolerance


def check_packing(
    model: nn.Module,
    packed: Callable[[], Tensor],
    singles: Iterable[Callable[[], Tensor]],
    *,
    tolerance: float | None = None,
    sharded: bool = False,
) -> PackingCheck:
    """Compare the loss and gradients of ``packed()`` with the sums over ``singles``.

    Each call runs ``model`` forward and returns the summed loss of its documents' labelled tokens: ``packed`` of a
    micro-batch, ``singles`` of its documents alone. One set of gradients is held, as in training. Those that the model
    holds before are put back afterwards; dropout must be off.

    Args:
        tolerance: Of the gradient's error; by default it follows the types of the parameters.
        sharded: Whether processes have parts of the losses and gradients (as under FSDP), so that these are averaged
            over all of them, which call this together.

    Raises ``UserError`` where the two differ by more.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        single_loss = sum(_backward(compute, 1.0) for compute in singles)
        single_square = _square(parameters)
        packed_loss = _backward(packed, -1.0)  # what remains are the gradients' differences
        sums = torch.tensor([packed_loss, single_loss, _square(parameters), single_square], dtype=torch.float64)
    finally:
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient
    if sharded and dist.is_initialized():
        sums = gathered_rows(sums.tolist(), torch.float64, parameters[0].device).mean(dim=0)
    packed_loss, single_loss, difference, single_square = sums.tolist()
    error = math.sqrt(difference / max(single_square, 1e-60))
    if tolerance is None:
        tolerance = packing_tolerance(model)
    check = PackingCheck(packed_loss, single_loss, error, tolerance)
    if not check.passed:
        raise UserError(
            f"packed documents train something else than single ones: loss {packed_loss:.6g} and {single_loss:.6g}, "
            f"gradients {error:.1e} apart, over {tolerance:g}; look at the attention implementation "
            "(register_attention), position_ids that restart, labels of -100 for first tokens, use_cache = False, "
            "dropout, and losses that are means (a router's auxiliary loss is one)"
        )
    return check


def packing_tolerance(model: nn.Module) -> float:
    """The tolerance for the least exact type in use: of the parameters, frozen ones included, or of autocast."""
    types = {(parameter.dtype, parameter.device.type) for parameter in model.parameters()}
    computed = {torch.get_autocast_dtype(kind) for _, kind in types if torch.is_autocast_enabled(kind)}
    return max((TOLERANCE.get(dtype, _QUANTISED) for dtype in {dtype for dtype, _ in types} | computed), default=0.0)


def _backward(compute: Callable[[], Tensor], sign: float) -> float:
    loss = compute()
    (sign * loss).backward()
    return float(loss.detach())


def _square(parameters: Sequence[nn.Parameter]) -> float:
    """Of the norm of this process's gradients."""
    total = 0.0
    for parameter in parameters:
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            exact = torch.promote_types(gradient.dtype, torch.float32)
            total += float(torch.linalg.vector_norm(gradient, dtype=exact)) ** 2
    return total


@dataclass
class BalanceMonitor:
    """Predicted and measured imbalance of every step, and the seconds of every rank.

    Wrap what a rank computes in ``computing()`` and call ``end_step`` once a step on every rank. On a CPU the clock
    is that of the thread, and does not count waiting for other ranks. On CUDA it is the time between two events, which
    counts collectives that run inside and waits for the kernels: measure some steps, not all.

    ``predicted`` and ``measured`` hold the slowest over the mean rank of each step, ``seconds`` those of all ranks, of
    shape (ranks,) a step; they are the same on every rank.
    """

    dp: int = 1
    cp: int = 1
    device: str = "cpu"
    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    seconds: list[NDArray[np.float64]] = field(default_factory=list)
    _own: float = 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the seconds of what runs inside for this rank's step."""
        if self.device != "cuda":
            began = thread_seconds()
            yield
            self._own += thread_seconds() - began
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        end.synchronize()
        self._own += start.elapsed_time(end) / 1000

    def end_step(self, plan: StepPlan | None = None) -> None:
        """Close a step, which trained ``plan`` if one is known; a collective call where there are several ranks."""
        seconds = np.array([self._own])
        if dist.is_initialized():
            seconds = gathered_rows([self._own], torch.float64, torch.device(self.device)).flatten().numpy()
        self.seconds.append(seconds)
        self.measured.append(float(seconds.max() / max(seconds.mean(), 1e-12)))
        if plan is not None:
            work = np.array([sum(micro_batch.workload for micro_batch in rank) for rank in plan.ranks])
            self.predicted.append(float(work.max() / work.mean()))
        self._own = 0.0

    def summary(self, skip: int = 1) -> dict[str, float | list[float]]:
        """Means over all steps but the first ``skip``: imbalance as predicted and measured, seconds of each rank."""
        measured = self.measured[skip:]
        result: dict[str, float | list[float]] = {
            "measured_imbalance": float(np.mean(measured)) if measured else float("nan"),
            "seconds_per_rank": np.sum(self.seconds[skip:], axis=0).tolist() if measured else [],
        }
        if self.predicted[skip:]:
            result["predicted_imbalance"] = float(np.mean(self.predicted[skip:]))
        return result
