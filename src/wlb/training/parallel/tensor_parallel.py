"""Tensor parallelism with sequence parallelism, applied to a plain ``Transformer`` from outside.

Tensor-parallel ranks split the projections of every block in pairs: the first by its outputs (heads, columns of the
feed-forward layer), the second by its inputs. So a pair needs one all-gather of tokens before it and one reduce-scatter
after it (Megatron-LM, arXiv 1909.08053, section 3; with tokens split in between, arXiv 2205.05198, section 4.2.2).
Between the pairs, norms included, every rank holds an equal part of the tokens, so T must be a multiple of the group
size; ``RankSlice.of`` sees to that. Routers see these parts, and experts are not split (``MixtureOfExperts``).
Embedding, head and the scores for the loss are split by vocabulary.
"""

import warnings
from typing import cast

import torch.distributed as dist
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from wlb.models.experts import MixtureOfExperts, mixtures
from wlb.models.transformer import Block, Transformer

_TOKENS = Shard(0)  # of a stream (T, D)
_HEAD_NORMS = ("q_norm", "k_norm")


def apply_tensor_parallel(module: Transformer, mesh: DeviceMesh) -> None:
    """Split the weights of ``module``, which may still be on the meta device, over the one dimension of ``mesh``."""
    plan: dict[str, ParallelStyle] = {}
    qk_norm = module.config.qk_norm
    if module.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=_TOKENS)
    for layer, block in module.layers.items():
        plan |= {f"layers.{layer}.{name}": style for name, style in _block_plan(cast(Block, block), qk_norm).items()}
    for mixture in mixtures([module]).values():
        mixture.tp_rank = mesh.get_local_rank()
    if module.head is not None:
        plan["head.norm"] = SequenceParallel(sequence_dim=0)
        # Scores stay split by vocabulary, as a DTensor. A tied matrix is already split that way.
        own = ColwiseParallel(input_layouts=_TOKENS, output_layouts=Shard(-1), use_local_output=False)
        plan["head.output"] = _all_tokens(inputs=2) if module.config.tied_embeddings else own
    parallelize_module(module, mesh, plan)


def overlap_collectives(group: dist.ProcessGroup) -> None:
    """Have blocks that are compiled from here on overlap collectives of ``group`` with their matrix products, in parts.

    Of a dense block torch (2.13) overlaps both all-gathers of forward and backward, and the reduce-scatters of the
    forward. Those of the backward stay whole, because their input is a sum of products, and so does the all-gather of
    a forward before projections with a bias.
    """
    from torch._inductor import config  # slow to import

    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # It says that no one needs to call this any more, but the pass that overlaps still does (torchtitan#4045).
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def _block_plan(block: Block, qk_norm: bool) -> dict[str, ParallelStyle]:
    # Norms of single heads run on this rank's heads; their weights are whole on every rank.
    head_norms = {f"attention.{name}": SequenceParallel(sequence_dim=1, use_local_output=True) for name in _HEAD_NORMS}
    plan: dict[str, ParallelStyle] = {
        **(head_norms if qk_norm else {}),
        "attention_norm": SequenceParallel(sequence_dim=0),
        "attention": _all_tokens(inputs=2),  # x, then rotation, which stays as it is
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=_TOKENS),
    }
    if not isinstance(block.feed_forward, MixtureOfExperts):
        return plan | {"feed_forward_norm": SequenceParallel(sequence_dim=0)} | _feed_forward_plan("feed_forward")
    of_parts = SequenceParallel(sequence_dim=0, use_local_output=True)
    plan |= {"feed_forward_norm": of_parts, "feed_forward.router": of_parts}
    return plan | (_feed_forward_plan("feed_forward.shared") if block.feed_forward.shared is not None else {})


def _feed_forward_plan(name: str) -> dict[str, ParallelStyle]:
    return {
        name: _all_tokens(inputs=1),
        f"{name}.w1": ColwiseParallel(),
        f"{name}.w3": ColwiseParallel(),
        f"{name}.w2": RowwiseParallel(output_layouts=_TOKENS),
    }


def _all_tokens(inputs: int) -> PrepareModuleInput:
    """Gather the tokens of the first input for all projections of the module at once.

    The gathered tokens stay a DTensor, so that backward first adds the gradients of the projections, each a partial
    sum, and reduce-scatters them once. With a plain tensor every projection would reduce its own.
    """
    others = (None,) * (inputs - 1)
    return PrepareModuleInput(input_layouts=(_TOKENS, *others), desired_input_layouts=(Replicate(), *others))
