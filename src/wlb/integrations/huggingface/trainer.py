"""Makes a Trainer with a planned train loader from any Trainer class."""

from __future__ import annotations

import inspect
import json
import warnings
from math import ceil
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from wlb.errors import UserError, require
from wlb.integrations.document_fields import FIELDS
from wlb.integrations.huggingface.attention import (
    check_model,
    check_rotary,
    is_packed_attention,
    other_layers,
    register_attention,
)
from wlb.integrations.huggingface.check import check_trainer
from wlb.integrations.huggingface.loader import StepLoader, trained_state
from wlb.integrations.huggingface.refusals import check_arguments, check_settings, set_right
from wlb.integrations.packed import FlatteningCollator, PackedSteps, warn_of_no_labels
from wlb.runtime.collectives import on_every_rank
from wlb.workload import ModelShape
from wlb.workload.model_json import language_model, shape_of

# In what Trainer.set_initial_training_values returns.
_EPOCHS, _STEPS_OF_EPOCH, _TRAINED_SAMPLES, _ALL_STEPS = 0, 1, 3, 6


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
    planning = {"context_window": context_window, "cp": cp, "sharding": sharding, **settings}

    class Balanced(_BalancedTrainer, trainer_class):
        _wlb_planning = planning
        _wlb_checks = check

    Balanced.__name__ = Balanced.__qualname__ = f"Balanced{trainer_class.__name__}"
    return Balanced


