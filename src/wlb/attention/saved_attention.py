"""Attention results saved for activation recomputation.

Activation checkpointing throws away what a block computed and computes it anew before its backward pass. Attention is
most of that work at long context, and under context parallelism its keys and values would travel once more; its output
and log-sum-exp are two small tensors. So the first call leaves them here, and the second takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class AttentionResults(NamedTuple):
    """What a backward pass reads beside query, key and value; tensors without autograd history."""

    out_THE: Tensor
    log_sum_exp_HT: Tensor
    received: tuple[Tensor, ...]  # other ranks' keys and values, part by part; none where they are to be sent again


class KeptAttention:
    """The results of one call of attention, computed when they are first asked for."""

    computed_again = False

    def __init__(self) -> None:
        self._results: AttentionResults | None = None

    def get(self, compute: Callable[[], AttentionResults]) -> AttentionResults:
        """What ``compute`` returns, or what it returned the first time."""
        if self._results is None:
            self._results = compute()
        # The caller's output gets a history, which must not come to live in here.
        return self._results._replace(out_THE=self._results.out_THE.detach())


class AttentionComputedAgain(KeptAttention):
    """In place of ``KeptAttention`` where attention, too, is computed anew, right before its backward pass."""

    computed_again = True

    def get(self, compute: Callable[[], AttentionResults]) -> AttentionResults:
        return compute()
