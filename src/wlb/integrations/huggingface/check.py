"""Whether packing changes what a model trains: micro-batches against their documents one at a time.

The documents alone go through the model's own attention (``sdpa``) where it otherwise attends with ours, so that the
check also finds what our attention would leave out.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wlb.errors import UserError
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.checks import TOLERANCE, PackingCheck, check_packing, packing_tolerance
from wlb.integrations.huggingface.attention import attend_with, check_rotary, is_packed_attention
from wlb.integrations.packed import extents_of
from wlb.runtime.batch import IGNORE_LABEL

Inputs = Mapping[str, Any]

_BESIDE = 3  # short documents in a micro-batch with the longest one
_SHORT = 8  # documents of a micro-batch of short ones
_TOKENS = 8192  # of a document at most where its own attention makes a mask of its tokens squared
_CHANCE = ("drop", "jitter", "noise")  # in the names of what makes training mode random
_SCALE = 1024.0  # of the loss under float16, so that its gradients do not underflow


def check_batch(model: nn.Module, batch: Inputs) -> PackingCheck:
    """``check_packing`` of one collated micro-batch of a model that is not wrapped yet (by DDP, FSDP, ...).

    The model is in training mode, without dropout. Raises ``UserError`` where packing the micro-batch changes loss or
    gradients.
    """

    def loss_of(inputs: Inputs) -> Tensor:
        loss: Tensor = model(**{**inputs, "num_items_in_batch": 1}).loss  # the sum over labelled tokens
        return loss

    check_rotary(getattr(model, "config", None), batch["cu_seq_lens_q"].diff().tolist())
    with _undisturbed(model), _without_chance(model):
        singles = _by_own_attention(model, (partial(loss_of, one) for one in _singles(batch)))
        return check_packing(model, partial(loss_of, batch), singles)


def check_trainer(
    trainer: Any,
    sampler: PlannedBatchSampler,
    collated: Callable[[Sequence[int]], Inputs],
    share: Callable[[Inputs], Inputs] | None,
) -> None:
    """``check_packing`` of micro-batches in a Trainer's own terms: its collator, loss, training mode and wrapped model.

    One has the longest document and a few short ones, one many short ones. Labels are those that the collator makes;
    where it masks some, the short documents are compared once more with all tokens learnt, as a mask could hide what
    documents see. Dropout is off, but for one pass forward in which the model may refuse it.

    All processes train the same documents, so that they call the same collectives and refuse together; with ``share``
    each its share of them, and then all of each document alone. Nothing is compared, with a warning, where a backward
    pass is more than that: under DeepSpeed, and with an optimizer that steps in it.
    """
    wrapped = trainer.model_wrapped
    model = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
    if getattr(trainer, "is_deepspeed_enabled", False) or _steps_in_backward(model):
        warnings.warn(
            "balanced: the check of packing does not run under DeepSpeed, nor with an optimizer that steps in the "
            "backward pass; run check_batch",
            stacklevel=2,
        )
        return
    scale = _SCALE if trainer.accelerator.mixed_precision == "fp16" else 1.0
    whole = 1 / sampler.job.layout.cp  # each document alone is trained by all ranks that share the packed ones
    trainer.current_gradient_accumulation_steps = 1  # some losses look; the Trainer sets it in every step

    def loss_of(inputs: Inputs, items: Any, weight: float = 1.0) -> Tensor:
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(wrapped, trainer._prepare_inputs(inputs), num_items_in_batch=items)
        return loss * (weight * scale)

    def items_of(inputs: Inputs) -> Any:
        return trainer.get_batch_samples(iter([inputs]), 1, trainer.args.device)[1]

    def shared(batch: Inputs) -> Inputs:
        return batch if share is None else share(batch)

    def compare(documents: Sequence[int], labelled: Callable[[Inputs], Inputs]) -> None:
        packed = shared(labelled(collated(documents)))
        items = items_of(packed)
        alone = (partial(loss_of, labelled(collated([document])), items, whole) for document in documents)
        with _without_chance(model):
            singles = _by_own_attention(model, alone)
            tolerance = _tolerance(trainer, model)
            check_packing(wrapped, partial(loss_of, packed, items), singles, tolerance=tolerance, sharded=True)

    longest, short = _checked_documents(sampler, model)
    with _undisturbed(model), _without_metrics(trainer):
        as_made = collated(short)
        learning = _learning_all(as_made)
        with torch.no_grad():  # with dropout, which the attention may refuse
            packed = shared(learning)
            loss_of(packed, items_of(packed))
        for documents in (longest, short):
            if _has_labels(collated(documents)):
                compare(documents, lambda batch: batch)
        if learning is not as_made and not torch.equal(learning["labels"], as_made["labels"]):
            compare(short, _learning_all)
        if trainer.args.world_size > 1:
            alone = _learning_all(collated(short[-1:]))
            with torch.no_grad(), _without_chance(model):
                _check_processes(trainer, lambda items: float(loss_of(alone, items)), items_of(alone))


def _check_processes(trainer: Any, loss: Callable[[Any], float], items: Any) -> None:
    """Raise ``UserError`` where ``loss`` of one document on all processes is a mean over them only without ``items``.

    Gradients are averaged over processes, so a loss over the step's tokens is to be multiplied by their number.
    """
    try:
        mean = loss(None)
    except TypeError:
        return  # it divides by the items, and has no other loss
    processes, tolerance = trainer.args.world_size, _tolerance(trainer, trainer.model)
    if mean and math.isclose(loss(items) * processes, mean, rel_tol=max(1e-4, tolerance)):
        raise UserError(
            f"compute_loss divides by num_items_in_batch, which counts the tokens of {processes} processes, and "
            f"gradients are averaged over them: they would be {processes} times too small; multiply the loss by "
            "self.accelerator.num_processes"
        )


def _checked_documents(sampler: PlannedBatchSampler, model: nn.Module) -> tuple[list[int], list[int]]:
    """The longest document with a few of the shortest, and more of these; of those that teach a token, if some do.

    The longest is one that fits into the memory of a single rank.
    """
    order = np.argsort(sampler.lengths, kind="stable")
    tokens = sampler.lengths[order]
    most = sampler.job.longest_micro_batch // sampler.job.layout.cp
    most = min(most, _TOKENS) if _masks_are_squares(model) else most
    for enough in ((tokens > 1) & (tokens <= most), tokens <= most):
        if enough.any():
            order = order[enough]
            break
    chosen = order.tolist()
    return [chosen[-1], *chosen[: min(_BESIDE, len(chosen) - 1)]], chosen[:_SHORT]


def _masks_are_squares(model: Any) -> bool:
    """Whether transformers' own attention makes a mask of tokens x tokens for a document alone."""
    if not is_packed_attention(model):
        return False  # it attends packed documents in the same way
    text = model.config.get_text_config()
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return any(windows) or not model._supports_sdpa


