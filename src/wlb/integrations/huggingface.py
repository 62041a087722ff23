"""Hugging Face: packed attention for an unmodified model, and any Trainer with balanced micro-batches.

    register_attention(model)                                    # exact attention inside documents, without a mask
    trainer = balanced(Trainer, context_window=4096)(model=model, args=args, train_dataset=dataset)

``balanced`` makes a subclass of ``Trainer`` or of TRL's ``SFTTrainer`` whose train loader is planned: the documents of
all epochs as one stream, each trained once an epoch, in micro-batches of equal work. With ``cp`` the ranks of a
context-parallel group share every micro-batch by a ``ShardPlan``. Trainer's own loss is right for it, as
``num_items_in_batch`` counts the labelled tokens of all ranks; resuming is Trainer's own, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from wlb.attention import context_parallel_attention, segment_attention
from wlb.batches import PlannedBatchSampler
from wlb.errors import UserError, require
from wlb.integrations.checks import BalanceMonitor, PackingCheck, check_packing
from wlb.integrations.packed import FlatteningCollator
from wlb.packing.plan import StepPlan
from wlb.sharding import make_shard_plan
from wlb.training.data.batch import IGNORE_LABEL
from wlb.workload import ModelShape
from wlb.workload.base import Workload

NAME = "wlb"  # of the attention implementation
_EXTRA = "hf"


def register_attention(
    model: nn.Module | None = None, *, name: str = NAME, group: dist.ProcessGroup | None = None
) -> None:
    """Make our attention known to ``transformers`` as the implementation ``name``, and use it in ``model`` if given.

    A model that uses it takes packed micro-batches of one row with ``cu_seq_lens_q`` (``FlatteningCollator``), and with
    ``shard_plan`` one rank's share of them (``context_parallel_share``), which the ranks of ``group`` attend together;
    None is the default group. It is exact, as fast as what it runs on (``wlb.attention``), and its memory does not grow
    with the square of the tokens.

    Raises ``UserError`` for a model whose ``config.use_cache`` is on. The attention raises it for what would silently
    train something else: an attention mask, a cache, a batch without ``cu_seq_lens_q`` or of several rows, dropout,
    sliding windows, attention that is not causal.
    """
    transformers = require("transformers", _EXTRA)
    transformers.AttentionInterface.register(name, _PackedAttention(group))
    transformers.AttentionMaskInterface.register(name, _no_mask)
    if model is not None:
        check_model(model)
        model.set_attn_implementation(name)  # type: ignore[operator]  # of every pretrained model


def check_model(model: nn.Module) -> None:
    """Raise ``UserError`` for a model with settings under which packed documents attend each other."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        raise UserError(
            "model.config.use_cache = True makes transformers leave out the mask between packed documents, so they "
            "would attend each other; set model.config.use_cache = False"
        )


