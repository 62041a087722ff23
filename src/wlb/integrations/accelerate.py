"""Planned steps for a loop with Accelerate, each an iterator over its batches; see ``examples/with_accelerate.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from wlb.errors import UserError
from wlb.integrations.packed import PackedBatch, PackedSteps
from wlb.runtime.own_lists import in_turn


class BalancedSteps(PackedSteps):
    """``packed_batches`` for an ``Accelerator``, which averages gradients with the last batch of a step.

    Raises ``UserError`` for DeepSpeed, Megatron-LM and XLA, Accelerate's own tensor or context parallelism, gradient
    accumulation and ``accumulate``, and where no model is prepared.
    """

    def __init__(self, accelerator: Any, documents: Any, **settings: Any) -> None:
        kind = str(accelerator.distributed_type).rpartition(".")[2]
        if kind not in ("NO", "FSDP") and not kind.startswith("MULTI_"):
            raise UserError(f"under {kind} Accelerate does not leave steps to the loop; use DDP or FSDP2")
        if (sizes := accelerator.parallelism_config) is not None and sizes.non_data_parallel_size > 1:
            raise UserError("parallelism_config shares documents among processes; leave tp, cp and sp out, and give cp")
        self._accelerator = accelerator
        super().__init__(documents, **settings)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if not self._accelerator._models:
            raise UserError("Accelerate has prepared no model, so gradients would not be averaged; prepare it first")
        return self._in_turn(super().__next__().to(self._accelerator.device).batches)

    def _in_turn(self, batches: tuple[PackedBatch, ...]) -> Iterator[PackedBatch]:
        accumulated, models = self._accelerator.step, nn.ModuleList(self._accelerator._models)
        for batch in in_turn(models, batches, keep_weights=self.job.levels_steps):
            if self._accelerator.step != accumulated:
                raise UserError("accelerator.accumulate steps after every batch; leave it out, and step once a step")
            yield batch


balanced_steps = BalancedSteps
