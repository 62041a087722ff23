"""Simulates a job on documents: the plans that the trainer would run, step by step, and their seconds.

Plans come from the planner of the trainer (``wlb.job.planner``), epoch after epoch.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.job.job import Job
from wlb.simulate.decide import decide
from wlb.simulate.filling import check_filling, joined_lengths
from wlb.simulate.rate import Rate, first_steps
from wlb.workload.base import DocumentPrices
from wlb.workload.flops import attended_pairs


@dataclass(kw_only=True)
class SimulationResult(Rate):
    """Means over steps. Seconds are simulated, of a whole step; ``where`` divides them among ``wlb.simulate.CAUSES``.

    ``gpu_seconds`` is the computing of each GPU in a step, shape (pp, dp, cp); tensor-parallel ranks are the same.
    ``imbalance`` is as in ``Steps``. ``token_delay`` is the mean number of steps that a token waited.
    ``attention_kept`` is the computed share of the query-key pairs of documents. ``epochs`` is the number of passes
    over the documents; from 2 on, documents were repeated. In level steps all documents over ``alone_tokens`` tokens
    were shared, by up to ``sharing_ranks`` ranks. (Ranks that share experts share all their micro-batches; they do not
    count.) ``runs`` is the number of micro-batches that the mean rank runs in a step.
    """

    job: Job
    where: dict[str, float]
    gpu_seconds: NDArray[np.float64]
    imbalance: dict[str, float]
    token_delay: float
    attention_kept: float
    epochs: int
    alone_tokens: int
    sharing_ranks: int
    runs: float

    @property
    def steps(self) -> int:
        return len(self.step_seconds)

    @property
    def mean_step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_cv(self) -> float:
        """The coefficient of variation of tokens per step."""
        return float(np.std(self.step_tokens) / np.mean(self.step_tokens))

    @property
    def block_seconds(self) -> float:
        """Computing of the mean GPU in a block, forward and backward, for a micro-batch."""
        return float(self.gpu_seconds.mean()) * self.job.layout.pp / (self.runs * self.job.shape.layers)

    @property
    def sharing(self) -> str:
        """Which documents ranks share beyond the context-parallel groups of the layout, as a clause; possibly empty."""
        if self.sharing_ranks > self.job.layout.ep_ranks:
            return f"Documents over {self.alone_tokens:,} tokens are shared by up to {self.sharing_ranks} ranks"
        layout = self.job.layout
        return f"Pools of {layout.pool_size} ranks share long documents" if layout.pool_size != layout.cp else ""

    def speedup(self, base: Self) -> float:
        """Tokens per second, over those of ``base``."""
        return self.tokens_per_second / base.tokens_per_second

    def speed_at_equal_work(self, base: Self) -> float:
        """Speed of the same work, over that of ``base``."""
        return self.work_rate / base.work_rate

    def to_json(self) -> dict[str, Any]:
        rates = ("steps", "tokens", "work_seconds", "tokens_per_second", "mean_step_seconds")
        means = ("where", "imbalance", "token_delay", "tokens_cv", "attention_kept", "epochs", "sharing")
        sizes = {"gpus": self.job.layout.world_size, "layout": self.job.sizes}
        return sizes | {name: getattr(self, name) for name in (*rates, *means)}


def pooled(results: Sequence[SimulationResult]) -> SimulationResult:
    """Equally many steps of one job on several draws of the documents, as if they were one series."""
    first = results[0]

    def together(name: str) -> Any:
        """Values of steps in a row, the largest whole number, or the mean of anything else."""
        values = [getattr(one, name) for one in results]
        if isinstance(values[0], list):
            return [*chain.from_iterable(values)]
        if isinstance(values[0], dict):
            return {key: float(np.mean([one[key] for one in values])) for key in values[0]}
        return max(values) if isinstance(values[0], int) else np.mean(values, axis=0)

    alike = {field.name: together(field.name) for field in fields(first) if field.name not in ("work_prices", "job")}
    tokens = [one.tokens for one in results]
    delay = float(np.average([one.token_delay for one in results], weights=tokens))
    return replace(first, **alike | {"work_seconds": sum(one.work_seconds for one in results), "token_delay": delay})


def simulate(
    job: Job,
    lengths: NDArray[np.int64] | Sequence[NDArray[np.int64]],
    steps: int,
    *,
    warm_up: int = 0,
    work_prices: DocumentPrices | None = None,
) -> SimulationResult:
    """Simulate ``steps`` steps of ``job`` on documents of ``lengths`` tokens.

    ``warm_up`` steps come before them and do not count, because a job that delays documents starts with none waiting.

    Work is priced by ``job.work_prices``; to compare jobs of different layouts, give all of them the same
    ``work_prices``. ``decide`` decides what is "auto"; ``job`` of the result has its decisions. Documents are repeated,
    epoch after epoch, if the steps need more; raises ``UserError`` if they do not fill one step (``check_filling``).
    """
    check_documents(job, lengths, steps)
    of_documents = joined_lengths(lengths)
    rated = Rate(work_prices or job.work_prices)
    job = decide(job, lengths)
    where, imbalance = defaultdict[str, float](float), defaultdict[str, float](float)
    gpu_seconds = np.zeros((job.layout.pp, job.layout.pools, job.layout.pool_size))
    pairs = whole_pairs = 0.0
    delay = epochs = runs = alone = 0
    sharing = 1
    for plans, priced in first_steps(job, lengths, steps, warm_up):
        rated.add(plans, priced)
        for totals, of_steps in ((where, priced.where), (imbalance, priced.imbalance)):
            for name, values in of_steps.items():
                totals[name] += float(values.sum())
        gpu_seconds += priced.gpu_seconds.sum(axis=0)
        delay += sum(plan.delay_token_steps for plan in plans)
        micro_batches = [micro_batch for plan in plans for micro_batch in plan.micro_batches]
        runs += sum(len(one.ranks) or job.layout.pool_size for one in micro_batches)
        sharing = max([sharing, *(len(one.ranks) for one in micro_batches)])
        few = [one for one in micro_batches if 0 < len(one.ranks) <= job.layout.ep_ranks and one.segments]
        alone = max([alone, *(max(one.lengths) for one in few)])
        document, start, length = np.concatenate([plan.table for plan in plans]).T
        epochs = max(epochs, 1 + int(document.max()) // len(of_documents))
        window = job.context_window
        arrived = np.minimum(of_documents[document % len(of_documents)] - start // window * window, window)
        pairs += float(attended_pairs(length).sum())
        whole_pairs += float((attended_pairs(arrived) * length / arrived).sum())
    return SimulationResult(
        **vars(rated),
        job=job,
        where={cause: seconds / steps for cause, seconds in where.items()},
        gpu_seconds=gpu_seconds / steps,
        imbalance={name: total / steps for name, total in imbalance.items()},
        token_delay=delay / rated.tokens,
        attention_kept=pairs / whole_pairs,
        epochs=epochs,
        alone_tokens=alone,
        sharing_ranks=sharing,
        runs=runs / (steps * job.layout.dp_cp),
    )


def check_documents(job: Job, lengths: NDArray[np.int64] | Sequence[NDArray[np.int64]], steps: int = 1) -> None:
    """``check_filling`` for ``steps`` steps of ``job``, before a long simulation."""
    if job.phases is not None:
        raise UserError("phases (costs before the language model) are used to plan, but not simulated; leave them out")
    step_tokens, overlong = job.global_batch * job.context_window, job.data.overlong
    check_filling(joined_lengths(lengths), step_tokens, job.context_window, overlong=overlong, steps=steps)
