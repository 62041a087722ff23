"""What a balanced Trainer sets right before it begins, and what it refuses as it would train something else."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from wlb.errors import UserError
from wlb.integrations.document_fields import check_documents
from wlb.integrations.huggingface.attention import refuse
from wlb.integrations.packed import FlatteningCollator

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
