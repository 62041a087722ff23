"""What the software around the kernels does, as far as the seconds of a step depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    attention.
    """

    weights: Literal["gathered", "kept"] | None = None
    prefetch: bool = True
    reduces_always: bool = False
    async_tp: bool = False
    expert_parallel: int = 1
    gathers_context: bool = False
