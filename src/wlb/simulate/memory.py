"""Whether a simulated job fits its GPUs, by the memory model of ``wlb.workload.memory``."""

from __future__ import annotations

from dataclasses import replace

from wlb.config import ParallelConfig
from wlb.errors import UserError
from wlb.schedules.operations import ZERO_BUBBLE
from wlb.sharding.hybrid import MEMORY_FACTOR
from wlb.simulate.job import SimulatedJob
from wlb.workload.layer_memory import MemorySettings
from wlb.workload.layer_split import split_layers
from wlb.workload.memory import MemoryEstimate, gib, largest_length_factor, predict_even_step

USABLE_SHARE = 0.9  # of a GPU; the rest is for what is not predicted, as when training


def usable_bytes(job: SimulatedJob) -> float:
    """What one process of the job may hold."""
    return USABLE_SHARE * job.hardware.memory_bytes


def predicted_memory(job: SimulatedJob) -> MemoryEstimate:
    """The most that a process holds in the worst step: every micro-batch as long as L_max."""
    return predict_even_step(memory_settings(job), longest_micro_batch(job))


def longest_micro_batch(job: SimulatedJob) -> int:
    """Most tokens of a micro-batch: L_max, or the window where all have its length."""
    if not job.packing.has_length_factor:
        return job.context_window
    return int(float(job.packing.max_length_factor) * job.context_window)


def with_length_factor(job: SimulatedJob) -> SimulatedJob:
    """``job`` with ``packing.max_length_factor = "auto"`` replaced by the most that its GPUs hold.

    Raises ``UserError`` where they do not hold one window.
    """
    if not job.packing.has_length_factor or job.packing.max_length_factor != "auto":
        return job
    factor = largest_length_factor(memory_settings(job), job.context_window, usable_bytes(job))
    if factor is None:
        smallest = replace(job, packing=job.packing.model_copy(update={"max_length_factor": 1.0}))
        raise UserError(
            f"micro-batches of {job.context_window} tokens need {gib(predicted_memory(smallest).total)} GiB a GPU, "
            f"over the usable {gib(usable_bytes(job))}; raise parallel.cp, tp, pp or dp, or lower data.context_window"
        )
    return replace(job, packing=job.packing.model_copy(update={"max_length_factor": factor}))


def memory_settings(job: SimulatedJob) -> MemorySettings:
    """What the memory model asks about a job. Zero-bubble schedules count as 1F1B of as many stages, which is less."""
    schedule = "interleaved_1f1b" if job.virtual_pp > 1 else "1f1b" if job.schedule in ZERO_BUBBLE else job.schedule
    return MemorySettings(
        shape=job.shape,
        stage_blocks=tuple(len(layers) for layers in split_layers(job.shape, job.stages)),
        parallel=ParallelConfig.model_validate(
            {name: getattr(job, name) for name in ("dp", "pp", "cp", "tp", "virtual_pp")} | {"schedule": schedule}
        ),
        micro_batches=job.micro_batches_per_rank,
        compute_bytes=job.hardware.bytes_per_value,
        activation_checkpointing=job.activation_checkpointing,
        fused_norms=True,
        uneven_shards=MEMORY_FACTOR if job.sharding.strategy == "hybrid" and job.cp > 1 else 1.0,
    )
