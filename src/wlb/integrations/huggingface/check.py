"""Checks before a balanced Trainer trains: its arguments, its model, and whether packing changes the gradients.

The check compares micro-batches with their documents one at a time: wrong masks, positions that do not restart, losses
that are means of means. Single documents use the model's own attention (``sdpa``), to find anything that ours lacks.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from wlb.runtime.collectives import gathered_rows, warn

Inputs = Mapping[str, Any]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}  # of the gradient
_MIXED = {"no": torch.float64, "fp16": torch.float16}  # precision
_LOSS_TOLERANCE = 1e-5  # at least: Hugging Face computes the loss in float32 for parameters of any type
_BESIDE, _SHORT = 3, 8  # short documents in a micro-batch with the longest one, and in one without
_TOKENS = 8192  # of the longest checked document, because the attention of a model may make a mask of tokens squared
_CHANCE = ("drop", "jitter", "noise")  # parts of the names of attributes that make training mode random
_SCALE = 1024.0  # of the loss under float16, so that its gradients do not underflow

# Required arguments of a Trainer: wlb packs, deals and resumes documents, and counts labels over all processes.
_RIGHT: dict[str, Any] = {
    **dict.fromkeys(("packing", "eval_packing", "padding_free", "ignore_data_skip", "group_by_length"), False),
    **dict.fromkeys(("split_batches", "dispatch_batches"), False),
    "train_sampling_strategy": "random",
    "average_tokens_across_devices": True,
}

# Methods of a Trainer that planned steps replace. Those of front ends serve options that the page lists.
_REPLACED = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")
_FRONT_ENDS = {"wlb", "transformers", "trl", "axolotl", "llamafactory", "swift"}


def set_right(args: Any, context_window: int) -> tuple[Any, list[str]]:
    """A copy of ``args`` without settings that break packing, and a list of the changes."""
    args, changed = copy.copy(args), []
    if getattr(args, "accelerator_config", None) is not None:
        args.accelerator_config = copy.copy(args.accelerator_config)
    for holder in (args, getattr(args, "accelerator_config", None)):
        wanted = {name: value for name, value in _RIGHT.items() if getattr(holder, name, None) not in (None, value)}
        # SFTTrainer truncates documents at max_length, by default 1,024 tokens.
        most, usual = getattr(holder, "max_length", None), getattr(type(holder), "max_length", None)
        if hasattr(holder, "packing") and most is not None and (most == usual or most > context_window):
            wanted["max_length"] = context_window
        for name, value in wanted.items():
            setattr(holder, name, value)
            changed.append(f"{name} = {value}")
    if getattr(args, "dataloader_num_workers", 0):
        changed.append("dataloader_num_workers = 0 in training")  # evaluation keeps them
    return args, changed


def check_arguments(trainer_class: type[Any], arguments: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for trainers, collators and data sets that ``balanced`` does not support."""
    if not isinstance(trainer_class, type) or not hasattr(trainer_class, "training_step"):
        name = getattr(trainer_class, "__name__", f"a {type(trainer_class).__name__}")
        raise UserError(f"balanced() got {name}, not a Trainer class; give Trainer or SFTTrainer")
    of_trl = [base.__name__ for base in trainer_class.__mro__ if base.__module__.partition(".")[0] == "trl"]
    if of_trl and "SFTTrainer" not in of_trl:
        kind = f"{trainer_class.__name__} learns from pairs, rewards or its own generations"
        raise UserError(f"{kind}; give balanced() Trainer or SFTTrainer, or divide its documents with wlb.balance")
    if (collator := arguments.get("data_collator")) is not None:
        refuse(_objections_to_collator(collator))
    if getattr(arguments.get("args"), "train_sampling_strategy", None) == "batch_rebalance":
        deals = (
            'train_sampling_strategy = "batch_rebalance" deals padded documents to ranks, and balanced() packed ones'
        )
        raise UserError(f"{deals}; leave it out")
    if getattr(arguments.get("args"), "predict_with_generate", False):
        generates = "predict_with_generate = True would generate from packed documents"
        raise UserError(f"{generates}; generate in a plain Trainer")
    if (dataset := arguments.get("train_dataset")) is not None:
        check_documents(dataset, "train_dataset")
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            stream = "train_dataset is a stream without lengths to plan by"
            raise UserError(f"{stream}; load all of it, or use packed_batches")


def _objections_to_collator(collator: Any) -> Iterator[str]:
    if type(collator) is not FlatteningCollator:
        name = getattr(collator, "__name__", type(collator).__name__)
        yield f"the data collator {name} would have no effect, because documents arrive packed; leave it out"


