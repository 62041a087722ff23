"""Bytes that one rank of a job receives from others in a step, by what they are for.

These are the sizes that ``wlb.simulate.costs`` and ``wlb.simulate.fsdp`` price with links: counted here exactly, for a
rank and the tokens that it holds, so that they can be held against the calls that a rank makes
(``wlb.training.dry_run``). What is not priced, as it is small, is not predicted: what ranks agree on in every step, the
loss over a split vocabulary, and gradients of weights that tensor-parallel ranks do not split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.job.job import Job
from wlb.models.transformer import TransformerConfig
from wlb.schedules.layer_split import split_layers

WEIGHTS = "gathering weights"
GRADIENTS = "reducing gradients"
TENSOR_PARALLEL = "tensor-parallel activations"
KEYS_AND_VALUES = "keys and values"
STAGES = "activations of stages"
LOSS = "loss and norms over tensor-parallel ranks"
AGREEMENT = "agreement of ranks"
PURPOSES = (WEIGHTS, GRADIENTS, TENSOR_PARALLEL, KEYS_AND_VALUES, STAGES, LOSS, AGREEMENT)
_MASTER_BYTES = 4
_COLLECTIVES = 2 * 2  # of a block's forward, and again of its backward: gather and reduce around each half
_COMPUTED_AGAIN = 3  # computing a block again ends before the last of them

_Matrix = tuple[int, int]  # rows, which FSDP divides, and columns


def received_bytes(
    job: Job,
    model: TransformerConfig,
    pipeline_rank: int,
    rows: Sequence[int],
    keys: NDArray[np.int64],
) -> dict[str, int]:
    """Bytes by purpose that a rank of ``job`` receives in a step; purposes without a price are left out.

    ``rows`` are the tokens that the rank holds of each micro-batch, padding included. ``keys`` are, for each
    micro-batch, the tokens whose keys it receives in the forward, receives again in the backward, and sends, whose
    gradients come back; shape (micro-batches, 3).
    """
    stages = job.layout.rank_stages[pipeline_rank]
    blocks = sum(len(split_layers(job.shape, job.layout.stages)[stage]) for stage in stages)
    units = [unit for stage in stages for unit in _units(job, model, stage)]
    tokens = sum(rows)
    width = job.shape.hidden * job.hardware.bytes_per_value
    key_bytes = 2 * job.shape.kv_heads * job.shape.head_dim // job.layout.tp * job.hardware.bytes_per_value
    return {
        WEIGHTS: _weight_passes(job) * sum(_over_shards(unit, job, job.hardware.bytes_per_value) for unit in units),
        GRADIENTS: sum(_over_shards(unit, job, max(_MASTER_BYTES, job.hardware.bytes_per_value)) for unit in units),
        TENSOR_PARALLEL: _collectives(job, stages, blocks) * tokens * width * (job.layout.tp - 1) // job.layout.tp,
        KEYS_AND_VALUES: blocks * int(keys.sum()) * key_bytes,
        STAGES: _messages(job, stages) * tokens // job.layout.tp * width,
    }


def _weight_passes(job: Job) -> int:
    """How often weights are gathered: once, or in the first forward and in every backward."""
    return 1 if job.layout.pp > 1 or job.levels_steps else 1 + job.micro_batches_per_rank


def _collectives(job: Job, stages: Sequence[int], blocks: int) -> int:
    """Over tensor-parallel ranks, of each micro-batch: forward, backward, and forward again to save memory."""
    again = 0 if job.activation_checkpointing == "none" else _COMPUTED_AGAIN
    ends = (0 in stages) + (job.layout.stages - 1 in stages)  # embedding and head: one forward, one backward each
    return blocks * (2 * _COLLECTIVES + again) + 2 * ends


def _messages(job: Job, stages: Sequence[int]) -> int:
    """Received from other pipeline ranks, of each micro-batch: activations and gradients."""
    if job.layout.pp == 1:
        return 0
    return sum((stage > 0) + (stage < job.layout.stages - 1) for stage in stages)


def _over_shards(unit: Sequence[_Matrix], job: Job, value_bytes: int) -> int:
    """What a rank receives when the ranks that share a unit's weights gather them: rows are padded to equal parts."""
    ranks = job.layout.replicas
    return sum(-(-rows // ranks) * columns * value_bytes * (ranks - 1) for rows, columns in unit)


def _units(job: Job, model: TransformerConfig, stage: int) -> list[list[_Matrix]]:
    """The weights of each unit that FSDP gathers at once, on one tensor-parallel rank."""
    shape, tp = job.shape, job.layout.tp
    query, key = shape.heads * shape.head_dim // tp, shape.kv_heads * shape.head_dim // tp
    columns = shape.ffn_hidden // tp
    projections = [(query, shape.hidden), (key, shape.hidden), (key, shape.hidden)]
    block = [(shape.hidden, 1)] * 2 + projections + [(shape.hidden, query)]
    block += [(columns, shape.hidden)] * 2 + [(shape.hidden, columns)]
    if model.qkv_bias:
        block += [(rows, 1) for rows, _ in projections]
    if model.qk_norm:
        block += [(shape.head_dim, 1)] * 2
    vocabulary = (shape.vocab_size // tp, shape.hidden)
    first, last = stage == 0, stage == job.layout.stages - 1
    matrices = [vocabulary] * (first or (last and model.tied_embeddings))
    root = matrices + ([(shape.hidden, 1)] if last else []) + [vocabulary] * (last and not model.tied_embeddings)
    return [root, *[block] * len(split_layers(shape, job.layout.stages)[stage])]
