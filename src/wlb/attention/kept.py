"""The results of attention, kept for a caller that computes a block a second time.

Activation checkpointing throws away what a block computed and computes it anew before its backward pass. Attention is
most of that work at long context, and under context parallelism its keys and values would travel a third time; its
output and log-sum-exp are two small tensors. So the first call leaves them here, and the second takes them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class KeptAttention:
    """Output and log-sum-exp of one call of attention, computed when they are first asked for."""

    def __init__(self) -> None:
        self._results: tuple[Tensor, Tensor] | None = None

    def get(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What ``compute`` returns, or what it returned the first time; tensors without autograd history."""
        if self._results is None:
            self._results = compute()
        out, log_sum_exp = self._results
        return out.detach(), log_sum_exp  # the caller's output gets a history, which must not come to live in here