def _has_labels(batch: Inputs) -> bool:
    return "labels" not in batch or bool((batch["labels"][:, 1:] != IGNORE_LABEL).any())


def _learning_all(batch: Inputs) -> Inputs:
    """``batch`` with every token learnt, but for first ones of documents, which are as the collator has them."""
    if "labels" not in batch or "position_ids" not in batch:
        return batch
    kept = (batch["labels"] != IGNORE_LABEL) | (batch["position_ids"] == 0)
    return {**batch, "labels": batch["labels"].where(kept, batch["input_ids"])}


def _steps_in_backward(model: nn.Module) -> bool:
    return any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters())


def _tolerance(trainer: Any, model: nn.Module) -> float:
    """For the least exact type that ``model`` computes in."""
    mixed = {"no": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
    computed = mixed.get(trainer.accelerator.mixed_precision, torch.bfloat16)
    tf32 = torch.float64 if torch.get_float32_matmul_precision() == "highest" else torch.float16
    return max(packing_tolerance(model), TOLERANCE[computed], TOLERANCE[tf32])


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """In training mode, and with modes, buffers, attention and random numbers as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    model.train()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        if attention is not None and attention != model.config._attn_implementation:  # type: ignore[union-attr]
            attend_with(model, attention)


@contextmanager
def _without_chance(model: nn.Module) -> Iterator[None]:
    """With probabilities of dropout and the like at zero: those of layers, modules and configurations."""
    holders = {id(part): part for module in model.modules() for part in (module, getattr(module, "config", None))}
    found = [
        (holder, name, value)
        for holder in holders.values()
        for name, value in getattr(holder, "__dict__", {}).items()
        if isinstance(value, float) and (any(word in name for word in _CHANCE) or _is_dropout(holder, name))
    ]
    for holder, name, _ in found:
        setattr(holder, name, 0.0)
    try:
        yield
    finally:
        for holder, name, value in found:
            setattr(holder, name, value)


def _is_dropout(holder: Any, name: str) -> bool:
    return name == "p" and "Drop" in type(holder).__name__


@contextmanager
def _without_metrics(trainer: Any) -> Iterator[None]:
    """With TRL's metrics of training as before afterwards."""
    kept = {name: vars(trainer)[name] for name in ("_metrics", "_total_train_tokens") if name in vars(trainer)}
    before = copy.deepcopy(kept)
    yield
    vars(trainer).update(before)


def _by_own_attention(model: Any, losses: Iterable[Callable[[], Tensor]]) -> Iterator[Callable[[], Tensor]]:
    """``losses``, while ``model`` attends as it would without us."""
    ours = is_packed_attention(model)
    name: Any = model.config._attn_implementation if ours else None
    if ours:
        attend_with(model, "sdpa" if model._supports_sdpa else "eager")
    yield from losses
    if ours:
        attend_with(model, name)


def _singles(batch: Inputs) -> Iterator[dict[str, Any]]:
    """The documents of ``batch``, each as a micro-batch of its own."""
    for start, stop in pairwise(batch["cu_seq_lens_q"].tolist()):
        own = {name: batch[name][:, start:stop] for name in ("input_ids", "position_ids", "labels")}
        yield own | extents_of([stop - start], batch["input_ids"].device)
