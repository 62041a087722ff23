"""Planned steps for a loop with Accelerate, each an iterator over its batches; see ``examples/with_accelerate.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from wlb.errors import UserError
from wlb.integrations.packed import PackedBatch, PackedSteps
from wlb.runtime.own_lists import fsdp_units, in_turn, warn_of_memory


class BalancedSteps(PackedSteps):
    """``packed_batches`` for an ``Accelerator`` and the model that it prepared for DDP or FSDP2.

    Gradients are averaged over processes in the backward of the last batch of a step. Raises ``UserError`` for another
    wrapper (such as DeepSpeed), for Accelerate's own tensor or context parallelism, gradient accumulation and
    ``accumulate``. With several processes it also raises for a batch taken before the backward of the previous one.
    """

    def __init__(self, accelerator: Any, prepared: nn.Module, documents: Any, /, **settings: Any) -> None:
        wrapped, kind = isinstance(prepared, DistributedDataParallel) or fsdp_units(prepared), type(prepared).__name__
        if not wrapped and (accelerator.num_processes > 1 or kind == "DeepSpeedEngine"):
            raise UserError(f"the model is a {kind}; give the model that accelerator.prepare returns for DDP or FSDP2")
        if (sizes := getattr(accelerator, "parallelism_config", None)) and sizes.non_data_parallel_size > 1:
            raise UserError(
                "parallelism_config has tp, cp or sp over 1; leave them out, and give balanced_steps(cp=...)"
            )
        self._accelerator, self._prepared = accelerator, prepared
        super().__init__(documents, **{"device": accelerator.device, **settings})
        if self.job.levels_steps:
            warn_of_memory(prepared)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self._in_turn(super().__next__().batches)

    def _in_turn(self, batches: tuple[PackedBatch, ...]) -> Iterator[PackedBatch]:
        accumulated, levels, calibration = self._accelerator.step, self.job.levels_steps, self.calibration
        watched, self._ran_backward = self._prepared.register_forward_hook(self._watch), True
        try:
            for batch in in_turn(self._prepared, batches, keep_weights=levels, calibration=calibration):
                if self._accelerator.step != accumulated:
                    raise UserError("accelerator.accumulate steps after every batch; call optimizer.step once a step")
                if not self._ran_backward:  # gradients would be reduced too often or too early, or deadlock
                    raise UserError("the previous batch had no backward yet; loop over step, and not over list(step)")
                self._ran_backward = self._accelerator.num_processes == 1
                yield batch
        finally:
            watched.remove()
        if calibration is not None:
            calibration.end_step()

    def _watch(self, model: nn.Module, arguments: Any, output: Any) -> None:
        scores = [part for part in tree_leaves(output) if isinstance(part, Tensor) and part.requires_grad]
        for part in scores:
            part.register_hook(lambda _: setattr(self, "_ran_backward", True))
        self._ran_backward |= not scores  # without a gradient we cannot tell


balanced_steps = BalancedSteps