class _BalancedTrainer:
    """What ``balanced`` adds to a Trainer."""

    _wlb_planning: dict[str, Any]
    _wlb_checks: bool

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        arguments = inspect.signature(super().__init__).bind_partial(*positional).arguments | arguments
        check_arguments(type(self), arguments)
        args, changed = set_right(arguments.get("args"), self._wlb_planning["context_window"])
        super().__init__(**arguments | {"args": args})
        trainer: Any = self
        trainer.data_collator = FlatteningCollator()
        changed += _prepare_model(trainer.model)
        if changed and trainer.args.process_index == 0:
            warnings.warn(f"balanced() set {', '.join(changed)}", stacklevel=2)
        if trainer.train_dataset is None:
            return  # it evaluates
        check_settings(trainer, self._wlb_planning)
        self._wlb_epochs = max(1, ceil(trainer.args.num_train_epochs))
        trainer.args.num_train_epochs, trainer.args.ignore_data_skip = 1, True  # the loader knows where it begins
        self._wlb_steps = self._wlb_planned_steps(trainer)
        # Pools may have another number of micro-batches than was asked for.
        trainer.args.gradient_accumulation_steps = self._wlb_steps.job.micro_batches_per_rank
        self._wlb_planned = self._wlb_planned_by()
        self._wlb_begin = self._wlb_steps.state_dict()
        self._wlb_loader = StepLoader(self._wlb_steps, self._wlb_begin, trainer.args.max_steps)
        trainer.add_callback(_callback(trainer))
        if self._wlb_steps.job.layout.cp > 1:
            if kinds := other_layers(getattr(trainer.model, "config", None)):
                raise UserError(f"layers of {', '.join(sorted(kinds))} cannot be shared by ranks; leave cp out")
            register_attention(trainer.model)  # FlashAttention does not share

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

        def begin() -> StepLoader:
            done, state = trained_state(trainer.args, resume_from_checkpoint) or (0, self._wlb_begin)
            if state == self._wlb_loader.state:
                return self._wlb_loader
            return StepLoader(self._wlb_steps, state, trainer.args.max_steps, done)

        self._wlb_loader = on_every_rank(begin) if dist.is_initialized() else begin()
        self._wlb_loader.agree()  # before the check, in which other documents would be other collectives
        return super().train(resume_from_checkpoint, *positional, **arguments)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        return self._wlb_loader

    def training_step(self, model: Any, inputs: Any, *positional: Any, **arguments: Any) -> Any:
        with self._wlb_loader.timing(inputs):
            return super().training_step(model, inputs, *positional, **arguments)  # type: ignore[misc]

    def _wlb_planned_by(self) -> tuple[Any, ...]:
        args, dataset = cast(Any, self).args, cast(Any, self).train_dataset
        return id(dataset), args.gradient_accumulation_steps, args.max_steps, args.num_train_epochs

    def set_initial_training_values(self, *positional: Any, **arguments: Any) -> Any:
        """As Trainer's, with all epochs as one, steps that are done, and documents for its metric of samples."""
        values = [*super().set_initial_training_values(*positional, **arguments)]  # type: ignore[misc]
        values[_EPOCHS], values[_STEPS_OF_EPOCH], values[_ALL_STEPS] = 1, *[self._wlb_loader.all_steps] * 2
        values[_TRAINED_SAMPLES] = self._wlb_loader.documents_a_step * self._wlb_loader.all_steps
        return tuple(values)

    def get_batch_samples(self, *positional: Any, **arguments: Any) -> Any:
        batches, items = super().get_batch_samples(*positional, **arguments)  # type: ignore[misc]
        if batches and items is not None and not int(items.max() if isinstance(items, Tensor) else items):
            warn_of_no_labels()
            items = items + 1  # the loss is a sum of nothing, divided by them
        return batches, items

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns of documents that the model does not take."""
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        columns = cast(Any, self)._signature_columns
        cast(Any, self)._signature_columns = [*columns, *(field for field in FIELDS if field not in columns)]

    def _wlb_planned_steps(self, trainer: Any) -> PackedSteps:
        args, config, documents = trainer.args, getattr(trainer.model, "config", None), trainer.train_dataset
        if hasattr(documents, "column_names"):
            documents = trainer._remove_unused_columns(documents, description="training")
        usual = {"seed": args.seed, "hardware": "cpu" if args.device.type == "cpu" else "h100"}
        if "model" not in self._wlb_planning:
            if config is None:
                raise UserError(
                    f"{type(trainer.model).__name__} has no config to price documents by; give balanced(..., "
                    "model=wlb.workload.ModelShape(...)), or the name of a model near it in size"
                )
            usual["model"] = model_shape_of(config)
        epochs = None if args.max_steps > 0 else self._wlb_epochs  # max_steps ends it
        sizes = {"micro_batches": args.gradient_accumulation_steps, "epochs": epochs}
        steps = PackedSteps(documents, **sizes, **usual | self._wlb_planning)
        self._wlb_documents, lengths, window = documents, steps.lengths, steps.job.context_window
        if (longest := lengths.max()) > window:
            number = f"document {lengths.argmax()} has {longest} tokens"
            raise UserError(f"{number}, over context_window = {window}; raise it, or cut such documents before")
        check_rotary(config, lengths)
        return steps


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
            self._step, state.num_train_epochs = state.global_step, trainer._wlb_epochs
            self._began = self._trained = round((state.epoch or 0) * documents)
            if trainer._wlb_checks:
                check_trainer(trainer, trainer._wlb_steps, trainer._wlb_documents)

        def on_step_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            before, self._step = self._trained // documents, state.global_step
            if self._is_whole and trainer._wlb_steps.calibration is not None:
                trainer._wlb_steps.calibration.end_step()
            self._trained = self._began + trainer._wlb_loader.documents
            state.epoch = self._trained / documents
            # The Trainer's own epoch ends with the last step.
            if before < self._trained // documents and self._step < state.max_steps:
                for does, strategy in (("save", "save"), ("evaluate", "eval"), ("log", "logging")):
                    if getattr(args, f"{strategy}_strategy", None) == "epoch":
                        setattr(control, f"should_{does}", True)

        @property
        def _is_whole(self) -> bool:
            """Whether all micro-batches of the planned step are trained, and none of the next has been read."""
            return bool(trainer._wlb_loader.step == self._step)

        def state(self) -> dict[str, Any]:
            saved = trainer._wlb_steps.state_dict() if self._is_whole else None
            return {"args": {}, "attributes": {"saved": json.dumps(saved)}}

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
