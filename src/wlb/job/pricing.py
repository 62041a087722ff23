"""By what the seconds of a job are priced: devices, measurements of them, and the software around the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from wlb.errors import UserError
from wlb.workload import Hardware, ModelShape
from wlb.workload.base import DocumentPrices
from wlb.workload.profile import WorkloadProfile


@dataclass(frozen=True)
class Software:
    """A training stack; by default ours.

    ``weights`` of a pipeline rank are gathered once a step and "kept", or "gathered" for every pass of a micro-batch;
    None is as our trainer has it: kept in a pipeline, else gathered for every backward and kept for the next forward.
    With ``prefetch`` they are gathered a block ahead. Gradients are reduced with the last micro-batch, or with each
    (``reduces_always``). ``async_tp`` divides tensor-parallel collectives and the matrix products beside them into
    parts that overlap. ``expert_parallel`` ranks share the experts, and exchange tokens.

    With ``gathers_context`` every context-parallel rank gathers all keys and values of the micro-batch before attention
    and reduces all their gradients after it, both beside nothing (the ``PerDocumentCPAttention`` of hao-ai-lab/DistCA,
    whose collectives wait in the stream of the kernels). Otherwise ranks get those that they attend, in parts, beside
    attention. With ``fetches_shards`` every rank fetches weights from each other's shards, and sends gradients there,
    point to point by its own adapter (ODC, arXiv 2601.19362), in place of a ring that enters a node by all of them.
    """

    weights: Literal["gathered", "kept"] | None = None
    prefetch: bool = True
    reduces_always: bool = False
    async_tp: bool = False
    expert_parallel: int = 1
    gathers_context: bool = False
    fetches_shards: bool = False


@dataclass(frozen=True)
class Pricing:
    """What a job's seconds depend on beside its model and layout.

    ``hardware`` has the rates of the type that the job computes in. A measured ``profile``, of one tensor-parallel
    rank, replaces its prices of computing in a simulation; links stay the hardware's. ``packed_by`` are the prices that
    documents are packed by, if not the trainer's.
    """

    hardware: Hardware
    profile: WorkloadProfile | None = field(default=None, hash=False)  # it has a dict
    packed_by: DocumentPrices | None = None
    software: Software = field(default_factory=Software)

    def check(self, shape: ModelShape, gpus_of_stage: int) -> None:
        """Raise ``UserError`` unless a model of ``shape``, on so many GPUs for each pipeline rank, has these prices."""
        ranks, experts = self.software.expert_parallel, shape.experts
        if ranks < 1 or gpus_of_stage % ranks or (ranks > 1 and (experts is None or experts.count % ranks)):
            raise UserError(
                f"expert_parallel = {ranks} must divide the {gpus_of_stage} GPUs of a pipeline stage and the model's "
                f"{experts.count if experts else 0} experts; choose a common divisor, or 1"
            )
        if self.profile is None:
            return
        ours, theirs = (replace(one, vocab_size=1) for one in (shape, self.profile.model))
        if ours != theirs:
            measured, asked = vars(theirs), vars(ours)
            differing = ", ".join(
                f"{name} {measured[name]}, not {asked[name]}" for name in asked if measured[name] != asked[name]
            )
            raise UserError(
                f"the profile was measured with another model ({differing}); measure one of the job's model"
            )
        if self.profile.cp != 1:
            raise UserError(f"the profile was measured with cp = {self.profile.cp}; the simulation needs one of cp = 1")