def objections_to_settings(trainer: Any, planning: Mapping[str, Any]) -> Iterator[str]:
    """Reasons why ``trainer`` would not train the planned micro-batches, or not exactly."""
    args, model = trainer.args, type(trainer.model).__name__
    yield from _objections_to_collator(trainer.data_collator)
    for name in _REPLACED:
        owners = [base for base in type(trainer).__mro__ if name in vars(base)]
        owners = [base for base in owners if base.__module__.partition(".")[0] not in _FRONT_ENDS]
        if owners or name in vars(trainer):
            owner = (*owners, type(trainer))[0].__name__
            yield f"{name} of {owner} would have no effect, because the documents are planned; leave it out"
    for holder, name, value in (
        (getattr(trainer, "finetuning_args", None), "disable_shuffling", True),  # LLaMA-Factory
        (args, "curriculum_sampling", True),  # Axolotl
        (args, "train_dataloader_shuffle", False),  # ms-swift
    ):
        if getattr(holder, name, None) is value and planning.get("shuffle", True):
            yield f"{name} = {value} would have no effect; give balanced(..., shuffle=False)"
    if getattr(trainer.model, "config", None) is None and "model" not in planning:
        yield f"{model} has no config to price documents by; give balanced(..., model=NAME) of about its size"
    loss = getattr(trainer.model, "loss_type", None)
    if loss and not loss.endswith(("ForCausalLM", "ForConditionalGeneration")):
        yield f"{model} does not learn the next token of its documents; train it without balanced()"
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        less = "documents in long micro-batches would count less; give a compute_loss_func that divides by it"
        yield f"the loss of {model} takes no num_items_in_batch, so {less}"
    noise = [getattr(module, "neftune_noise_alpha", None) for module in trainer.model.modules()]
    if alpha := next(filter(None, (getattr(args, "neftune_noise_alpha", None), *noise)), None):
        yield f"neftune_noise_alpha = {alpha}: NEFTune noise shrinks with the tokens of a row; leave it out"
    if args.n_gpu > 1:
        yield f"one process has {args.n_gpu} devices; start a process for each: torchrun --nproc-per-node ..."
    for kind in ("tp", "cp", "sp"):
        if (size := getattr(trainer, f"get_{kind}_size", lambda: 1)()) > 1:
            yield f"{kind} = {size} of the Trainer would share documents; use data parallelism, or balanced(cp=...)"
    if (epochs := args.num_train_epochs) != int(epochs) and args.max_steps <= 0:
        yield f"num_train_epochs = {epochs} ends inside an epoch; give a whole number, or max_steps"
    if planning.get("own_lists"):
        yield "own_lists needs a different number of micro-batches on each rank, and a Trainer has one; leave it out"
    if planning.get("calibrate"):
        if (kind := trainer.accelerator.distributed_type.value) not in ("NO", "MULTI_GPU", "MULTI_CPU"):
            yield f"calibrate would time waiting for slower ranks, in every micro-batch under {kind}; leave it out"
        if args.max_steps <= 0:
            yield "calibrate changes the plans, so the number of steps in an epoch is not known; give max_steps"


def check_packing(
    model: nn.Module,
    packed: Callable[[], Tensor],
    singles: Iterable[Callable[[], Tensor]],
    *,
    wrapped: nn.Module | None = None,
    computed: Sequence[torch.dtype] = (),
) -> float:
    """Compare loss and gradients of ``packed()`` with the sums over ``singles``; returns the error of the gradients.

    Each call runs ``model``, or its wrapper ``wrapped`` (DDP, FSDP), and returns the loss summed over labelled tokens.
    It restores the model. The tolerance fits the least exact type of parameters, autocast and ``computed``. Processes
    call this together and average the results of a wrapped model. Raises ``UserError`` if the two differ by more.
    """
    trained = model if wrapped is None else wrapped
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    with _undisturbed(trained):
        with _own_attention(model):
            single_loss = sum(_backward(compute, 1.0) for compute in singles)
        single_square = _square(parameters)
        packed_loss = _backward(packed, -1.0)  # leaves the differences of the gradients
        sums = torch.tensor([packed_loss, single_loss, _square(parameters), single_square], dtype=torch.float64)
    if wrapped is not None and dist.is_initialized():
        sums = gathered_rows(sums.tolist(), torch.float64, parameters[0].device).mean(dim=0)
    packed_loss, single_loss, difference, single_square = sums.tolist()
    error, tolerance = math.sqrt(difference / max(single_square, 1e-60)), _tolerance(trained, computed)
    apart = abs(packed_loss - single_loss) / max(1e-12, abs(single_loss))
    if not (error <= tolerance and apart <= max(tolerance, _LOSS_TOLERANCE)):
        differ = f"loss {packed_loss:.6g} and {single_loss:.6g}, gradients differ by {error:.1e}, over {tolerance:g}"
        look = "the attention (register_attention), use_cache, dropout, and losses that are means, such as a router's"
        raise UserError(f"packed documents give other gradients than single ones: {differ}; check {look}")
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
    """The squared norm of the gradients of this process."""
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    exact = [(gradient, torch.promote_types(gradient.dtype, torch.float32)) for gradient in local]
    return sum(float(torch.linalg.vector_norm(gradient, dtype=dtype)) ** 2 for gradient, dtype in exact)


