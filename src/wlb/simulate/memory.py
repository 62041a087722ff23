"""Whether a simulated job fits its GPUs, by the estimate that the trainer starts it by (``wlb.planning.memory``)."""

from __future__ import annotations

from dataclasses import replace

from wlb.config import ParallelConfig
from wlb.errors import UserError
from wlb.planning.memory import USABLE_SHARE, job_memory_settings, longest_micro_batch
from wlb.schedules.operations import ZERO_BUBBLE
from wlb.simulate.job import SimulatedJob
from wlb.workload.layer_memory import MemorySettings
from wlb.workload.memory import MemoryEstimate, gib, largest_length_factor, predict_even_step


def usable_bytes(job: SimulatedJob) -> float:
    """What one process of the job may hold."""
    return USABLE_SHARE * job.hardware.memory_bytes


def predicted_memory(job: SimulatedJob) -> MemoryEstimate:
    """The most that a process holds in the worst step: every micro-batch as long as L_max."""
    return predict_even_step(memory_settings(job), longest_micro_batch(job))


def with_length_factor(job: SimulatedJob) -> SimulatedJob:
    """``job`` with ``packing.max_length_factor = "auto"`` replaced by the most that its GPUs hold.

    Raises ``UserError`` where they do not hold one window.
    """
    if not job.packing.has_length_factor or job.packing.length_factor != "auto":
        return job
    factor = largest_length_factor(memory_settings(job), job.context_window, usable_bytes(job))
    if factor is None:
        smallest = replace(job, packing=job.packing.with_length_factor(1.0))
        raise UserError(
            f"micro-batches of {job.context_window} tokens need {gib(predicted_memory(smallest).total)} GiB a GPU, "
            f"over the usable {gib(usable_bytes(job))}; raise parallel.cp, tp, pp or dp, or lower data.context_window"
        )
    return replace(job, packing=job.packing.with_length_factor(factor))


def memory_settings(job: SimulatedJob) -> MemorySettings:
    """What the memory model asks about a job. Zero-bubble schedules count as 1F1B of as many stages, which is less."""
    schedule = "interleaved_1f1b" if job.virtual_pp > 1 else "1f1b" if job.schedule in ZERO_BUBBLE else job.schedule
    parallel = ParallelConfig.model_validate(
        {name: getattr(job, name) for name in ("dp", "pp", "cp", "tp", "virtual_pp")} | {"schedule": schedule}
    )
    return job_memory_settings(
        job.shape,
        parallel,
        job.packing,
        job.sharding,
        device_type=job.hardware.device_type,
        compute_bytes=job.compute_bytes or job.hardware.bytes_per_value,
        activation_checkpointing=job.activation_checkpointing,
        tied_embeddings=job.tied_embeddings,
        checkpoint_copy=job.checkpoint_copy,
    )
