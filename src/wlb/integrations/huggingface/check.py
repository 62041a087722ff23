"""Whether packing changes what a model trains: one micro-batch against its documents one at a time.

The documents alone go through the model's own attention (``sdpa``) where it otherwise attends with ours, so that the
check also finds what our attention would leave out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.checks import TOLERANCE, PackingCheck, check_packing, packing_tolerance
from wlb.integrations.huggingface.attention import attend_with, check_rotary, is_packed_attention
from wlb.integrations.packed import extents_of
from wlb.training.data.batch import IGNORE_LABEL

_DOCUMENTS = 4  # of the micro-batch that a Trainer checks
_STEPS = 8  # among whose micro-batches one of several documents is looked for
_TOKENS = 8192  # over which a document is not among them, if there are others: sdpa masks windows with a square matrix
_SCALE = 1024.0  # of the loss under float16, so that its gradients do not underflow


def check_batch(model: nn.Module, batch: Mapping[str, Any]) -> PackingCheck:
    """``check_packing`` of one collated micro-batch of a model that is not wrapped yet (by DDP, FSDP, ...).

    Dropout is off meanwhile. Raises ``UserError`` where packing the micro-batch changes loss or gradients.
    """

    def loss_of(inputs: Mapping[str, Any]) -> Tensor:
        loss: Tensor = model(**{**inputs, "num_items_in_batch": 1}).loss  # the sum over labelled tokens
        return loss

    check_rotary(getattr(model, "config", None), batch["cu_seq_lens_q"].diff().tolist())
    with _undisturbed(model):
        singles = _by_own_attention(model, (partial(loss_of, one) for one in _singles(batch)))
        return check_packing(model, partial(loss_of, batch), singles)


def check_trainer(
    trainer: Any,
    sampler: PlannedBatchSampler,
    collated: Callable[[Sequence[int]], Mapping[str, Any]],
    share: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None,
) -> PackingCheck | None:
    """``check_packing`` of a few documents of the first planned micro-batch that has several, in a Trainer's own terms.

    The model is the wrapped one, the loss the Trainer's. All processes train the same documents, so that they call the
    same collectives and refuse together; with ``share`` each its share of them, and then all of each document alone.
    All tokens are learnt, as a mask could hide what documents see. None, with a warning, where a backward pass is more
    than that: under DeepSpeed, and with an optimizer that steps in it.
    """
    wrapped = trainer.model_wrapped
    model = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
    if getattr(trainer, "is_deepspeed_enabled", False) or _steps_in_backward(model):
        warnings.warn(
            "balanced: the check of packing does not run under DeepSpeed, nor with an optimizer that steps in the "
            "backward pass; run check_batch",
            stacklevel=2,
        )
        return None
    documents = _checked_documents(sampler)

    def loss_of(inputs: Mapping[str, Any], weight: float = 1.0) -> Tensor:
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(wrapped, trainer._prepare_inputs(inputs), num_items_in_batch=count)
        return loss * (weight * scale)

    scale = _SCALE if trainer.accelerator.mixed_precision == "fp16" else 1.0
    whole = 1 / sampler.job.layout.cp  # each document alone is trained by all ranks that share the packed ones
    alone = (partial(loss_of, _learning_all(collated([document])), whole) for document in documents)
    with _undisturbed(model):
        packed: Mapping[str, Any] = _learning_all(collated(documents))
        packed = packed if share is None else share(packed)
        _, count = trainer.get_batch_samples(iter([packed]), 1, trainer.args.device)
        trainer.current_gradient_accumulation_steps = 1  # some losses look; the Trainer sets it in every step
        singles = _by_own_attention(model, alone)
        tolerance = _tolerance(trainer, model)
        check = check_packing(wrapped, partial(loss_of, packed), singles, tolerance=tolerance, sharded=True)
    if hasattr(trainer, "_metrics"):
        trainer._metrics["eval"].clear()  # TRL's, of a model that is not in training mode
    return check


def _checked_documents(sampler: PlannedBatchSampler) -> list[int]:
    """Of the first micro-batch that has several, if one of a few steps has: its longest document and shortest ones."""
    micro_batches = [batch for plan in islice(sampler.steps(), _STEPS) for rank in plan.ranks for batch in rank]
    chosen = next((batch for batch in micro_batches if len(batch.segments) > 1), micro_batches[0])
    by_length = sorted(chosen.segments, key=lambda segment: segment.length)
    short = [segment for segment in by_length if segment.length <= _TOKENS]
    candidates = short if len(short) > 1 else by_length
    taken = [candidates[-1], *candidates[: min(_DOCUMENTS, len(candidates)) - 1]]
    return [segment.document % len(sampler.lengths) for segment in taken]


def _learning_all(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """``batch`` with every token for a label but the first of each document."""
    if "position_ids" not in batch:
        return batch
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["position_ids"] == 0, IGNORE_LABEL)}


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
    """Without dropout, and with modes, buffers, attention and random numbers as before afterwards.

    Checkpointing stays on: it works in training mode only, so such modules keep that mode, and have no dropout.
    """
    modes = [(module, module.training) for module in model.modules()]
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    model.eval()
    checkpointing = [module for module, _ in modes if getattr(module, "gradient_checkpointing", False)]
    dropouts: list[tuple[nn.Module, str, float]] = []
    for module in checkpointing:
        module.training = True
        named = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        dropouts += [(module, name, getattr(module, name)) for name in named]
    for module, name, _ in dropouts:
        setattr(module, name, 0.0)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, name, probability in dropouts:
            setattr(module, name, probability)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        if attention is not None and attention != model.config._attn_implementation:  # type: ignore[union-attr]
            attend_with(model, attention)


def _by_own_attention(model: Any, losses: Iterable[Callable[[], Tensor]]) -> Iterator[Callable[[], Tensor]]:
    """``losses``, while ``model`` attends as it would without us."""
    ours = is_packed_attention(model)
    name: Any = model.config._attn_implementation if ours else None
    if ours:
        attend_with(model, "sdpa" if model._supports_sdpa else "eager")
    yield from losses
    if ours:
        attend_with(model, name)


def _singles(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The documents of ``batch``, each as a micro-batch of its own."""
    for start, stop in pairwise(batch["cu_seq_lens_q"].tolist()):
        own = {name: batch[name][:, start:stop] for name in ("input_ids", "position_ids", "labels")}
        yield own | extents_of([stop - start], batch["input_ids"].device)
