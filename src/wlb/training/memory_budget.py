"""What the machine lets a process of a job hold, and that all ranks decided on the same job."""

from __future__ import annotations

import torch

from wlb.job.config import TrainingConfig
from wlb.job.job import JobSpec
from wlb.job.memory.step import USABLE_SHARE, MemoryLimit, limit_of_gpu
from wlb.os_limits import usable_memory
from wlb.training.runtime.collectives import gathered
from wlb.training.runtime.failures import TrainingError


def memory_limit(training: TrainingConfig, device_type: str, local_processes: int) -> MemoryLimit:
    """What one of ``local_processes`` on this machine may hold; a number that does not change from start to start."""
    if training.memory_gib is not None:
        return MemoryLimit(training.memory_gib * 2**30, "training.memory_gib")
    if device_type == "cuda":
        return limit_of_gpu(min(torch.cuda.get_device_properties(i).total_memory for i in range(local_processes)))
    share = usable_memory() / local_processes
    return MemoryLimit(USABLE_SHARE * share, f"{USABLE_SHARE:.0%} of this machine's memory by {local_processes}")


def least_limit(training: TrainingConfig, device_type: str, local_processes: int) -> MemoryLimit:
    """The least ``memory_limit`` of any rank, by which all decide alike; called on every rank."""
    limits = gathered(memory_limit(training, device_type, local_processes))
    return min(limits, key=lambda limit: limit.number_of_bytes)


def check_agreed(job: JobSpec) -> None:
    """Raise ``TrainingError`` where ranks decided on different jobs; called on every rank."""
    if len(set(gathered(f"{job.layout} {job.packing.in_use()}"))) > 1:
        raise TrainingError(
            "ranks decided on different jobs; the token store and the version of wlb-llm must be the same on all "
            "machines, or give packing.max_length_factor, or parallel.pool and packing.pool_micro_batches"
        )
