"""The two large parts of a trainer, put together from a job's configuration: its model stages and its loader."""

from __future__ import annotations

from typing import Any

from wlb.config import JobConfig
from wlb.documents.store.reader import TokenStore
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.packing.pipeline_order import Pipeline
from wlb.planning.prices import packing_prices
from wlb.training.data.loader import RankShare, StepLoader
from wlb.training.parallel.mesh import JobMesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules
from wlb.workload import hardware_preset, make_workload


def assemble_stages(
    config: JobConfig,
    model: TransformerConfig,
    mesh: JobMesh,
    execution: Execution,
    *,
    initialise: bool,
) -> list[Transformer]:
    """This rank's pipeline stages; without ``initialise`` their weights are yet to be loaded."""
    training = config.training
    return build_stage_modules(
        model,
        config.parallel,
        mesh,
        execution,
        seed=training.seed if initialise else None,
        activation_checkpointing=training.activation_checkpointing,
        compiled=training.compile,
    )


def assemble_loader(
    config: JobConfig,
    store: TokenStore,
    model: TransformerConfig,
    mesh: JobMesh,
    hardware: str,
    state: dict[str, Any] | None,
) -> tuple[StepLoader, RankShare]:
    """The loader of this rank's share of every step, from ``state`` if given, and that share.

    Micro-batches are priced for the tp x cp GPUs that run one, shards for one of the cp.
    """
    shape, parallel = model.shape, config.parallel
    packer = config.packing.packer(
        config.data.context_window,
        packing_prices(
            config.packing,
            config.sharding,
            shape,
            hardware_preset(hardware),
            tp=parallel.tp,
            cp=parallel.cp,
            context_window=config.data.context_window,
        ),
    )
    pipeline = Pipeline(
        parallel.schedule,
        parallel.pp,
        make_workload(shape, hardware_preset(hardware), tp=parallel.tp, cp=parallel.cp),
        parallel.virtual_pp,
    )
    share = RankShare(
        dp_rank=mesh.rank("dp"),
        cp_rank=mesh.rank("cp"),
        cp_size=parallel.cp,
        tp_size=parallel.tp,
        strategy=config.sharding.strategy,
        workload=make_workload(shape, hardware, tp=parallel.tp),
    )
    loader = StepLoader(store, config, packer, pipeline, vocab_size=shape.vocab_size, share=share, state=state)
    return loader, share
