"""Statistics of a sequence of step plans: balance, delay, spread and document counts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from wlb.packing.plan import StepPlan


class PackingStatistics:
    """Running totals over step plans; memory grows by two numbers a step.

    ``steps``, ``imbalance_degree`` and ``tokens_per_step_cv`` describe whole steps, what ``plan`` returns; tokens and
    delays also count the tail, what ``drain`` returns.
    """

    def __init__(self) -> None:
        self.longest_delay = 0
        self._imbalances: list[float] = []
        self._tokens: list[int] = []
        self._tail_tokens = 0
        self._delay_token_steps = 0

    def add(self, plans: Iterable[StepPlan]) -> None:
        for plan in plans:
            self._imbalances.append(plan.imbalance)
            self._tokens.append(plan.tokens)
            self._add_delay(plan)

    def add_tail(self, plans: Iterable[StepPlan]) -> None:
        for plan in plans:
            self._tail_tokens += plan.tokens
            self._add_delay(plan)

    @property
    def steps(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> int:
        return sum(self._tokens) + self._tail_tokens

    @property
    def imbalance_degree(self) -> float:
        """Mean over steps of the largest over the mean micro-batch workload (WLB-LLM, section 7.2)."""
        return float(np.mean(self._imbalances)) if self._imbalances else 1.0

    @property
    def mean_token_delay(self) -> float:
        """Steps between a document's arrival and its training, averaged over tokens."""
        return self._delay_token_steps / self.tokens if self.tokens else 0.0

    @property
    def tokens_per_step_cv(self) -> float:
        """Standard deviation over mean of the tokens that a step trains."""
        return float(np.std(self._tokens) / np.mean(self._tokens)) if self._tokens else 0.0

    def _add_delay(self, plan: StepPlan) -> None:
        self._delay_token_steps += plan.delay_token_steps
        self.longest_delay = max(self.longest_delay, plan.longest_delay)