class _PackedAttention:
    """An attention function as ``transformers`` calls it: tensors of shape (1, heads, tokens, head_dim)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._extents: Tensor | None = None  # of the last micro-batch, so that its layers read them once
        self._lengths: list[int] = []

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        _refuse(module, query, key, attention_mask, dropout, arguments)
        if scaling is not None and not math.isclose(scaling, query.shape[-1] ** -0.5, rel_tol=1e-6):
            query = query * (scaling * query.shape[-1] ** 0.5)
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        plan = arguments.get("shard_plan")
        if plan is None:
            return segment_attention(q, k, v, self._segment_lengths(arguments))[None], None
        rank = dist.get_rank(self._group)
        local = int(plan.tokens_per_rank[rank])
        out = context_parallel_attention(q[:local], k[:local], v[:local], plan, self._group)
        return F.pad(out, (0, 0, 0, 0, 0, len(q) - local))[None], None

    def _segment_lengths(self, arguments: Mapping[str, Any]) -> list[int]:
        extents: Tensor = arguments["cu_seq_lens_q"]
        if extents is not self._extents:
            self._extents, self._lengths = extents, extents.diff().tolist()
        return self._lengths


def _no_mask(*positional: Any, attention_mask: Tensor | None = None, **arguments: Any) -> None:
    """In place of the mask that ``transformers`` would make: none is needed, and none may be given."""
    if attention_mask is not None:
        raise UserError(
            f"an attention_mask of shape {tuple(attention_mask.shape)} was given; packed micro-batches have none: use "
            "FlatteningCollator, which leaves it out"
        )


def _refuse(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, arguments: Mapping[str, Any]
) -> None:
    """Raise ``UserError`` for what this attention would not compute."""
    if mask is not None:
        _no_mask(attention_mask=mask)
    if query.shape[0] != 1:
        raise UserError(
            f"a batch of {query.shape[0]} rows, query (b, heads, s, head_dim) = {tuple(query.shape)}, is not packed; "
            "lay its documents one after another in one row, as FlatteningCollator does"
        )
    if query.shape[2] != key.shape[2]:
        raise UserError(
            f"{query.shape[2]} queries attend {key.shape[2]} keys: there is a cache; set use_cache = False, and "
            'generate with another attention implementation, such as "sdpa"'
        )
    if "cu_seq_lens_q" not in arguments and arguments.get("shard_plan") is None:
        raise UserError("the batch has no cu_seq_lens_q, so documents are not known; use FlatteningCollator")
    if dropout:
        raise UserError(f"attention_dropout = {dropout} is not supported; set model.config.attention_dropout = 0.0")
    for name in ("sliding_window", "softcap", "s_aux"):
        if arguments.get(name) is not None:
            raise UserError(f"{name} = {arguments[name]} is not supported; use flash_attention_2 for this model")
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UserError("attention that is not causal is not supported; use another attention implementation")


def model_shape_of(config: Any) -> ModelShape:
    """The shape of a Hugging Face decoder from its ``config``, to price documents for it."""
    heads = config.num_attention_heads
    return ModelShape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn_hidden=config.intermediate_size,
        vocab_size=config.vocab_size,
    )


def context_parallel_group(cp: int) -> dist.ProcessGroup | None:
    """The group of this process's ``cp`` neighbours; every process calls it. None, the default group, where it is all.

    Raises ``UserError`` where the processes cannot be divided so.
    """
    world = dist.get_world_size()
    if world % cp:
        raise UserError(
            f"{world} processes cannot be divided into context-parallel groups of cp = {cp}; give a divisor"
        )
    if world == cp:
        return None
    groups: list[dist.ProcessGroup] = [dist.new_group(list(range(first, first + cp))) for first in range(0, world, cp)]
    return groups[dist.get_rank() // cp]


def context_parallel_share(
    batch: Mapping[str, Any], cp: int, rank: int, sharding: str = "hybrid", workload: Workload | None = None
) -> dict[str, Any]:
    """What ``rank`` of a context-parallel group of ``cp`` trains of a collated micro-batch.

    Tokens, positions and labels are those at ``shard_plan.positions(rank)``; ``shift_labels`` (the token to predict at
    each position) take the place of labels, because the next token may lie on another rank. A rank without tokens gets
    one that is neither attended nor learnt. ``cu_seq_lens_q`` stays that of the whole micro-batch.
    """
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    plan = make_shard_plan(lengths, cp, sharding, workload=workload)
    positions = torch.from_numpy(plan.positions(rank))
    padding = 0 if len(positions) else 1
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_LABEL)

    def mine(tensor: Tensor, value: int = 0) -> Tensor:
        return F.pad(tensor[:, positions], (0, padding), value=value)

    shifted = mine(labels, IGNORE_LABEL)
    return {
        **batch,
        "input_ids": mine(batch["input_ids"]),
        "position_ids": mine(batch["position_ids"]),
        "labels": shifted,  # only counted: the loss reads shift_labels
        "shift_labels": shifted,
        "shard_plan": plan,
    }


def check_batch(model: nn.Module, batch: Mapping[str, Any]) -> PackingCheck:
    """``check_packing`` of one collated micro-batch of a model that is not wrapped yet (by DDP, FSDP, ...).

    Raises ``UserError`` where packing it changes loss or gradients.
    """

    def loss_of(inputs: Mapping[str, Any]) -> Tensor:
        loss: Tensor = model(**inputs, num_items_in_batch=1).loss  # the sum over labelled tokens
        return loss

    return check_packing(model, partial(loss_of, batch), (partial(loss_of, one) for one in _singles(batch)))


def _singles(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The documents of ``batch``, each as a micro-batch of its own."""
    extents = batch["cu_seq_lens_q"].tolist()
    for start, stop in pairwise(extents):
        one = torch.tensor([0, stop - start], dtype=torch.int32)
        yield {
            **{name: batch[name][:, start:stop] for name in ("input_ids", "position_ids", "labels")},
            "cu_seq_lens_q": one,
            "cu_seq_lens_k": one,
            "max_length_q": stop - start,
            "max_length_k": stop - start,
            "use_cache": False,
        }


