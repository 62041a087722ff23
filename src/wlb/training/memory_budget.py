"""What the machine lets a job hold, compared with what it will hold before it starts.

A job that does not fit is refused, with what it needs and what would help; with ``packing.max_length_factor = "auto"``
L_max becomes the largest that fits.
"""

from __future__ import annotations

from typing import Any

import torch

from wlb.config import JobConfig
from wlb.errors import UserError
from wlb.os_limits import usable_memory
from wlb.planning.job import JobSpec
from wlb.planning.memory import USABLE_SHARE, MemoryLimit, largest_factor, limit_of_gpu, too_large
from wlb.training.runtime.collectives import gathered
from wlb.training.runtime.failures import TrainingError

FACTOR = "packing.max_length_factor"


def within_memory(
    config: JobConfig, job: JobSpec, local_processes: int, saved_identity: dict[str, Any] | None = None
) -> JobConfig:
    """``config`` of ``job`` with ``packing.max_length_factor`` decided, and known to fit in memory.

    A job that continues keeps the L_max it was started with (``saved_identity`` of its checkpoint), where documents
    that wait in the packer were measured by it. Raises ``UserError`` where the job does not fit.
    """
    limit = memory_limit(config, job.hardware.device_type, local_processes)
    if job.packing.length_factor == "auto":
        measured = "max_length_factor" in job.packing.options.identity(job.context_window)
        saved = (saved_identity or {}).get(FACTOR) if measured else None
        decided = float(saved) if saved is not None else largest_factor(job, limit)
        job = job.with_length_factor(decided or job.least_length_factor)
    if problem := too_large(job, limit, resumes=saved_identity is not None):
        raise UserError(problem)
    return config.model_copy(update={"packing": job.packing})


def with_agreed_factor(config: JobConfig) -> JobConfig:
    """``config`` with the smallest ``packing.max_length_factor`` that any rank decided on; called on every rank.

    Machines may differ in memory, and ranks must plan alike. Raises ``TrainingError`` where they differ in pools.
    """
    grouping = config.packing.in_use().get("grouping")
    sizes = (config.parallel.dp, config.parallel.cp, config.packing.micro_batches, grouping)
    if len(set(gathered(sizes))) > 1:
        raise TrainingError(
            "ranks decided on different pools; the token store, the memory and the version of wlb-llm must be the same "
            "on all machines, or give training.memory_gib, or parallel.pool and packing.pool_micro_batches"
        )
    packing = config.packing.with_length_factor(min(gathered(float(config.packing.length_factor))))
    return config.model_copy(update={"packing": packing})


def memory_limit(config: JobConfig, device_type: str, local_processes: int) -> MemoryLimit:
    """What one of ``local_processes`` on this machine may hold; a number that does not change from start to start."""
    if config.training.memory_gib is not None:
        return MemoryLimit(config.training.memory_gib * 2**30, "training.memory_gib")
    if device_type == "cuda":
        return limit_of_gpu(min(torch.cuda.get_device_properties(i).total_memory for i in range(local_processes)))
    share = usable_memory() / local_processes
    return MemoryLimit(USABLE_SHARE * share, f"{USABLE_SHARE:.0%} of this machine's memory by {local_processes}")
