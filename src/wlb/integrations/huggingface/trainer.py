"""Makes a Trainer with a planned train loader from any Trainer class."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from wlb.errors import UserError, require
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.batches.processes import data_parallel_ranks
from wlb.integrations.document_fields import FIELDS, token_count
from wlb.integrations.huggingface.attention import (
    check_model,
    check_rotary,
    is_packed_attention,
    other_layers,
    register_attention,
)
from wlb.integrations.huggingface.check import check_trainer
from wlb.integrations.huggingface.context_parallel import context_parallel_group, context_parallel_share
from wlb.integrations.huggingface.refusals import check_arguments, check_settings, set_right
from wlb.integrations.huggingface.resuming import STATE, TrainedBatches, trained_state
from wlb.integrations.packed import FlatteningCollator, warn_of_no_labels
from wlb.runtime.collectives import on_every_rank
from wlb.workload import ModelShape
from wlb.workload.model_json import language_model, shape_of

_TRAINED_SAMPLES, _ALL_STEPS = 3, 6  # in what Trainer.set_initial_training_values returns


def balanced(
    trainer_class: type[Any],
    *,
    context_window: int,
    cp: int = 1,
    sharding: str = "hybrid",
    check: bool = True,
    **settings: Any,
) -> type[Any]:
    """A subclass of ``trainer_class`` (``Trainer``, ``SFTTrainer``) that trains balanced micro-batches.

    Args:
        context_window: Tokens of a micro-batch on average and of a document at most;
            ``per_device_train_batch_size`` has no effect. Memory must hold ``max_length_factor`` = 1.5 windows.
        cp: Neighbouring processes that share every micro-batch, with the attention of ``register_attention``.
        sharding: The strategy by which they do.
        check: Before the first step, also after resuming, compare losses and gradients of packed documents with single
            ones (``check_trainer``), in the time of a few micro-batches; nothing that is trained changes.
        settings: Further keywords of ``wlb.integrations.batches.balanced_job``: hardware, preset ("elastic" pools all
            processes anew, so leave ``cp`` out), pool, workload, seed, options of the packer. ``model`` is the
            trained one; a model without a ``config`` needs it.

    One warning says what it set: ``config.use_cache``, our attention in place of any but FlashAttention, and arguments
    that break packing (``refusals.set_right``). Without ``train_dataset`` it only evaluates.

    All epochs are one stream, repeated up to ``max_steps`` where that is given; gradient accumulation is the number of
    micro-batches. ``state.epoch`` is the documents trained over those of the data set, and the strategy "epoch" saves,
    evaluates and logs after the step in which it passes a whole number.

    Resuming goes on with the documents that come next, also with another gradient accumulation, number of processes,
    ``cp``, window or preset. ``train`` raises ``UserError`` where documents, seed or shuffle differ, and for a
    checkpoint that does not have the sampler's state in its ``trainer_state.json``.

    The constructor raises ``UserError`` for what would silently train something else: layers that carry a state from
    one document into the next, and documents by which rotary scaling changes for others; losses that take no
    ``num_items_in_batch``; NEFTune; tensor, context or sequence parallelism of the Trainer, and ``DataParallel``; other
    collators; TRL's other trainers, classification, prompt and prefix tuning; and a fraction of an epoch. The check
    finds a ``compute_loss`` that forgets the number of processes, and losses that are means: a router's auxiliary loss
    (``output_router_logits``), and ``label_smoothing_factor`` before transformers 5.15.
    """
    check_arguments(trainer_class, {})

    class Balanced(_BalancedTrainer, trainer_class):
        _wlb_planning = {"context_window": context_window, "cp": cp, **settings}  # noqa: RUF012  # never changed
        _wlb_sharding = sharding
        _wlb_checks = check

    Balanced.__name__ = Balanced.__qualname__ = f"Balanced{trainer_class.__name__}"
    return Balanced


class _BalancedTrainer:
    """What ``balanced`` adds to a Trainer."""

    _wlb_planning: dict[str, Any]
    _wlb_sharding: str
    _wlb_checks: bool

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        arguments = inspect.signature(super().__init__).bind_partial(*positional).arguments | arguments
        check_arguments(type(self), arguments)
        args, changed = set_right(arguments.get("args"), self._wlb_planning["context_window"])
        super().__init__(**arguments | {"args": args})
        trainer: Any = self
        trainer.data_collator = arguments.get("data_collator") or FlatteningCollator()
        changed += _prepare_model(trainer.model)
        if changed and trainer.args.process_index == 0:
            warnings.warn(f"balanced() set {', '.join(changed)}", stacklevel=2)
        if trainer.train_dataset is None:
            return  # it evaluates
        check_settings(trainer)
        self._wlb_epochs = max(1, ceil(trainer.args.num_train_epochs))
        trainer.args.num_train_epochs = 1
        self.train_sampler = self._wlb_sampler(trainer)
        self._wlb_share: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        job = self.train_sampler.job
        # Pools may have another number of micro-batches than was asked for.
        trainer.args.gradient_accumulation_steps = job.micro_batches_per_rank
        self._wlb_planned = self._wlb_planned_by()
        self._wlb_batches = TrainedBatches(self.train_sampler, trainer.args.max_steps)
        trainer.add_callback(_callback(trainer))
        if job.layout.cp > 1:
            if kinds := other_layers(getattr(trainer.model, "config", None)):
                raise UserError(f"layers of {', '.join(sorted(kinds))} cannot be shared by ranks; leave cp out")
            register_attention(trainer.model, group=context_parallel_group(job.layout.cp))
            rank, prices = dist.get_rank() % job.layout.cp, job.costs
            strategy = "elastic" if job.packing.method == "elastic" else self._wlb_sharding
            self._wlb_share = partial(
                context_parallel_share, cp=job.layout.cp, rank=rank, sharding=strategy, workload=prices
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **arguments: Any) -> Any:
        """As Trainer's, on the documents that come next in the checkpoint. Raises ``UserError`` where none can."""
        trainer: Any = self
        if trainer.train_dataset is None:
            raise UserError("there are no documents to train; give train_dataset")
        if self._wlb_planned != self._wlb_planned_by():
            raise UserError(
                "train_dataset, gradient_accumulation_steps, max_steps or num_train_epochs is not what the steps were "
                "planned by; make another Trainer"
            )

        def begin() -> TrainedBatches:
            trained = trained_state(trainer.args, resume_from_checkpoint)
            if trained is None and not self._wlb_batches.is_continued:
                return self._wlb_batches
            return TrainedBatches(self.train_sampler, trainer.args.max_steps, *trained or ())

        self._wlb_batches = on_every_rank(begin) if dist.is_initialized() else begin()
        self._wlb_batches.agree()  # before the check, in which other documents would be other collectives
        return super().train(resume_from_checkpoint, *positional, **arguments)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        trainer: Any = self
        args = trainer.args
        loader = DataLoader(
            self._wlb_dataset(),
            batch_sampler=self._wlb_batches,
            collate_fn=partial(_collated, trainer.data_collator, self._wlb_share),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor if args.dataloader_num_workers else None,
        )
        return trainer.accelerator.prepare(loader)

    def _wlb_planned_by(self) -> tuple[Any, ...]:
        args, dataset = cast(Any, self).args, cast(Any, self).train_dataset
        return id(dataset), args.gradient_accumulation_steps, args.max_steps, args.num_train_epochs

    def _wlb_dataset(self) -> Any:
        trainer: Any = self
        dataset = trainer.train_dataset
        if hasattr(dataset, "column_names"):
            dataset = trainer._remove_unused_columns(dataset, description="training")
        return dataset

    def set_initial_training_values(self, *positional: Any, **arguments: Any) -> Any:
        """As Trainer's, with the documents of all epochs for its metric of samples in a second."""
        values = [*super().set_initial_training_values(*positional, **arguments)]  # type: ignore[misc]
        values[_TRAINED_SAMPLES] = self._wlb_batches.documents_a_step * values[_ALL_STEPS]
        return tuple(values)

    def get_batch_samples(self, *positional: Any, **arguments: Any) -> Any:
        batches, items = super().get_batch_samples(*positional, **arguments)  # type: ignore[misc]
        if batches and items is not None and not int(items.max() if isinstance(items, Tensor) else items):
            warn_of_no_labels()
            items = items + 1  # the loss is a sum of nothing, divided by them
        return batches, items

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns that the collator reads, which the model does not take."""
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        columns = cast(Any, self)._signature_columns
        cast(Any, self)._signature_columns = [*columns, *(field for field in FIELDS if field not in columns)]

    def _wlb_sampler(self, trainer: Any) -> PlannedBatchSampler:
        dp = data_parallel_ranks(trainer.args.world_size, self._wlb_planning["cp"])
        lengths = _lengths_of(trainer.train_dataset)
        config = getattr(trainer.model, "config", None)
        check_rotary(config, lengths)
        usual = {"seed": trainer.args.seed, "hardware": "cpu" if trainer.args.device.type == "cpu" else "h100"}
        if "model" not in self._wlb_planning:
            if config is None:
                raise UserError(
                    f"{type(trainer.model).__name__} has no config to price documents by; give balanced(..., "
                    "model=wlb.workload.ModelShape(...)), or the name of a model near it in size"
                )
            usual["model"] = model_shape_of(config)
        return PlannedBatchSampler(
            lengths,
            micro_batches=trainer.args.gradient_accumulation_steps,
            dp=dp,
            epochs=None if trainer.args.max_steps > 0 else self._wlb_epochs,  # max_steps ends it
            **usual | self._wlb_planning,
        )


def _prepare_model(model: Any) -> list[str]:
    """Let ``model`` train packed documents; what was set. Raises ``UserError`` where it cannot (``check_model``)."""
    changed, config = [], getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
        changed.append("model.config.use_cache = False")
    check_model(model)
    attention = str(getattr(config, "_attn_implementation", None))
    if hasattr(model, "set_attn_implementation") and "flash" not in attention and not is_packed_attention(model):
        register_attention(model)
        changed.append(f'the attention "wlb" in place of {attention}')
    return changed


def _collated(collator: Callable[[Any], Any], share: Callable[[Any], Any] | None, documents: Any) -> Any:
    batch = collator(documents)
    return batch if share is None else share(batch)


def _lengths_of(dataset: Any) -> Sequence[int]:
    """Tokens of every document, without padding."""
    columns = getattr(dataset, "column_names", None) or ()
    if "attention_mask" in columns:
        return [int(np.count_nonzero(mask)) for mask in dataset["attention_mask"]]
    if "input_ids" in columns:
        return [len(ids) for ids in dataset["input_ids"]]
    return [token_count(dataset[index], f"document {index}") for index in range(len(dataset))]


def _callback(trainer: Any) -> Any:
    """What a Trainer does beside its steps: checks packing first, counts epochs, and saves the sampler's state."""
    callbacks = require("transformers.trainer_callback", "hf")
    base: type[Any] = callbacks.TrainerCallback
    exportable: type[Any] = callbacks.ExportableState
    documents = len(trainer.train_dataset)

    class BalancedState(base, exportable):
        _step, _began, _trained = 0, 0, 0  # documents, of all epochs

        def on_train_begin(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            # The model is wrapped and loaded by now.
            state.stateful_callbacks.setdefault(STATE, {})
            self._step, state.num_train_epochs = state.global_step, trainer._wlb_epochs
            self._began = self._trained = round((state.epoch or 0) * documents)
            if trainer._wlb_checks:
                dataset = trainer._wlb_dataset()
                check_trainer(trainer, lambda indices: trainer.data_collator([dataset[index] for index in indices]))

        def on_step_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            batches, before = trainer._wlb_batches, self._trained // documents
            self._step = state.global_step
            batches.states = {step: saved for step, saved in batches.states.items() if step >= self._step}
            if self._step in batches.states:
                self._trained = self._began + batches.states[self._step][1]
            state.epoch = self._trained / documents
            if (
                before < self._trained // documents and self._step < state.max_steps
            ):  # after which the Trainer's own epoch ends
                for does, strategy in (("save", "save"), ("evaluate", "eval"), ("log", "logging")):
                    if getattr(args, f"{strategy}_strategy", None) == "epoch":
                        setattr(control, f"should_{does}", True)

        def state(self) -> dict[str, Any]:
            state, _ = trainer._wlb_batches.states.get(self._step, (None, 0))
            return {"args": {}, "attributes": {"saved": json.dumps(state)}}

    return BalancedState()


def model_shape_of(config: Any) -> ModelShape:
    """The shape of a Hugging Face decoder from its ``config``, to price documents for it.

    Experts, windows and latent attention are priced in the families of ``wlb.workload.model_json``; another model is
    priced as a dense decoder of its size. Raises ``UserError`` for a shape that cannot be priced.
    """
    renamed = {usual: getattr(config, usual, None) for usual in getattr(config, "attribute_map", ())}
    document = dict(language_model(config.to_dict() | renamed))
    if document.get("intermediate_size") is None and document.get("hidden_size"):
        document["intermediate_size"] = 4 * document["hidden_size"]  # what GPT-2, Bloom and Falcon leave out
    return shape_of(document)
