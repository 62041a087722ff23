"""Makes a Trainer with a planned train loader from any Trainer class."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from wlb.errors import UserError, require
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.batches.processes import data_parallel_ranks
from wlb.integrations.checks import BalanceMonitor
from wlb.integrations.document_fields import FIELDS, token_count
from wlb.integrations.huggingface.attention import check_model, check_rotary, register_attention
from wlb.integrations.huggingface.check import check_trainer
from wlb.integrations.huggingface.context_parallel import context_parallel_group, context_parallel_share
from wlb.integrations.huggingface.refusals import check_arguments, check_settings, check_trainer_class, name_of
from wlb.integrations.huggingface.resuming import STATE, TrainedBatches, trained_state
from wlb.integrations.packed import FlatteningCollator, warn_of_no_labels
from wlb.runtime.collectives import on_every_rank
from wlb.workload import ModelShape
from wlb.workload.model_json import language_model, shape_of

_TRAINED_SAMPLES, _ALL_STEPS = 3, 6  # in what Trainer.set_initial_training_values returns
_PLANNED = ("gradient_accumulation_steps", "max_steps", "num_train_epochs")  # arguments that the steps depend on


def balanced(
    trainer_class: type[Any],
    *,
    context_window: int,
    cp: int = 1,
    sharding: str = "hybrid",
    monitor: bool = False,
    check: bool = True,
    **settings: Any,
) -> type[Any]:
    """A subclass of ``trainer_class`` (``Trainer``, ``SFTTrainer``) that trains balanced micro-batches.

    Args:
        context_window: Tokens of a micro-batch on average and of a document at most;
            ``per_device_train_batch_size`` has no effect. Memory must hold ``max_length_factor`` = 1.5 windows.
        cp: Neighbouring processes that share every micro-batch, with the attention of ``register_attention``.
        sharding: The strategy by which they do.
        monitor: Measure every step: ``trainer.balance_monitor`` is a ``BalanceMonitor`` then.
        check: Train the longest document with a few short ones, and more short ones, packed and one at a time before
            the first step, also after resuming, and refuse where losses or gradients differ, or where a loss forgets
            the number of processes. It takes the time of a few micro-batches and no memory; what is trained afterwards
            is the same to the bit. All processes check the same documents on the wrapped model (DDP, FSDP) in training
            mode without dropout, by the Trainer's own loss and the labels of the data collator, which is called for
            them. Under DeepSpeed, and with an optimizer that steps in the backward pass, it is left out, with a
            warning.
        settings: Further keywords of ``wlb.integrations.batches.balanced_job``: hardware, preset ("elastic" pools all
            processes anew, so leave ``cp`` out), pool, workload, seed, options of the packer. ``model`` is the
            trained one.

    Without ``train_dataset`` it only evaluates. A model without a ``config`` needs ``model`` among the settings.

    All epochs are one stream, so for Trainer they are one epoch: ``state.epoch`` goes from 0 to 1. Gradient
    accumulation is the number of micro-batches. Epochs are repeated up to ``max_steps`` where that is given. Lengths
    come from the column ``length`` (tokens without padding; compared as documents are read), else from
    ``attention_mask`` or ``input_ids``.

    The state of the sampler is in a checkpoint's ``trainer_state.json``. Resuming goes on with the documents that come
    next, also with another gradient accumulation, number of processes, ``cp``, window or preset; ``train`` raises
    ``UserError`` where documents, seed or shuffle differ, and for a checkpoint without that state.

    The constructor raises ``UserError`` for what would silently train something else:

    - ``use_cache``, layers that carry a state from one document into the next, and documents by which rotary scaling
      changes for others (longrope, dynamic);
    - a model whose loss takes no ``num_items_in_batch``, and ``average_tokens_across_devices = False``. The check finds
      a ``compute_loss`` that forgets the number of processes, and other losses that are means: a router's auxiliary
      loss (``output_router_logits``; ``router_aux_loss_coef`` of ``SFTTrainer``), and ``label_smoothing_factor`` before
      transformers 5.15;
    - NEFTune, whose noise would shrink with the micro-batch;
    - tensor, context or sequence parallelism of the Trainer, and several devices in one process (``DataParallel``);
    - ``split_batches``, ``dispatch_batches``, ``ignore_data_skip``, and a ``train_sampling_strategy``, as the sampler
      is ours;
    - a data set without lengths, masks or padding that the data collator would pass over, and one that pads documents
      to rows;
    - ``packing=True`` or ``padding_free=False`` of ``SFTTrainer``, and TRL's other trainers;
    - a model that does not learn the next token of its documents (classification), and prompt or prefix tuning;
    - a fraction of an epoch without ``max_steps``, and, with several epochs, the strategy "epoch" of saving, evaluating
      or logging.
    """

    check_trainer_class(trainer_class)

    class Balanced(_BalancedTrainer, trainer_class):
        _wlb_planning = {"context_window": context_window, "cp": cp, **settings}  # noqa: RUF012  # never changed
        _wlb_sharding = sharding
        _wlb_monitors = monitor
        _wlb_checks = check

    Balanced.__name__ = Balanced.__qualname__ = f"Balanced{trainer_class.__name__}"
    return Balanced


class _BalancedTrainer:
    """What ``balanced`` adds to a Trainer."""

    _wlb_planning: dict[str, Any]
    _wlb_sharding: str
    _wlb_monitors: bool
    _wlb_checks: bool

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        arguments = inspect.signature(super().__init__).bind_partial(*positional).arguments | arguments
        check_arguments(arguments)
        if arguments.get("data_collator") is None and not hasattr(arguments.get("args"), "padding_free"):
            arguments["data_collator"] = FlatteningCollator()
        super().__init__(**arguments)
        trainer: Any = self
        trainer.args = copy.copy(trainer.args)  # it is changed below, and may be used for another Trainer
        check_model(trainer.model)
        self.balance_monitor = BalanceMonitor(device=trainer.args.device.type) if self._wlb_monitors else None
        self._wlb_documents = trainer.train_dataset
        if trainer.train_dataset is None:
            return  # it evaluates
        check_settings(trainer)
        whole = max(1, math.ceil(trainer.args.num_train_epochs))
        self._wlb_epochs = None if trainer.args.max_steps > 0 else whole  # those of the stream; max_steps ends it
        trainer.args.num_train_epochs = 1
        self.train_sampler = self._wlb_sampler(trainer)
        self._wlb_share: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        job = self.train_sampler.job
        # Pools may have another number of micro-batches than was asked for.
        trainer.args.gradient_accumulation_steps = job.micro_batches_per_rank
        self._wlb_planned = {name: getattr(trainer.args, name) for name in _PLANNED}
        self._wlb_batches = TrainedBatches(self.train_sampler, trainer.args.max_steps)
        trainer.add_callback(_callback(trainer))
        if job.layout.cp > 1:
            register_attention(trainer.model, group=context_parallel_group(job.layout.cp))
            rank, prices = dist.get_rank() % job.layout.cp, job.costs
            strategy = "elastic" if job.packing.method == "elastic" else self._wlb_sharding
            self._wlb_share = partial(
                context_parallel_share, cp=job.layout.cp, rank=rank, sharding=strategy, workload=prices
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **arguments: Any) -> Any:
        """As Trainer's, on the documents that come next in the checkpoint. Raises ``UserError`` where none can."""
        args, documents = cast(Any, self).args, cast(Any, self).train_dataset
        if documents is None:
            raise UserError("there are no documents to train; give train_dataset")
        if documents is not self._wlb_documents:
            raise UserError("train_dataset is another one than the steps were planned by; make another Trainer")
        for name, planned in self._wlb_planned.items():
            if (now := getattr(args, name)) != planned:
                raise UserError(f"{name} was {planned} when the steps were planned, and is {now}; make another Trainer")

        def begin() -> TrainedBatches:
            trained = trained_state(args, resume_from_checkpoint)
            if trained is None and not self._wlb_batches.is_continued:
                return self._wlb_batches
            return TrainedBatches(self.train_sampler, args.max_steps, *trained or ())

        self._wlb_batches = on_every_rank(begin) if dist.is_initialized() else begin()
        self._wlb_batches.agree()  # before the check, in which other documents would be other collectives
        return super().train(resume_from_checkpoint, *positional, **arguments)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        trainer: Any = self
        workers = trainer.args.dataloader_num_workers
        loader = DataLoader(
            self._wlb_dataset(),
            batch_sampler=self._wlb_batches,
            collate_fn=_Collation(trainer, self._wlb_share),
            num_workers=workers,
            pin_memory=trainer.args.dataloader_pin_memory,
            persistent_workers=trainer.args.dataloader_persistent_workers,
            prefetch_factor=trainer.args.dataloader_prefetch_factor if workers else None,
        )
        return trainer.accelerator.prepare(loader)

    def _wlb_collated(self, indices: Sequence[int]) -> Any:
        """The documents at ``indices`` as one micro-batch."""
        dataset, collation = self._wlb_dataset(), _Collation(self, None)
        return collation([dataset[index] for index in indices])

    def _wlb_dataset(self) -> Any:
        trainer: Any = self
        dataset = trainer.train_dataset
        if hasattr(dataset, "column_names"):
            dataset = trainer._remove_unused_columns(dataset, description="training")
        return dataset

    def set_initial_training_values(self, *positional: Any, **arguments: Any) -> Any:
        """As Trainer's, with the documents of all epochs for its metric of samples in a second."""
        values = [*super().set_initial_training_values(*positional, **arguments)]  # type: ignore[misc]
        values[_TRAINED_SAMPLES] = self._wlb_batches.documents(values[_ALL_STEPS])
        return tuple(values)

    def training_step(self, *positional: Any, **arguments: Any) -> Any:
        with self.balance_monitor.computing() if self.balance_monitor else nullcontext():
            return super().training_step(*positional, **arguments)  # type: ignore[misc]

    def get_batch_samples(self, *positional: Any, **arguments: Any) -> Any:
        batches, items = super().get_batch_samples(*positional, **arguments)  # type: ignore[misc]
        if batches and items is not None and not int(items.max() if isinstance(items, Tensor) else items):
            warn_of_no_labels()
            items = items + 1  # the loss is a sum of nothing, divided by them
        return batches, items

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns that the collator reads, which the model does not take."""
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        trainer: Any = self
        if isinstance(getattr(trainer, "data_collator", None), FlatteningCollator):
            columns = trainer._signature_columns
            trainer._signature_columns = [*columns, *(field for field in FIELDS if field not in columns)]

    def _wlb_sampler(self, trainer: Any) -> PlannedBatchSampler:
        dp = data_parallel_ranks(trainer.args.world_size, self._wlb_planning["cp"])
        device = trainer.args.device.type
        lengths = _lengths_of(trainer.train_dataset, trainer.data_collator)
        config = getattr(trainer.model, "config", None)
        check_rotary(config, lengths)
        usual = {"seed": trainer.args.seed, "hardware": "cpu" if device == "cpu" else "h100"}
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
            epochs=self._wlb_epochs,
            **usual | self._wlb_planning,
        )


class _Collation:
    """The collator of a Trainer, held to what was planned, and then this rank's share of what it made."""

    def __init__(self, trainer: Any, share: Callable[[Any], Any] | None) -> None:
        self._collate, self._share = trainer.data_collator, share
        self._by_column = _lengths_in_column(trainer.train_dataset, trainer.data_collator)

    def __call__(self, documents: Any) -> Any:
        for document in documents if self._by_column else ():
            tokens = token_count(document)
            if tokens != document.get("length", tokens):
                raise UserError(
                    f"a document has {tokens} tokens, and {document['length']} by the data set's column length, by "
                    "which micro-batches are planned; give it tokens without padding, or remove the column"
                )
        batch = self._collate(documents)
        rows = len(batch["input_ids"]) if "input_ids" in batch else 1
        if rows > 1:
            raise UserError(
                f"{name_of(self._collate)} makes {rows} padded rows of documents that were planned as one; give "
                "data_collator=FlatteningCollator(), or another that packs them into one row"
            )
        return batch if self._share is None else self._share(batch)


