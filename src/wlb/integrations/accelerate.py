"""Planned steps for a loop with Accelerate, each an iterable of its batches; see ``examples/with_accelerate.py``."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from wlb.errors import UserError
from wlb.integrations.packed import PackedBatch, PackedSteps
from wlb.runtime.own_lists import fsdp_units, in_turn, warn_of_memory
from wlb.runtime.steps import RankStep


class BalancedSteps(PackedSteps):
    """``packed_batches`` for an ``Accelerator`` and the model that it prepared for DDP or FSDP2.

    A step is an iterable of its batches, and averages gradients over processes at its end. Raises ``UserError`` for
    another wrapper (such as DeepSpeed), for Accelerate's own tensor or context parallelism, gradient accumulation and
    ``accumulate``, for a scheduler that steps once for each process, and after a step that was left early. With several
    processes it also raises for a batch without a backward.
    """

    def __init__(self, accelerator: Any, prepared: nn.Module, documents: Any, /, **settings: Any) -> None:
        wrapped, kind = isinstance(prepared, DistributedDataParallel) or fsdp_units(prepared), type(prepared).__name__
        if not wrapped and (accelerator.num_processes > 1 or kind == "DeepSpeedEngine"):
            raise UserError(f"the model is a {kind}; give the model that accelerator.prepare returns for DDP or FSDP2")
        if (sizes := getattr(accelerator, "parallelism_config", None)) and sizes.non_data_parallel_size > 1:
            inside = "parallelism_config has tp, cp or sp over 1"
            raise UserError(f"{inside}; leave them out, and give balanced_steps(cp=...)")
        self._accelerator, self._prepared = accelerator, prepared
        self._is_whole, self._ran_backward = True, False  # of the current step and its last batch
        super().__init__(documents, **{"device": accelerator.device, **settings})
        if self.job.levels_steps:
            warn_of_memory(prepared)

    def __next__(self) -> "BalancedStep":
        return BalancedStep(**vars(super().__next__()), _in_turn=self._in_turn)

    def state_dict(self, step: RankStep[PackedBatch] | None = None) -> dict[str, Any]:
        self._check_whole()
        return super().state_dict(step)

    def load_state_dict(self, state: Mapping[str, Any], *, inside_step: bool = False) -> None:
        super().load_state_dict(state, inside_step=inside_step)
        self._is_whole = True

    def _in_turn(self, batches: tuple[PackedBatch, ...]) -> Iterator[PackedBatch]:
        self._check_whole()
        processes, accumulated, calibration = self._accelerator.num_processes, self._accelerator.step, self.calibration
        for scheduler in getattr(self._accelerator, "_schedulers", ()) if processes > 1 else ():
            if getattr(scheduler, "step_with_optimizer", False) and not scheduler.split_batches:
                often = f"a scheduler that Accelerate prepared steps {processes} times a step, once for each process"
                raise UserError(f"{often}; leave it out of accelerator.prepare, and count steps of the optimizer")
        turns = in_turn(self._prepared, batches, keep_weights=self.job.levels_steps, calibration=calibration)
        watched = self._prepared.register_forward_hook(self._watch)
        self._is_whole = False
        try:
            for batch in turns:
                if self._accelerator.step != accumulated:
                    raise UserError("accelerator.accumulate steps after every batch; call optimizer.step once a step")
                self._ran_backward = processes == 1
                yield batch
                if not self._ran_backward:  # gradients would be reduced too often, too early or never, or deadlock
                    raise UserError("the previous batch had no backward yet; loop over step, and not over list(step)")
            self._is_whole = True
        finally:
            turns.close()
            watched.remove()
        if calibration is not None:
            calibration.end_step()

    def _check_whole(self) -> None:
        if not self._is_whole:
            early = "a step was left before its end, so its gradients were not reduced"
            raise UserError(f"{early}; loop over all of it, or load a state to go on from that")

    def _watch(self, model: nn.Module, arguments: Any, output: Any) -> None:
        scores = [part for part in tree_leaves(output) if isinstance(part, Tensor) and part.requires_grad]
        for part in scores:
            part.register_hook(lambda _: setattr(self, "_ran_backward", True))
        self._ran_backward |= not scores and torch.is_grad_enabled()  # an output that we cannot watch


@dataclass(frozen=True)
class BalancedStep(RankStep[PackedBatch]):
    """A step whose loops run all its batches, and reduce gradients at the end."""

    _in_turn: Callable[[tuple[PackedBatch, ...]], Iterator[PackedBatch]] = field(kw_only=True, repr=False)

    def __iter__(self) -> Iterator[PackedBatch]:
        return self._in_turn(self.batches)


balanced_steps = BalancedSteps
