"""Before a balanced Trainer trains: what it sets right or refuses, and whether packing changes what its model trains.

Micro-batches are compared with their documents one at a time. A wrong mask, positions that do not restart, or a loss
that is a mean of means shows at once. Documents alone go through the model's own attention (``sdpa``) in place of ours,
so that the check also finds what ours would leave out.
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
from wlb.integrations.document_fields import check_documents, ids_and_labels
from wlb.integrations.huggingface.attention import attend_with, is_packed_attention, refuse
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

# Arguments of a Trainer, and what they must be: documents are packed, dealt and resumed here, and labels are counted
# over all processes.
_RIGHT: dict[str, Any] = {
    **dict.fromkeys(("packing", "eval_packing", "padding_free", "ignore_data_skip", "group_by_length"), False),
    **dict.fromkeys(("split_batches", "dispatch_batches"), False),
    "train_sampling_strategy": "random",
    "average_tokens_across_devices": True,
}


def set_right(args: Any, context_window: int) -> tuple[Any, list[str]]:
    """A copy of ``args`` in which nothing breaks packing, and what was set in it."""
    args, changed = copy.copy(args), []
    if getattr(args, "accelerator_config", None) is not None:
        args.accelerator_config = copy.copy(args.accelerator_config)
    for holder in (args, getattr(args, "accelerator_config", None)):
        wanted = {name: value for name, value in _RIGHT.items() if getattr(holder, name, None) not in (None, value)}
        # SFTTrainer cuts documents there, at 1,024 tokens unless told.
        most, usual = getattr(holder, "max_length", None), getattr(type(holder), "max_length", None)
        if hasattr(holder, "packing") and most is not None and (most == usual or most > context_window):
            wanted["max_length"] = context_window
        for name, value in wanted.items():
            setattr(holder, name, value)
            changed.append(f"{name} = {value}")
    if getattr(args, "dataloader_num_workers", 0):
        changed.append("dataloader_num_workers = 0 in training")  # evaluation has them
    return args, changed


def check_arguments(trainer_class: type[Any], arguments: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for what a Trainer cannot be made of: trainers, collators and data sets of another kind."""
    of_trl = [base.__name__ for base in trainer_class.__mro__ if base.__module__.partition(".")[0] == "trl"]
    if of_trl and "SFTTrainer" not in of_trl:
        kind = f"{trainer_class.__name__} learns from pairs, rewards or what it generates"
        raise UserError(f"{kind}; give balanced() Trainer or SFTTrainer, or divide its documents with wlb.balance")
    collator, dataset = arguments.get("data_collator"), arguments.get("train_dataset")
    if collator is not None and type(collator) is not FlatteningCollator:
        name = getattr(collator, "__name__", type(collator).__name__)
        raise UserError(f"the data collator {name} would collate nothing, as documents come packed; leave it out")
    if dataset is not None:
        check_documents(dataset, "train_dataset")
    if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError("a stream of documents has no lengths to plan by; load all of it, or use packed_batches")


def check_settings(trainer: Any, planning: Mapping[str, Any]) -> None:
    """Raise ``UserError`` where ``trainer`` would not train micro-batches as planned, or not exactly."""
    refuse(_objections(trainer, planning))


def _objections(trainer: Any, planning: Mapping[str, Any]) -> Iterator[str]:
    args, model = trainer.args, type(trainer.model).__name__
    if getattr(trainer.model, "config", None) is None and "model" not in planning:
        yield f"{model} has no config to price documents by; give balanced(..., model=...), a name near it in size"
    loss = getattr(trainer.model, "loss_type", None)
    if loss and not loss.endswith(("ForCausalLM", "ForConditionalGeneration")):
        yield f"{model} does not learn the next token of its documents; train it without balanced()"
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        less = "documents of long micro-batches would count less; give a compute_loss_func that divides by it"
        yield f"the loss of {model} takes no num_items_in_batch, so {less}"
    noise = [getattr(module, "neftune_noise_alpha", None) for module in trainer.model.modules()]
    if alpha := next(filter(None, (getattr(args, "neftune_noise_alpha", None), *noise)), None):
        yield f"neftune_noise_alpha = {alpha}: NEFTune divides its noise by the root of a row's tokens; leave it out"
    if args.n_gpu > 1:
        yield f"one process has {args.n_gpu} devices; start a process for each: torchrun --nproc-per-node ..."
    for kind in ("tp", "cp", "sp"):
        if (size := getattr(trainer, f"get_{kind}_size", lambda: 1)()) > 1:
            yield f"{kind} = {size} of the Trainer would share documents; use data parallelism, or balanced(cp=...)"
    if (epochs := args.num_train_epochs) != int(epochs) and args.max_steps <= 0:
        yield f"num_train_epochs = {epochs} ends inside an epoch; give a whole number, or max_steps"
    if planning.get("own_lists"):
        yield "own_lists gives ranks their own numbers of micro-batches, and a Trainer runs equally many; leave it out"
    if planning.get("calibrate"):
        if (kind := trainer.accelerator.distributed_type.value) not in ("NO", "MULTI_GPU", "MULTI_CPU"):
            yield f"calibrate would time ranks that wait for others, as in every micro-batch under {kind}; leave it out"
        if args.max_steps <= 0:
            yield "calibrate plans anew on the way, so how many steps an epoch has is not known before; give max_steps"


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
        differ = f"loss {packed_loss:.6g} and {single_loss:.6g}, gradients {error:.1e} apart, over {tolerance:g}"
        look = "the attention (register_attention), use_cache, dropout, and losses that are means (as a router's is)"
        raise UserError(f"packed documents train something else than single ones: {differ}; look at {look}")
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
    fits = tokens <= max(tokens[0], min(_TOKENS, steps.job.max_tokens // steps.job.layout.cp))
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