def balanced(
    trainer_class: type[Any],
    *,
    context_window: int,
    cp: int = 1,
    sharding: str = "hybrid",
    monitor: bool = False,
    **settings: Any,
) -> type[Any]:
    """A subclass of ``trainer_class`` (``Trainer``, ``SFTTrainer``) that trains balanced micro-batches.

    Args:
        context_window: Tokens of a micro-batch on average and of a document at most;
            ``per_device_train_batch_size`` has no effect. Memory must hold ``max_length_factor`` = 1.5 windows.
        cp: Neighbouring processes that share every micro-batch, with the attention of ``register_attention``.
        sharding: The strategy by which they do.
        monitor: Measure every step: ``trainer.balance_monitor`` is a ``BalanceMonitor`` then.
        settings: Further keywords of ``wlb.batches.steps.balanced_job``: hardware, preset ("elastic" pools all
            processes anew, so leave ``cp`` out), workload, seed, options of the packer. ``model`` is the trained one.

    All epochs are one stream, so for Trainer they are one epoch: strategies "epoch" of saving, evaluating and logging
    are refused where there are several. Gradient accumulation is the number of micro-batches.

    The constructor raises ``UserError`` for settings that silently break packing: ``use_cache``, a loss that is
    averaged rank by rank, a data set without lengths, ``padding_free=False`` of ``SFTTrainer``.
    """

    class Balanced(_BalancedTrainer, trainer_class):
        _wlb_planning = {"context_window": context_window, "cp": cp, **settings}  # noqa: RUF012  # never changed
        _wlb_sharding = sharding
        _wlb_monitors = monitor

    Balanced.__name__ = Balanced.__qualname__ = f"Balanced{trainer_class.__name__}"
    return Balanced


class _BalancedTrainer:
    """What ``balanced`` adds to a Trainer."""

    _wlb_planning: Mapping[str, Any]
    _wlb_sharding: str
    _wlb_monitors: bool

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        if arguments.get("data_collator") is None and not hasattr(arguments.get("args"), "padding_free"):
            arguments["data_collator"] = FlatteningCollator()
        super().__init__(*positional, **arguments)
        trainer: Any = self
        check_model(trainer.model)
        self._wlb_epochs = _checked_epochs(trainer)
        self.train_sampler = self._wlb_sampler(trainer)
        self._wlb_share: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        job = self.train_sampler.job
        if job.cp > 1:
            register_attention(trainer.model, group=context_parallel_group(job.cp))
            rank, prices = dist.get_rank() % job.cp, job.sharding_workload
            strategy = "elastic" if job.packing.method == "elastic" else self._wlb_sharding
            self._wlb_share = partial(context_parallel_share, cp=job.cp, rank=rank, sharding=strategy, workload=prices)
        self.balance_monitor = BalanceMonitor(device=trainer.args.device.type) if self._wlb_monitors else None
        if self.balance_monitor is not None:
            trainer.add_callback(_monitor_callback(self.balance_monitor, self.train_sampler))

    def get_train_dataloader(self) -> Any:
        trainer: Any = self
        dataset = trainer.train_dataset
        if hasattr(dataset, "column_names"):
            dataset = trainer._remove_unused_columns(dataset, description="training")
        workers = trainer.args.dataloader_num_workers
        loader = DataLoader(
            dataset,
            batch_sampler=self.train_sampler,
            collate_fn=_Collation(trainer.data_collator, self._wlb_share),
            num_workers=workers,
            pin_memory=trainer.args.dataloader_pin_memory,
            persistent_workers=trainer.args.dataloader_persistent_workers,
            prefetch_factor=trainer.args.dataloader_prefetch_factor if workers else None,
        )
        return trainer.accelerator.prepare(loader)

    def training_step(self, *positional: Any, **arguments: Any) -> Any:
        with self.balance_monitor.computing() if self.balance_monitor else nullcontext():
            return super().training_step(*positional, **arguments)  # type: ignore[misc]

    def _wlb_sampler(self, trainer: Any) -> PlannedBatchSampler:
        planning = dict(self._wlb_planning)
        cp = planning.pop("cp")
        world = trainer.args.world_size
        if world % cp:
            raise UserError(f"{world} processes cannot be divided into context-parallel groups of cp = {cp}")
        device = trainer.args.device.type
        usual = {"model": model_shape_of(trainer.model.config), "seed": trainer.args.seed}
        usual["hardware"] = "cpu" if device == "cpu" else "h100"
        return PlannedBatchSampler(
            _lengths_of(trainer.train_dataset),
            micro_batches=trainer.args.gradient_accumulation_steps,
            dp=world // cp,
            cp=cp,
            epochs=self._wlb_epochs,
            **usual | planning,
        )


