"""Whether packing changes what a model trains: micro-batches against their documents one at a time.

A wrong mask, positions that do not restart, or a loss that is a mean of means shows at once. Documents alone go through
the model's own attention (``sdpa``) in place of ours, so that the check also finds what ours would leave out.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from wlb.errors import UserError
from wlb.integrations.document_fields import ids_and_labels
from wlb.integrations.huggingface.attention import attend_with, is_packed_attention
from wlb.integrations.packed import FlatteningCollator, PackedSteps
from wlb.runtime.collectives import gathered_rows

Inputs = Mapping[str, Any]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}  # of the gradient
_MIXED = {"no": torch.float64, "fp16": torch.float16}  # precision
_LOSS_TOLERANCE = 1e-5  # at least: Hugging Face takes the loss in float32, whatever the parameters are
_BESIDE, _SHORT = 3, 8  # short documents in a micro-batch with the longest one, and in one without
_TOKENS = 8192  # of the longest document at most, for which a model's own attention may make a mask of tokens squared
_CHANCE = ("drop", "jitter", "noise")  # in the names of what makes training mode random
_SCALE = 1024.0  # of the loss under float16, so that its gradients do not underflow


def check_packing(
    model: nn.Module,
    packed: Callable[[], Tensor],
    singles: Iterable[Callable[[], Tensor]],
    *,
    wrapped: nn.Module | None = None,
    computed: Sequence[torch.dtype] = (),
) -> float:
    """Compare the loss and gradients of ``packed()`` with the sums over ``singles``; returns the gradients' error.

    Each call runs ``model``, or where it is ``wrapped`` (DDP, FSDP) that, and returns the summed loss of its documents'
    labelled tokens. Afterwards the model is as before, gradients included. The tolerance is that of the least exact
    type of the parameters, of autocast and ``computed``. Losses and gradients of what is wrapped are averaged over
    processes, which call this together. Raises ``UserError`` where the two differ by more.
    """
    trained = wrapped or model
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    with _undisturbed(trained):
        with _own_attention(model):
            single_loss = sum(_backward(compute, 1.0) for compute in singles)
        single_square = _square(parameters)
        packed_loss = _backward(packed, -1.0)  # what remains are the gradients' differences
        sums = torch.tensor([packed_loss, single_loss, _square(parameters), single_square], dtype=torch.float64)
    if wrapped is not None and dist.is_initialized():
        sums = gathered_rows(sums.tolist(), torch.float64, parameters[0].device).mean(dim=0)
    packed_loss, single_loss, difference, single_square = sums.tolist()
    error, tolerance = math.sqrt(difference / max(single_square, 1e-60)), _tolerance(trained, computed)
    apart = abs(packed_loss - single_loss) / max(1e-12, abs(single_loss))
    if not (error <= tolerance and apart <= max(tolerance, _LOSS_TOLERANCE)):
        raise UserError(
            f"packed documents train something else than single ones: loss {packed_loss:.6g} and {single_loss:.6g}, "
            f"gradients {error:.1e} apart, over {tolerance:g}; look at the attention (register_attention), use_cache = "
            "False, dropout, and losses that are means (a router's auxiliary loss is one)"
        )
    return error


def _tolerance(model: nn.Module, computed: Sequence[torch.dtype]) -> float:
    types = {(parameter.dtype, parameter.device.type) for parameter in model.parameters()}
    autocast = {torch.get_autocast_dtype(kind) for _, kind in types if torch.is_autocast_enabled(kind)}
    quantised = _TOLERANCE[torch.bfloat16]
    return max(_TOLERANCE.get(dtype, quantised) for dtype in {dtype for dtype, _ in types} | autocast | {*computed})


def _backward(compute: Callable[[], Tensor], sign: float) -> float:
    loss = compute()
    (sign * loss).backward()
    return float(loss.detach())


def _square(parameters: Sequence[nn.Parameter]) -> float:
    """Of the norm of this process's gradients."""
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    exact = [(gradient, torch.promote_types(gradient.dtype, torch.float32)) for gradient in local]
    return sum(float(torch.linalg.vector_norm(gradient, dtype=dtype)) ** 2 for gradient, dtype in exact)


