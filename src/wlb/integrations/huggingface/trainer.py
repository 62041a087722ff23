"""Makes a Trainer that trains planned steps from any Trainer class.

A Trainer resumes by skipping batches, which is right only if no setting has changed. So ``trainer_state.json`` holds
the state of the steps, and the loader of a resumed run begins after it.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from wlb.errors import UserError, require
from wlb.integrations.document_fields import FIELDS
from wlb.integrations.huggingface.attention import check_rotary, prepare_model, refuse, register_attention
from wlb.integrations.huggingface.check import check_arguments, check_trainer, objections_to_settings, set_right
from wlb.integrations.packed import FlatteningCollator, PackedBatch, PackedSteps
from wlb.runtime.collectives import on_every_rank, warn
from wlb.runtime.environment import set_up_gpu
from wlb.runtime.loss import IGNORE_LABEL, NO_LABELS
from wlb.token_count import check_whole
from wlb.workload.model_json import shape_of_config

_PLANNED = 64  # steps of an endless stream to plan before training; planning all would take minutes
_EPOCHS, _STEPS_OF_EPOCH, _SAMPLES, _ALL_STEPS = 0, 1, 3, 6  # in what Trainer.set_initial_training_values returns


def balanced(
    trainer_class: type[Any],
    *,
    context_window: int,
    cp: int = 1,
    sharding: str = "balanced",
    check: bool = True,
    **settings: Any,
) -> type[Any]:
    """A subclass of ``trainer_class`` (``Trainer``, ``SFTTrainer``) that trains the steps of ``packed_batches``.

    Args:
        context_window: Mean tokens of a micro-batch, and the longest document; ``per_device_train_batch_size`` has no
            effect. A GPU must hold ``max_length_factor`` = 1.5 windows.
        cp: Neighbouring processes that share every micro-batch, by the strategy ``sharding``.
        check: Before the first step, compare losses and gradients of packed documents with single ones
            (``check_trainer``). It takes the time of a few micro-batches and does not change the training.
        settings: Further keywords of ``packed_batches``; ``model`` defaults to the trained one.

    Gradient accumulation is the number of micro-batches. All epochs are one stream, repeated up to a given
    ``max_steps``. ``state.epoch`` is the trained documents over those of the data set. Without ``train_dataset`` a
    Trainer evaluates. Raises ``UserError`` for the settings that docs/stacks/huggingface.md lists as wrong.
    """
    set_up_gpu(shares=cp > 1)
    check_whole("context_window", context_window)
    check_arguments(trainer_class, {})
    planning = {"context_window": context_window, "cp": cp, "sharding": sharding, **settings}
    attributes = {"_wlb_planning": planning, "_wlb_checks": check}
    return type(f"Balanced{trainer_class.__name__}", (_BalancedTrainer, trainer_class), attributes)


class _BalancedTrainer:
    """What ``balanced`` adds to a Trainer."""

    _wlb_planning: dict[str, Any]
    _wlb_checks: bool

    def __init__(self: Any, *positional: Any, **arguments: Any) -> None:
        arguments = inspect.signature(super().__init__).bind_partial(*positional).arguments | arguments
        check_arguments(type(self), arguments)
        args, changed = set_right(arguments.get("args"), self._wlb_planning["context_window"])
        super().__init__(**arguments | {"args": args})
        self.data_collator = FlatteningCollator()
        changed += getattr(self, "_wlb_changed", None) or prepare_model(self.model)
        if changed:
            warn(f"balanced() set {', '.join(changed)}")
        if self.train_dataset is None:
            return  # for evaluation only
        refuse(objections_to_settings(self, self._wlb_planning))
        self._wlb_epochs = max(1, ceil(self.args.num_train_epochs))
        self.args.ignore_data_skip = True  # the loader knows where to begin
        self._wlb_steps = self._wlb_planned_steps()
        # Pools may have another number of micro-batches than the arguments.
        self.args.gradient_accumulation_steps = self._wlb_steps.job.rank_micro_batches
        self._wlb_planned = self._wlb_planned_by()
        self._wlb_begin = 0, 0.0, self._wlb_steps.state_dict()
        self._wlb_loader = None
        self.add_callback(_callback(self))
        self._wlb_share_in(self.model)

    def _wlb_share_in(self: Any, model: Any) -> None:
        if "_wlb_steps" in vars(self) and self._wlb_steps.job.layout.pool_size > 1:
            register_attention(model)  # even if the model uses FlashAttention

    def call_model_init(self: Any, *positional: Any, **arguments: Any) -> Any:
        """As in Trainer, which makes its model again when it trains."""
        model = super().call_model_init(*positional, **arguments)  # type: ignore[misc]
        self._wlb_changed = prepare_model(model)
        self._wlb_share_in(model)
        return model

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *positional: Any, **arguments: Any) -> Any:
        """Train as ``Trainer.train``, from the next documents of the checkpoint. Raises ``UserError`` if it cannot."""
        if self.train_dataset is None:
            raise UserError("there are no documents to train; give train_dataset")
        refuse(objections_to_settings(self, self._wlb_planning))  # again, as attributes may have changed
        self._wlb_loader = on_every_rank(partial(self._wlb_loader_after, resume_from_checkpoint))
        self._wlb_steps.agree()  # before the check, which would deadlock with different documents
        return super().train(resume_from_checkpoint, *positional, **arguments)  # type: ignore[misc]

    def _wlb_planned_by(self: Any) -> tuple[Any, ...]:
        args = self.args
        steps = args.gradient_accumulation_steps, args.max_steps, args.num_train_epochs
        return id(self.train_dataset), *steps, args.seed, args.data_seed

    def _wlb_loader_after(self: Any, resume_from_checkpoint: str | bool | None) -> "TrainLoader":
        begin = trained_state(self.args, resume_from_checkpoint) or self._wlb_begin
        return TrainLoader(self._wlb_steps, self.args.max_steps, begin)

    def get_train_dataloader(self: Any) -> Any:
        if self._wlb_loader is None:
            self._wlb_loader = self._wlb_loader_after(None)  # someone asks before ``train``, which makes its own
        return self._wlb_loader

    def training_step(self: Any, model: Any, inputs: Any, *positional: Any, **arguments: Any) -> Any:
        with self._wlb_loader.timing(inputs):
            return super().training_step(model, inputs, *positional, **arguments)  # type: ignore[misc]

    def set_initial_training_values(self: Any, *positional: Any, **arguments: Any) -> Any:
        """As in Trainer, but with all epochs as one, and documents as the samples in its metrics."""
        if self._wlb_planned != self._wlb_planned_by():  # also by a search of hyperparameters
            raise UserError("train_dataset or args have changed since the steps were planned; make a new Trainer")
        values = [*super().set_initial_training_values(*positional, **arguments)]  # type: ignore[misc]
        values[_EPOCHS], values[_STEPS_OF_EPOCH], values[_ALL_STEPS] = 1, *[self._wlb_loader.all_steps] * 2
        values[_SAMPLES] = self._wlb_loader.documents_a_step * self._wlb_loader.all_steps
        return tuple(values)

    def prediction_step(self: Any, model: Any, inputs: Any, *positional: Any, **arguments: Any) -> Any:
        """As in Trainer, with a row for each document in place of the packed row, padded with -100."""
        loss, *scores_and_labels = super().prediction_step(model, inputs, *positional, **arguments)  # type: ignore[misc]
        if scores_and_labels == [None, None] or "cu_seq_lens_q" not in inputs:  # the loss alone, or rows already
            return loss, *scores_and_labels
        lengths = inputs["cu_seq_lens_q"].diff().tolist()

        def rows(packed: Tensor) -> Tensor:
            if packed.shape[:2] != (1, sum(lengths)):
                return packed
            return pad_sequence(packed[0].split(lengths), batch_first=True, padding_value=IGNORE_LABEL)

        inputs["input_ids"] = rows(inputs["input_ids"])  # for include_for_metrics
        return loss, *tree_map_only(Tensor, rows, scores_and_labels)

    def get_batch_samples(self: Any, iterator: Any, count: int, *positional: Any, **arguments: Any) -> Any:
        batches, items = super().get_batch_samples(iterator, count, *positional, **arguments)  # type: ignore[misc]
        if len(batches) not in (0, count):
            raise UserError(f"get_batch_samples gave {len(batches)} of {count} micro-batches; give all of a step")
        if batches and items is not None and not int(items.max() if isinstance(items, Tensor) else items):
            warn(NO_LABELS)
            items = items + 1  # avoids 0 / 0
        return batches, items

    def _set_signature_columns_if_needed(self: Any) -> None:
        """Keep columns that wlb reads from documents and the model does not take."""
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        self._signature_columns = [*dict.fromkeys([*self._signature_columns, *FIELDS])]

    def _wlb_planned_steps(self: Any) -> PackedSteps:
        args, config, documents = self.args, getattr(self.model, "config", None), self.train_dataset
        if hasattr(documents, "column_names"):
            documents = self._remove_unused_columns(documents, description="training")
        seed = args.seed if args.data_seed is None else args.data_seed
        settings: dict[str, Any] = {"seed": seed, "hardware": "cpu" if args.device.type == "cpu" else "h100"}
        settings["device"] = "cpu"  # a Trainer moves its batches
        if config is not None and "model" not in self._wlb_planning:
            settings["model"] = shape_of_config(config)
        settings |= {"micro_batches": args.gradient_accumulation_steps, **self._wlb_planning}
        steps = PackedSteps(documents, epochs=None if args.max_steps > 0 else self._wlb_epochs, **settings)
        longest, window = int(steps.lengths.argmax()), steps.job.context_window
        if (tokens := steps.lengths[longest]) > window:
            over = f"document {longest} has {tokens} tokens, over context_window = {window}"
            raise UserError(f"{over}; raise the window, or cut such documents")
        check_rotary(config, steps.lengths)
        self._wlb_documents = documents
        return steps


def _callback(trainer: Any) -> Any:
    """A callback that checks packing before training, begins and ends epochs, and saves the state of the steps."""
    callbacks: Any = require("transformers.trainer_callback", "hf")

    class BalancedState(callbacks.TrainerCallback, callbacks.ExportableState):
        _step = _epoch = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            # The model is wrapped and loaded by now.
            self._step, self._epoch = state.global_step, int(trainer._wlb_loader.epoch)
            state.num_train_epochs = trainer._wlb_epochs
            if trainer._wlb_checks:
                check_trainer(trainer, trainer._wlb_steps, trainer._wlb_documents)

        def on_step_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> Any:
            self._step, state.epoch = state.global_step, trainer._wlb_loader.epoch
            if trainer._wlb_steps.calibration is not None:
                trainer._wlb_steps.calibration.end_step()
            # At max_steps the Trainer ends its only epoch.
            ended = int(state.epoch) if self._step < state.max_steps else ceil(state.epoch) - 1
            while self._epoch < ended:
                self._epoch += 1
                control = trainer.callback_handler.on_epoch_end(args, state, control)
                control = trainer.callback_handler.on_epoch_begin(args, state, control)
            return control

        def on_epoch_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            if control.should_epoch_stop and not control.should_training_stop and self._step < state.max_steps:
                over = "a callback set should_epoch_stop, but all epochs are one stream, so training would end"
                raise UserError(f"{over}; set should_training_stop if it should, or leave it out")

        def state(self) -> dict[str, Any]:
            # None inside a planned step, and where the loader has read further than was trained.
            state = trainer._wlb_steps.state_dict() if trainer._wlb_loader.step == self._step else None
            return {"args": {}, "attributes": {"saved": json.dumps(state)}}

    return BalancedState()


class TrainLoader:
    """Micro-batches of this process after ``begin``: finished Trainer steps, the epoch, and the state of ``steps``.

    A Trainer accumulates equally many micro-batches in every step. So empty ones fill a shorter planned step, and a
    longer one becomes several Trainer steps. ``all_steps`` counts all Trainer steps, up to a positive ``max_steps``,
    and ``documents_a_step`` is their mean. ``step`` and ``epoch`` tell how far the loader has read.
    """

    def __init__(self, steps: PackedSteps, max_steps: int, begin: tuple[int, float, Mapping[str, Any]]) -> None:
        self._steps, self._begin, self._wanted = steps, begin, steps.job.rank_micro_batches
        self._inner: dict[int, PackedBatch] = {}  # neither first nor last in their step, by the id of their inputs
        self.rewind()
        plans = [*islice(steps.plans(), _PLANNED if max_steps > 0 else None)]
        planned = sum(-(-len(plan.ranks[0]) // self._wanted) for plan in plans)
        self.all_steps = max_steps if max_steps > 0 else begin[0] + planned
        self.documents_a_step = sum(len([*plan.segments]) for plan in plans) / max(1, planned)

    def rewind(self) -> None:
        """Go back to the beginning."""
        self.step, self.epoch, state = self._begin
        self._steps.load_state_dict(state)

    def __len__(self) -> int:
        # Trainer refuses an empty loader, but reads nothing if no step is left.
        return max(1, (self.all_steps - self._begin[0]) * self._wanted)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.rewind()
        trained, documents = round(self.epoch * len(self._steps.lengths)), len(self._steps.lengths)
        for step in self._steps:
            batches: list[Any] = [*step.batches]
            batches += [self._steps.batch_of([])] * (-len(batches) % self._wanted)
            *others, last = (batch.with_labels() for batch in batches)
            self._inner = {id(inputs): batch for inputs, batch in zip(others[1:], batches[1:-1], strict=True)}
            yield from others
            self.step += len(batches) // self._wanted
            trained += len([*step.plan.segments])
            self.epoch = trained / documents
            yield last

    def timing(self, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Time a micro-batch for the calibration, unless it is the first or last of its step, in which ranks wait."""
        batch, calibration = self._inner.get(id(inputs)), self._steps.calibration
        return nullcontext() if batch is None or calibration is None else calibration.timing(batch)


def trained_state(args: Any, resume_from_checkpoint: str | bool | None) -> tuple[int, float, dict[str, Any]] | None:
    """Where the checkpoint to resume from ends and ``TrainLoader`` begins; None without a checkpoint.

    Raises ``UserError`` for a checkpoint without this state.
    """
    folder: Any = resume_from_checkpoint
    if folder is True:
        folder = require("transformers.trainer_utils", "hf").get_last_checkpoint(args.output_dir)
    if not folder:
        return None  # if one was asked for, Trainer raises
    path = Path(folder) / "trainer_state.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    exported = (saved.get("stateful_callbacks") or {}).get("BalancedState", {})
    if state := json.loads(exported.get("attributes", {}).get("saved", "null")):
        return saved["global_step"], saved["epoch"] or 0.0, state
    raise UserError(f"the checkpoint {folder} has no state of balanced(); start a new run from its weights")