class _Collation:
    """A collator, and then this rank's share of what it made."""

    def __init__(self, collate: Callable[[Any], Any], share: Callable[[Any], Any] | None) -> None:
        self._collate, self._share = collate, share

    def __call__(self, documents: Any) -> Any:
        batch = self._collate(documents)
        return batch if self._share is None else self._share(batch)


def _checked_epochs(trainer: Any) -> int:
    """Epochs of the stream. Raises ``UserError`` for arguments that break packing or cut epochs."""
    args = trainer.args
    if not getattr(args, "average_tokens_across_devices", True) and args.world_size > 1:
        raise UserError(
            "average_tokens_across_devices = False divides each rank's loss by its own tokens, so documents of long "
            "micro-batches would count less; set it to True"
        )
    if getattr(args, "packing", False) or not getattr(args, "padding_free", True):
        raise UserError(
            "SFTTrainer must leave packing to the sampler; set packing=False, padding_free=True, max_length=None"
        )
    if getattr(args, "accelerator_config", None) is not None and args.accelerator_config.split_batches:
        raise UserError("accelerator_config.split_batches = True cuts planned micro-batches; set it to False")
    epochs = args.num_train_epochs
    if epochs != int(epochs) and args.max_steps <= 0:
        raise UserError(f"num_train_epochs = {epochs} ends inside an epoch; give a whole number, or max_steps")
    whole: int = max(1, math.ceil(epochs))
    strategies = ("save_strategy", "eval_strategy", "logging_strategy")
    by_epoch = [name for name in strategies if getattr(args, name, None) == "epoch"]
    if by_epoch and whole > 1:
        raise UserError(f'{by_epoch[0]} = "epoch" has no meaning where {whole} epochs are one stream; use "steps"')
    args.num_train_epochs = 1  # of the stream
    return whole


def _lengths_of(dataset: Any) -> Sequence[int]:
    """Tokens of every document: the column ``length``, or those of ``input_ids``."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            "a stream of documents has no lengths to plan by; load it as a data set with a length, or train on a token "
            "store with packed_batches"
        )
    columns = getattr(dataset, "column_names", None) or ()
    if "length" in columns:
        return [int(length) for length in dataset["length"]]
    if "input_ids" in columns:
        return [len(ids) for ids in dataset["input_ids"]]
    return [len(dataset[index]["input_ids"]) for index in range(len(dataset))]


def _monitor_callback(monitor: BalanceMonitor, sampler: PlannedBatchSampler) -> Any:
    """A ``TrainerCallback`` that closes a step of ``monitor`` after every optimizer step."""
    callback_class: type[Any] = require("transformers", _EXTRA).TrainerCallback

    class MonitorCallback(callback_class):
        def on_train_begin(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            self._plans: Iterator[StepPlan] = islice(sampler.steps(), state.global_step, None)

        def on_step_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            monitor.end_step(next(self._plans, None))

    return MonitorCallback()
