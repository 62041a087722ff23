"""What the workload model and the pipeline simulation expect of the steps that ``training.py`` measures."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from wlb.config import JobConfig
from wlb.documents.document_order import DocumentStream
from wlb.documents.token_store import TokenStore
from wlb.packing import packer_from_config
from wlb.packing.plan import StepPlan
from wlb.sharding import make_shard_plan, shard_latency
from wlb.simulate import pipeline_makespan
from wlb.simulate.compare import micro_batch_seconds
from wlb.training.job import transformer_config, vocab_size
from wlb.training.planner import StepPlanner
from wlb.workload import ModelShape, Workload, linear_flops, make_workload
from wlb.workload.layer_split import split_layers


def plan_steps(config: JobConfig, steps: int) -> list[StepPlan]:
    """The plans of the job's first ``steps`` steps, from its configuration and document lengths alone."""
    store = TokenStore.open(config.data.store)
    workload = make_workload(model_shape_of(config), "cpu", config.parallel.tp, config.parallel.cp)
    packer = packer_from_config(config.packing, config.data.context_window, workload)
    stream = DocumentStream(store.lengths, config.data)
    planner = StepPlanner(stream, packer, config.packing, config.parallel.dp, one_epoch=False)
    return [planned.plan for planned in islice(planner, steps)]


def model_shape_of(config: JobConfig) -> ModelShape:
    return transformer_config(config.model, vocab_size(config, TokenStore.open(config.data.store))).shape


def predicted_seconds(plan: StepPlan, config: JobConfig, workload: Workload) -> float:
    """Seconds of a step: the slowest pipeline, each micro-batch as slow as its slowest context-parallel rank."""
    shape, parallel = model_shape_of(config), config.parallel
    seconds = micro_batch_seconds(plan, workload)  # (phase, dp, micro-batches)
    if parallel.cp > 1:
        seconds = seconds * _share_of_slowest(plan, config, workload) / seconds.sum(axis=0)
    stages = _stage_shares(shape, parallel.stages)
    return max(
        pipeline_makespan(parallel.schedule, np.outer(stages, forward), np.outer(stages, backward), parallel.virtual_pp)
        for forward, backward in seconds.swapaxes(0, 1)
    )


def _share_of_slowest(plan: StepPlan, config: JobConfig, workload: Workload) -> NDArray[np.float64]:
    """Seconds of every micro-batch's slowest context-parallel rank; shape (dp, micro-batches)."""
    pricing = make_workload(model_shape_of(config), "cpu")  # what the loader shards by

    def slowest(lengths: list[int]) -> float:
        shards = make_shard_plan(lengths, config.parallel.cp, config.sharding.strategy, workload=pricing)
        return shard_latency(shards, workload).slowest

    return np.array([[slowest(micro_batch.lengths) for micro_batch in rank] for rank in plan.ranks])


def _stage_shares(shape: ModelShape, stages: int) -> NDArray[np.float64]:
    """Each stage's share of a micro-batch, as that of its matrix products: its blocks, and the head on the last."""
    total = float(linear_flops(shape, 1))
    blocks = float(linear_flops(replace(shape, vocab_size=1), 1))
    shares = np.array([len(layers) / shape.layers * blocks / total for layers in split_layers(shape, stages)])
    shares[-1] += 1 - blocks / total
    return shares
