"""What a job may hold and what it will hold, compared before it starts.

The prediction (``wlb.memory.step``) is for the worst step that packing may produce: every micro-batch as long as
L_max. A job that does not fit is refused, with what it needs and what would help; with
``packing.max_length_factor = "auto"`` L_max becomes the largest that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from wlb.config import JobConfig
from wlb.errors import UserError
from wlb.memory.layers import MemorySettings
from wlb.memory.step import gib, largest_length_factor, predict_even_step
from wlb.models.transformer import TransformerConfig
from wlb.os_limits import usable_memory
from wlb.planning.memory import (
    USABLE_SHARE,
    compute_bytes,
    holds_checkpoint_copy,
    job_memory_settings,
    longest_micro_batch,
)
from wlb.training.runtime.collectives import gathered

FACTOR = "packing.max_length_factor"


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that a process may hold, and where that comes from."""

    number_of_bytes: float
    origin: str


def within_memory(
    config: JobConfig,
    model: TransformerConfig,
    device_type: str,
    local_processes: int,
    saved_identity: dict[str, Any] | None = None,
) -> JobConfig:
    """``config`` with ``packing.max_length_factor`` decided, and known to fit in memory.

    A job that continues keeps the L_max it was started with (``saved_identity`` of its checkpoint), as documents that
    wait in the packer were measured by it. Raises ``UserError`` where the job does not fit.
    """
    settings = memory_settings(config, model, device_type)
    limit = memory_limit(config, device_type, local_processes)
    window = config.data.context_window
    factor = config.packing.length_factor
    if factor == "auto":
        saved = (saved_identity or {}).get(FACTOR)
        largest = largest_length_factor(settings, window, limit.number_of_bytes)
        factor = float(saved) if saved is not None else largest or 1.0
        config = _with_factor(config, factor)
    _check(settings, longest_micro_batch(config), limit, resumes=saved_identity is not None)
    return config


def with_agreed_factor(config: JobConfig) -> JobConfig:
    """``config`` with the smallest ``packing.max_length_factor`` that any rank decided on; called on every rank.

    Machines may differ in memory, and ranks must plan alike.
    """
    return _with_factor(config, min(gathered(float(config.packing.length_factor))))


def _with_factor(config: JobConfig, factor: float) -> JobConfig:
    packing = config.packing.with_length_factor(factor)
    return config.model_copy(update={"packing": packing})


def memory_settings(config: JobConfig, model: TransformerConfig, device_type: str) -> MemorySettings:
    """What the memory model asks about a job."""
    return job_memory_settings(
        model.shape,
        config.parallel,
        config.packing,
        config.sharding,
        device_type=device_type,
        compute_bytes=compute_bytes(config.training, device_type),
        activation_checkpointing=config.training.activation_checkpointing,
        tied_embeddings=model.tied_embeddings,
        checkpoint_copy=holds_checkpoint_copy(config.checkpoint, device_type),
    )


def memory_limit(config: JobConfig, device_type: str, local_processes: int) -> MemoryLimit:
    """What one of ``local_processes`` on this machine may hold; a number that does not change from start to start."""
    if config.training.memory_gib is not None:
        return MemoryLimit(config.training.memory_gib * 2**30, "training.memory_gib")
    if device_type == "cuda":
        smallest = min(torch.cuda.get_device_properties(index).total_memory for index in range(local_processes))
        return MemoryLimit(USABLE_SHARE * smallest, f"{USABLE_SHARE:.0%} of a GPU")
    share = usable_memory() / local_processes
    return MemoryLimit(USABLE_SHARE * share, f"{USABLE_SHARE:.0%} of this machine's memory by {local_processes}")


def _check(settings: MemorySettings, tokens: int, limit: MemoryLimit, *, resumes: bool) -> None:
    estimate = predict_even_step(settings, tokens)
    if estimate.total <= limit.number_of_bytes:
        return
    remedies = []
    if settings.activation_checkpointing != "full":
        smaller = predict_even_step(replace(settings, activation_checkpointing="full"), tokens).total
        if smaller <= limit.number_of_bytes:
            remedies.append(f'set training.activation_checkpointing = "full" ({gib(smaller)} GiB)')
    on_purpose = " (with checkpoint.allow_changed_data = true)" if resumes else ""
    remedies.append(f"lower {FACTOR} or data.context_window{on_purpose}, raise parallel.cp, tp, pp or dp")
    raise UserError(
        f"with micro-batches of {tokens} tokens a process needs up to {estimate}, over the "
        f"{gib(limit.number_of_bytes)} GiB of {limit.origin}; {', or '.join(remedies)}"
    )