def check_trainer(trainer: Any, steps: PackedSteps, documents: Any) -> None:
    """``check_packing`` of micro-batches as ``steps`` packs them, by a Trainer's own loss, mode and wrapped model.

    One has the longest of ``documents`` and a few short ones, one many short ones. All tokens are learnt, also masked
    ones, as a mask could hide what documents see. All processes train the same documents, so that they call the same
    collectives and refuse together. Nothing is compared, with a warning, where a backward pass is more than that: under
    DeepSpeed, and with an optimizer that steps in it.
    """
    wrapped, cp = trainer.model_wrapped, steps.job.layout.cp
    model = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
    hooked = any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters())
    if getattr(trainer, "is_deepspeed_enabled", False) or hooked:
        where = "under DeepSpeed or with an optimizer that steps in the backward pass"
        warnings.warn(f"balanced: packing is not checked {where}; run check_packing", stacklevel=2)
        return
    mixed = _MIXED.get(trainer.accelerator.mixed_precision, torch.bfloat16)
    tf32 = torch.float64 if torch.get_float32_matmul_precision() == "highest" else torch.float16
    trainer.current_gradient_accumulation_steps = 1  # some losses look; the Trainer sets it in every step

    def loss_of(inputs: Inputs, items: Any, weight: float = 1.0) -> Tensor:
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(wrapped, trainer._prepare_inputs(inputs), num_items_in_batch=items)
        return loss * weight * (_SCALE if mixed == torch.float16 else 1.0)

    def items_of(inputs: Inputs) -> Any:
        return trainer.get_batch_samples(iter([inputs]), 1, trainer.args.device)[1]

    alone = FlatteningCollator()
    metrics = {name: vars(trainer)[name] for name in ("_metrics", "_total_train_tokens") if name in vars(trainer)}
    vars(trainer).update(copy.deepcopy(metrics))  # those of TRL
    for numbers in _checked_documents(steps):
        tokens = [ids_and_labels(documents[number])[0] for number in numbers]
        if max(map(len, tokens)) == 1:
            continue  # single tokens teach nothing
        packed = steps.batch_of(tokens).with_labels()
        items = items_of(packed)
        # Each document alone is trained by all ranks that share the packed ones.
        singles = (partial(loss_of, alone([ids]), items, 1 / cp) for ids in tokens)
        check_packing(model, partial(loss_of, packed, items), singles, wrapped=wrapped, computed=(mixed, tf32))
    if trainer.args.world_size > 1:
        one = alone(tokens[-1:])
        with torch.no_grad(), _undisturbed(wrapped):
            _check_processes(trainer.args.world_size, lambda items: float(loss_of(one, items)), items_of(one))
    vars(trainer).update(metrics)


def _check_processes(processes: int, loss: Callable[[Any], float], items: Any) -> None:
    """Raise ``UserError`` where ``loss`` of one document on all processes is their mean only without ``items``."""
    try:
        mean = loss(None)
    except TypeError:
        return  # it divides by the items, and has no other loss
    if mean and math.isclose(loss(items) * processes, mean, rel_tol=_TOLERANCE[torch.bfloat16]):
        divides = "compute_loss divides by num_items_in_batch, of all processes, and gradients are averaged over them"
        small = f"they would be {processes} times too small"
        raise UserError(f"{divides}: {small}; multiply the loss by self.accelerator.num_processes")


def _checked_documents(steps: PackedSteps) -> tuple[list[int], list[int]]:
    """The longest document that one rank can hold with a few short ones, and more of these; of those that teach."""
    order = np.argsort(steps.lengths, kind="stable")
    tokens = steps.lengths[order]
    fits = tokens <= max(tokens[0], min(_TOKENS, steps.job.longest_micro_batch // steps.job.layout.cp))
    chosen = order[fits & (tokens > 1)].tolist() or order[fits].tolist()
    return [chosen[-1], *chosen[: min(_BESIDE, len(chosen) - 1)]], chosen[:_SHORT]


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """In training mode without dropout and the like, without gradients, and with everything as before afterwards."""
    holders = {id(part): part for module in model.modules() for part in (module, getattr(module, "config", None))}
    set_to: list[tuple[Any, str, Any]] = [
        (holder, name, 0.0)
        for holder in holders.values()
        for name, value in getattr(holder, "__dict__", {}).items()
        if isinstance(value, float)
        and (any(word in name for word in _CHANCE) or (name == "p" and "Drop" in type(holder).__name__))
    ]
    set_to += [(module, "training", True) for module in model.modules()]
    set_to += [(parameter, "grad", None) for parameter in model.parameters()]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in set_to]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        for holder, name, value in set_to:
            setattr(holder, name, value)
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """``model`` attends as it would without us."""
    name = model.config._attn_implementation if is_packed_attention(model) else None
    if name is not None:
        attend_with(model, "sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        if name is not None:
            attend_with(model, name)
