"""What a balanced Trainer refuses before it plans: trainers, arguments and settings that would train something else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from wlb.errors import UserError
from wlb.integrations.document_fields import check_documents
from wlb.integrations.packed import FlatteningCollator

_PACKS = "SFTTrainer must leave packing to the sampler; set packing=False, padding_free=True, max_length=None"


def check_trainer_class(trainer_class: type[Any]) -> None:
    """Raise ``UserError`` for trainers of TRL that do not learn documents token by token."""
    of_trl = [base.__name__ for base in trainer_class.__mro__ if base.__module__.partition(".")[0] == "trl"]
    if of_trl and "SFTTrainer" not in of_trl:
        raise UserError(
            f"{trainer_class.__name__} learns from pairs, rewards or what it generates, and balanced() plans documents "
            "that are learnt token by token; give it Trainer or SFTTrainer, or divide the documents of each step of "
            "yours with wlb.balance"
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for what a Trainer should not be constructed with: what holds no documents, or packs them."""
    if getattr(arguments.get("args"), "packing", False):
        raise UserError(_PACKS)  # before SFTTrainer does
    dataset = arguments.get("train_dataset")
    check_documents(dataset, "train_dataset")
    if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            "a stream of documents has no lengths to plan by; load it as a data set with a length, or train on a token "
            "store with packed_batches"
        )


def check_settings(trainer: Any) -> None:
    """Raise ``UserError`` where ``trainer`` would not train micro-batches as planned, or not exactly."""
    for reason in _refusals(trainer):
        raise UserError(reason)


def _refusals(trainer: Any) -> Iterator[str]:
    args = trainer.args
    loss = getattr(trainer.model, "loss_type", None)
    if loss and not loss.endswith(("ForCausalLM", "ForConditionalGeneration")):
        yield (
            f"{type(trainer.model).__name__} does not learn the next token of its documents, for which packed "
            "micro-batches are labelled; train it without balanced(), or give a causal language model"
        )
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        yield (
            f"the loss of {type(trainer.model).__name__} takes no num_items_in_batch, so each micro-batch would be "
            "averaged and documents of long ones would count less; give its forward **kwargs that reach its loss, or "
            "the Trainer a compute_loss_func that divides by num_items_in_batch"
        )
    noise = [getattr(module, "neftune_noise_alpha", None) for module in trainer.model.modules()]
    if alpha := next(filter(None, (getattr(args, "neftune_noise_alpha", None), *noise)), None):
        yield (
            f"neftune_noise_alpha = {alpha}: NEFTune divides its noise by the root of a row's tokens, so packed "
            "documents would get less than alone; leave it out"
        )
    if args.n_gpu > 1:
        yield (
            f"one process has {args.n_gpu} devices, among which torch.nn.DataParallel would cut packed micro-batches; "
            "start a process for each: torchrun --nproc-per-node ..."
        )
    for kind in ("tp", "cp", "sp"):
        if (size := getattr(trainer, f"get_{kind}_size", lambda: 1)()) > 1:
            yield (
                f"{kind} = {size} processes of the Trainer would share documents, and the sampler gives each its own; "
                "use data parallelism alone, or balanced(..., cp=...) for context parallelism"
            )
    strategy = "group_by_length" if getattr(args, "group_by_length", False) else None
    strategy = str(getattr(args, "train_sampling_strategy", None) or strategy or "random")
    if not strategy.endswith("random"):
        yield f'train_sampling_strategy = "{strategy}" has no effect, as documents are planned; leave it out'
    yield from _masks_not_read(trainer.data_collator, trainer.train_dataset)
    if not getattr(args, "average_tokens_across_devices", True) and args.world_size > 1:
        yield (
            "average_tokens_across_devices = False divides each rank's loss by its own tokens, so documents of long "
            "micro-batches would count less; set it to True"
        )
    if getattr(args, "packing", False) or not getattr(args, "padding_free", True):
        yield _PACKS
    if args.ignore_data_skip:
        yield (
            "ignore_data_skip = True would count steps of documents that were not trained; set it to False: resuming "
            "reads no batch again"
        )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(getattr(args, "accelerator_config", None), name, None):
            yield f"accelerator_config.{name} = True cuts planned micro-batches; set it to False"
    yield from _cut_epochs(args)


def _masks_not_read(collator: Any, dataset: Any) -> Iterator[str]:
    """Padding and masks in the data set that a collator other than ours would pass over."""
    if isinstance(collator, FlatteningCollator) or not len(dataset):
        return
    named = name_of(collator)
    remedy = "give data_collator=FlatteningCollator() or a subclass of it"
    columns = getattr(dataset, "column_names", None) or dataset[0]
    if "loss_mask" in columns:
        yield f"{named} is not known to read loss_mask, so masked tokens might be learnt; {remedy}"
    if "attention_mask" in columns:
        whole = hasattr(dataset, "column_names")
        masks = dataset["attention_mask"] if whole else (document["attention_mask"] for document in dataset)
        if not all(map(all, masks)):
            yield f"{named} is not known to cut off padding, which would be learnt as text; {remedy}"


def name_of(collator: Any) -> str:
    return f"the data collator {getattr(collator, '__name__', type(collator).__name__)}"


def _cut_epochs(args: Any) -> Iterator[str]:
    epochs = args.num_train_epochs
    if epochs != int(epochs) and args.max_steps <= 0:
        yield f"num_train_epochs = {epochs} ends inside an epoch; give a whole number, or max_steps"
    for name in ("save_strategy", "eval_strategy", "logging_strategy"):
        if getattr(args, name, None) == "epoch" and epochs > 1:
            yield f'{name} = "epoch" has no meaning where {math.ceil(epochs)} epochs are one stream; use "steps"'
