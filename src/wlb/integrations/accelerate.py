"""Accelerate: planned steps for a loop with ``accelerator.backward``.

model, optimizer = accelerator.prepare(model, optimizer)
for step in balanced_steps(accelerator, documents, context_window=8192, micro_batches=4, model="7b"):
    for batch in step:
        accelerator.backward(batch.loss(model(**batch).logits))
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from wlb.errors import UserError
from wlb.integrations.packed import PackedBatch, PackedStep, PackedSteps
from wlb.runtime.own_lists import in_turn


class BalancedSteps(Iterator[Iterator[PackedBatch]]):
    """What ``balanced_steps`` returns; ``accelerator.register_for_checkpointing`` takes it."""

    def __init__(self, accelerator: Any, documents: Any, **settings: Any) -> None:
        kind = str(accelerator.distributed_type).rpartition(".")[2]
        sizes = getattr(accelerator, "parallelism_config", None)
        if kind not in ("NO", "FSDP") and not kind.startswith("MULTI_"):
            raise UserError(f"under {kind} Accelerate does not leave steps to the loop; use DDP or FSDP2")
        if sizes is not None and sizes.non_data_parallel_size > 1:
            raise UserError("parallelism_config shares documents among processes; leave tp, cp and sp out, and give cp")
        self._accelerator, self._steps = accelerator, PackedSteps(documents, **settings)
        self.state_dict, self.load_state_dict = self._steps.state_dict, self._steps.load_state_dict

    def __next__(self) -> Iterator[PackedBatch]:
        models = nn.ModuleList(self._accelerator._models)
        if not len(models):
            raise UserError("Accelerate has prepared no model, so gradients would not be averaged; prepare it first")
        return self._in_turn(models, next(self._steps).to(self._accelerator.device))

    def _in_turn(self, models: nn.Module, step: PackedStep) -> Iterator[PackedBatch]:
        accumulated = self._accelerator.step
        for batch in in_turn(models, step.batches, keep_weights=self._steps.job.levels_steps):
            if self._accelerator.step != accumulated:
                raise UserError("accelerator.accumulate steps after every batch; leave it out, and step once a step")
            yield batch


def balanced_steps(accelerator: Any, documents: Any, **settings: Any) -> BalancedSteps:
    """Optimizer steps over ``documents`` on the processes of an ``Accelerator``, each an iterator over its batches.

    ``settings`` are those of ``packed_batches``, own lists included. Gradients are averaged over processes with the
    last batch of a step only. ``state_dict`` and ``load_state_dict`` are those of the steps.

    Raises ``UserError`` for DeepSpeed, Megatron-LM and XLA, Accelerate's own tensor and context parallelism, gradient
    accumulation of the ``Accelerator``, ``accumulate``, and a model that is not prepared.
    """
    return BalancedSteps(accelerator, documents, **settings)