def check_trainer(trainer: Any, steps: PackedSteps, documents: Any) -> None:
    """``check_packing`` of two micro-batches of ``steps``, with the loss, mode and wrapped model of the Trainer.

    One holds the longest of ``documents`` and a few short ones, the other many short ones. All tokens are learnt,
    because a mask could hide what documents attend. All processes train the same documents, so that they fail together.
    Under DeepSpeed, and with an optimizer that steps in the backward, it warns and compares nothing.
    """
    wrapped, cp = trainer.model_wrapped, steps.job.layout.pool_size
    model = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
    hooked = any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters())
    if getattr(trainer, "is_deepspeed_enabled", False) or hooked:
        where = "under DeepSpeed or with an optimizer that steps in the backward pass"
        warn(f"balanced() does not check packing {where}; run check_packing")
        return
    mixed = _MIXED.get(trainer.accelerator.mixed_precision, torch.bfloat16)
    tf32 = torch.float64 if torch.get_float32_matmul_precision() == "highest" else torch.float16
    trainer.current_gradient_accumulation_steps = 1  # some losses read it; the Trainer sets it in every step

    def loss_of(inputs: Inputs, items: Any, weight: float = 1.0) -> Tensor:
        return _loss(trainer, inputs, items) * weight * (_SCALE if mixed == torch.float16 else 1.0)

    def items_of(inputs: Inputs) -> Any:
        return trainer.get_batch_samples(iter([inputs]), 1, trainer.args.device)[1]

    alone = FlatteningCollator()
    metrics = {name: vars(trainer)[name] for name in ("_metrics", "_total_train_tokens") if name in vars(trainer)}
    vars(trainer).update(copy.deepcopy(metrics))  # of TRL
    for numbers in _checked_documents(steps):
        tokens = [ids_and_labels(documents[number])[0] for number in numbers]
        if max(map(len, tokens)) == 1:
            continue  # single tokens teach nothing
        packed = steps.batch_of(tokens).with_labels()
        items = items_of(packed)
        # All ranks that share the packed documents train each single document.
        singles = (partial(loss_of, alone([ids]), items, 1 / cp) for ids in tokens)
        check_packing(model, partial(loss_of, packed, items), singles, wrapped=wrapped, computed=(mixed, tf32))
    one = alone(tokens[-1:])
    items = items_of(one)
    with torch.no_grad(), _undisturbed(wrapped):
        _check_scale(trainer, one, items)
    vars(trainer).update(metrics)


def _loss(trainer: Any, inputs: Inputs, items: Any) -> Tensor:
    with trainer.compute_loss_context_manager():
        loss: Tensor = trainer.compute_loss(
            trainer.model_wrapped, trainer._prepare_inputs(inputs), num_items_in_batch=items
        )
    return loss


def _check_scale(trainer: Any, inputs: Inputs, items: Any) -> None:
    """Raise ``UserError`` if averaged gradients are too small or large by the number of processes or micro-batches."""
    processes, batches = trainer.args.world_size, trainer.args.gradient_accumulation_steps
    trainer.current_gradient_accumulation_steps = batches
    taken: list[Tensor] = []
    own = vars(trainer.accelerator)
    kept = {name: value for name, value in own.items() if name == "backward"}
    own["backward"] = lambda loss, **_: taken.append(loss)
    try:
        with suppress(Exception):  # it may call loss.backward itself or read gradients, which fails here
            trainer.training_step(trainer.model_wrapped, {**inputs}, items)
    finally:
        del own["backward"]
        own.update(kept)
    loss = float(taken[0] if taken else _loss(trainer, inputs, items))
    for mean in _mean_losses(trainer, inputs):
        times, close = loss / mean, partial(math.isclose, rel_tol=_TOLERANCE[torch.bfloat16])
        if close(times, 1):
            return
        if any(close(times, of) or close(times * of, 1) for of in (processes, batches, processes * batches)):
            right = "divide a sum by num_items_in_batch alone, and multiply it by self.accelerator.num_processes"
            raise UserError(f"the loss of a step is {times:.3g} times the mean over its labelled tokens; {right}")


def _mean_losses(trainer: Any, inputs: Inputs) -> Iterator[float]:
    """By the Trainer, unless it cannot do without items, and by the model."""
    model = trainer.model_wrapped
    for mean in (partial(_loss, trainer, inputs, None), lambda: model(**trainer._prepare_inputs(inputs))["loss"]):
        with suppress(TypeError, ValueError, KeyError, AssertionError):
            if loss := float(mean()):
                yield loss


def _checked_documents(steps: PackedSteps) -> tuple[list[int], list[int]]:
    """The longest document that one rank can hold with a few short ones, and several short ones; all with labels."""
    order = np.argsort(steps.lengths, kind="stable")
    tokens = steps.lengths[order]
    fits = tokens <= max(tokens[0], min(_TOKENS, steps.job.max_tokens // steps.job.layout.pool_size))
    chosen = order[fits & (tokens > 1)].tolist() or order[fits].tolist()
    return [chosen[-1], *chosen[: min(_BESIDE, len(chosen) - 1)]], chosen[:_SHORT]


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Set training mode without dropout or other randomness and clear gradients; restore everything afterwards."""
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
    """Let ``model`` attend as it would without wlb."""
    if not is_packed_attention(model):
        yield
        return
    name = model.config._attn_implementation
    attend_with(model, "sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        attend_with(model, name)