def _lengths_of(dataset: Any, collator: Any) -> Sequence[int]:
    """Tokens of every document, without padding: the column ``length``, or what ``attention_mask`` and ids say.

    The column spares reading all documents. It is taken where our collator reads them, which then compares it.
    """
    columns = getattr(dataset, "column_names", None) or ()
    if _lengths_in_column(dataset, collator):
        return [int(length) for length in dataset["length"]]
    if "attention_mask" in columns:
        return [int(np.count_nonzero(mask)) for mask in dataset["attention_mask"]]
    if "input_ids" in columns:
        return [len(ids) for ids in dataset["input_ids"]]
    return [token_count(dataset[index], f"document {index}") for index in range(len(dataset))]


def _lengths_in_column(dataset: Any, collator: Any) -> bool:
    return isinstance(collator, FlatteningCollator) and "length" in (getattr(dataset, "column_names", None) or ())


def _callback(trainer: Any) -> Any:
    """What a Trainer does beside its steps: checks packing first, closes the monitor's steps, saves the state.

    Training begins when the model is wrapped and loaded.
    """
    callbacks = require("transformers.trainer_callback", "hf")
    base: type[Any] = callbacks.TrainerCallback
    exportable: type[Any] = callbacks.ExportableState

    class BalancedState(base, exportable):
        _step = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            state.stateful_callbacks.setdefault(STATE, {})
            self._step, self._plans = state.global_step, trainer._wlb_batches.plans()
            if trainer._wlb_checks:
                check_trainer(trainer, trainer.train_sampler, trainer._wlb_collated, trainer._wlb_share)

        def on_step_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            self._step = state.global_step
            trainer._wlb_batches.state_after(self._step)
            if trainer.balance_monitor is not None:
                trainer.balance_monitor.end_step(next(self._plans, None))

        def state(self) -> dict[str, Any]:
            saved = json.dumps(trainer._wlb_batches.state_after(self._step))
            return {"args": {}, "attributes": {"saved": saved}}

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
