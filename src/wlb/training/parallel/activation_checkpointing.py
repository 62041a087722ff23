"""Activation checkpointing, applied to the blocks of a plain ``Transformer`` from outside.

Without it a block keeps everything its backward pass reads. Under ``full`` it keeps its input only and is computed a
second time right before its backward pass. Under ``selective`` it also keeps the output of attention and its
log-sum-exp: norms, projections and feed-forward layer are computed again, attention and the exchange of keys and
values are not (Korthikanti et al., arXiv 2205.05198, section 5, recompute attention instead: there its scores are what
takes memory, which flash attention never stores).

Only the block's ``forward`` is replaced, so parameters keep their names, and what wraps the block as a module (FSDP's
gathering of weights, tensor-parallel hooks) stays around it. Numbers do not change by a bit: the same operations run
on the same inputs. ``docs/memory.md`` says what each strategy keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from wlb.attention.saved_attention import AttentionComputedAgain, KeptAttention
from wlb.models.transformer import Block, Transformer

Strategy = Literal["none", "selective", "full"]
_BlockForward = Callable[..., Tensor]  # of (x_TD, rotation, attend)


def apply_activation_checkpointing(module: Transformer, strategy: Strategy) -> None:
    """Make every block of ``module`` keep less between forward and backward; call it before ``fully_shard``.

    The attention function that comes with a micro-batch must take ``kept`` as ``context_parallel_attention`` does.
    """
    if strategy == "none":
        return
    for block in module.layers.values():
        assert isinstance(block, Block)
        block.forward = _recomputed(block.forward, keep_attention=strategy == "selective")  # type: ignore[method-assign]


def _recomputed(forward: _BlockForward, *, keep_attention: bool) -> _BlockForward:
    @wraps(forward)
    def run(x_TD: Tensor, rotation: Any, attend: Callable[..., Tensor]) -> Tensor:
        attend = partial(attend, kept=KeptAttention() if keep_attention else AttentionComputedAgain())
        # There is no dropout, so no random state that the second pass would have to find again.
        out: Tensor = checkpoint(forward, x_TD, rotation, attend, use_reentrant=False, preserve_rng_state=False)
        return out

    return run
