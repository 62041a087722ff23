"""What a job holds in memory, asked in the same way whether it is trained or simulated.

The estimate itself is ``wlb.memory.step``; here is what it needs to know of a job, and how long the micro-batches
of the worst step are.
"""

from __future__ import annotations

from typing import Protocol

from wlb.config import CheckpointConfig, DataConfig, PackingConfig, ParallelConfig, ShardingConfig, TrainingConfig
from wlb.memory.layers import Checkpointing, MemorySettings
from wlb.schedules.layer_split import split_layers
from wlb.sharding.hybrid import MEMORY_FACTOR
from wlb.workload.shapes import ModelShape

# Of a device or machine; the rest is for what is not predicted: the driver, libraries, fragments, other processes.
USABLE_SHARE = 0.9

_FAST_TYPE = {"cpu": "float32", "cuda": "bfloat16"}
_TYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


class PackedJob(Protocol):
    """A configuration, or a simulated job."""

    @property
    def data(self) -> DataConfig: ...

    @property
    def packing(self) -> PackingConfig: ...


def longest_micro_batch(job: PackedJob) -> int:
    """Most tokens of a micro-batch, once the factor is decided: L_max, or the window where all have its length."""
    return job.packing.options.most_tokens(job.data.context_window, job.packing.micro_batches)


def compute_type(training: TrainingConfig, device_type: str) -> str:
    """The type of forward and backward passes: ``training.dtype``, where "auto" is the one this device is fast in."""
    return _FAST_TYPE[device_type] if training.dtype == "auto" else training.dtype


def compute_bytes(training: TrainingConfig, device_type: str) -> int:
    """Bytes of a value in that type."""
    return _TYPE_BYTES[compute_type(training, device_type)]


def holds_checkpoint_copy(checkpoint: CheckpointConfig, device_type: str) -> bool:
    """Whether a checkpoint is copied within the memory that limits the job; those of a GPU are copied to the host."""
    return device_type == "cpu" and checkpoint.dir is not None and checkpoint.asynchronous


def job_memory_settings(
    shape: ModelShape,
    parallel: ParallelConfig,
    packing: PackingConfig,
    sharding: ShardingConfig,
    *,
    device_type: str,
    compute_bytes: int,
    activation_checkpointing: Checkpointing,
    tied_embeddings: bool,
    checkpoint_copy: bool,
) -> MemorySettings:
    """What the memory model asks about a job on "cuda" or "cpu" devices."""
    return MemorySettings(
        shape=shape,
        stage_blocks=tuple(len(layers) for layers in split_layers(shape, parallel.stages)),
        parallel=parallel,
        micro_batches=packing.micro_batches // parallel.dp,
        compute_bytes=compute_bytes,
        activation_checkpointing=activation_checkpointing,
        fused_norms=device_type == "cuda",
        tied_embeddings=tied_embeddings,
        uneven_shards=MEMORY_FACTOR if sharding.strategy == "hybrid" and parallel.cp > 1 else 1.0,
        checkpoint_copy=checkpoint_copy,
    )
