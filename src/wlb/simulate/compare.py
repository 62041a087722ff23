"""Packing methods side by side on the same documents: balance, delay, planning time and what a pipeline pays.

Each method plans the whole stream; its plans are dealt to data-parallel ranks and replayed through the pipeline
schedule, once as packed and once with balanced assignment and the order searched for (``wlb.packing.arrange``). Steps
are priced in groups, so memory does not grow with the stream. Only whole steps count for balance and cost; the tail
that ``drain`` leaves is shorter than a step. Speeds count the tail too: every method has trained all documents by
then, so none looks fast because its long ones still wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.packing import PACKERS, checked_name, make_packer
from wlb.packing.fixed import FixedSolverPacker
from wlb.packing.packer import Packer
from wlb.packing.plan import StepPlan
from wlb.packing.statistics import PackingStatistics
from wlb.simulate.pipeline_cost import Cluster, PipelineCost, in_groups
from wlb.workload.base import Workload
from wlb.workload.flops import attended_pairs

DEFAULT_METHODS = (
    "sequential",
    "fixed_greedy",
    "fixed_greedy:2",
    "fixed_greedy:4",
    "fixed_greedy:8",
    "variable_length:paper",
    "variable_length",
    "variable_length:auto",
    "makespan",
)

_DOCUMENTS_AT_A_TIME = 4096


@dataclass(frozen=True)
class MethodResult:
    """One row of the comparison; ``pipeline_cost`` is simulated step seconds over those of a perfectly balanced step.

    ``pipeline_cost`` takes the micro-batches as packed, ``pipeline_cost_arranged`` with balanced assignment and order;
    so do the simulated throughput, of all data-parallel ranks together, and the busy share, which is that of the
    pipeline stages' time spent on work; these two are over all documents, the tail included. ``attention_kept`` is the
    share of the documents' query-key pairs that is computed: what cutting documents leaves out makes a method faster,
    not better. ``optimality_gap`` is the mean over solves, for methods with a solver.
    """

    method: str
    imbalance_degree: float
    mean_token_delay: float
    longest_delay: int
    tokens_per_step_cv: float
    planning_ms_per_step: float
    pipeline_cost: float
    pipeline_cost_arranged: float
    tokens_per_second: float
    tokens_per_second_arranged: float
    busy_share: float
    busy_share_arranged: float
    attention_kept: float
    steps: int
    drained_steps: int
    documents_in: int
    documents_out: int
    tokens_in: int
    tokens_out: int
    optimality_gap: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ComparedRow:
    """A row as it is shown: ``result`` with its micro-batches as packed, or arranged.

    ``speed_at_equal_work`` is predicted seconds of work done in a second, over the first row's. ``speed_in_tokens`` is
    tokens instead; it flatters a method that cuts documents, because it skips part of their attention.
    """

    name: str
    result: MethodResult
    arranged: bool
    speed_at_equal_work: float
    speed_in_tokens: float

    @property
    def pipeline_cost(self) -> float:
        return self.result.pipeline_cost_arranged if self.arranged else self.result.pipeline_cost


def compared_rows(results: Sequence[MethodResult]) -> list[ComparedRow]:
    """The first method as packed, which the others are compared with; then every method arranged, the first too."""
    base = results[0]
    first = ComparedRow(base.method, base, False, 1.0, 1.0)
    arranged = [
        ComparedRow(
            f"{base.method}, arranged" if result is base else result.method,
            result,
            True,
            result.busy_share_arranged / base.busy_share,
            result.tokens_per_second_arranged / base.tokens_per_second,
        )
        for result in results
    ]
    return [first, *arranged]


def comparison_json(results: Sequence[MethodResult]) -> list[dict[str, Any]]:
    """One object a method, with its speed at equal work over the first method's as packed: arranged, and as packed."""
    base = results[0].busy_share
    return [
        result.to_json()
        | {
            "speed_at_equal_work": result.busy_share_arranged / base,
            "speed_at_equal_work_as_packed": result.busy_share / base,
        }
        for result in results
    ]


def packer_for(method: str, cluster: Cluster, workload: Workload, **overrides: object) -> Packer[Any]:
    """The packer that ``method`` names, ``NAME`` or ``NAME:ARGUMENT``; ARGUMENT stands for options of that packer.

    ``overrides`` are options for packers that have them; None leaves an option as it is. Raises ``UserError`` for an
    unknown method, and for an argument that it does not take.
    """
    name, separator, argument = method.partition(":")
    options_class = PACKERS[checked_name(name)].options_class
    known = options_class.model_fields
    options = {option: value for option, value in overrides.items() if option in known and value is not None}
    try:
        if separator:
            options |= options_class.from_argument(argument, cluster.context_window)
    except UserError as error:
        raise UserError(f"method {method!r}: {error}") from None
    return make_packer(
        name,
        micro_batches=cluster.micro_batches,
        context_window=cluster.context_window,
        workload=workload,
        **options,
    )


def compare_packer(
    method: str,
    packer: Packer[Any],
    documents: Sequence[Segment],
    cluster: Cluster,
    workload: Workload,
    *,
    on_progress: Callable[[int], None] = lambda documents: None,
) -> MethodResult:
    """Pack ``documents``, at least one, in arrival order with ``packer``, shown as ``method``, and price the steps.

    ``on_progress`` is called with the number of documents just taken in.
    """
    as_packed = PipelineCost(cluster, workload, "arrival", "arrival")
    arranged = PipelineCost(cluster, workload, "balanced", "makespan")
    statistics = PackingStatistics()
    trained = _TokenLedger()
    planning_seconds = 0.0
    for chunk in in_groups(documents, _DOCUMENTS_AT_A_TIME):
        start = time.perf_counter()
        plans = packer.plan(chunk)
        planning_seconds += time.perf_counter() - start
        statistics.add(plans)
        trained.add(plans)
        as_packed.add(plans)
        arranged.add(plans)
        on_progress(len(chunk))
    tail = packer.drain()
    statistics.add_tail(tail)
    trained.add(tail)
    as_packed.add_tail(tail)
    arranged.add_tail(tail)
    gaps = packer.optimality_gaps if isinstance(packer, FixedSolverPacker) else []
    return MethodResult(
        method=method,
        imbalance_degree=statistics.imbalance_degree,
        mean_token_delay=statistics.mean_token_delay,
        longest_delay=statistics.longest_delay,
        tokens_per_step_cv=statistics.tokens_per_step_cv,
        planning_ms_per_step=1e3 * planning_seconds / max(1, statistics.steps),
        pipeline_cost=as_packed.ratio,
        pipeline_cost_arranged=arranged.ratio,
        tokens_per_second=statistics.tokens / as_packed.seconds,
        tokens_per_second_arranged=statistics.tokens / arranged.seconds,
        busy_share=as_packed.busy_share,
        busy_share_arranged=arranged.busy_share,
        attention_kept=trained.pairs / float(attended_pairs([document.length for document in documents]).sum()),
        steps=statistics.steps,
        drained_steps=len(tail),
        documents_in=len({document.document for document in documents}),
        documents_out=trained.complete(documents),
        tokens_in=sum(document.length for document in documents),
        tokens_out=statistics.tokens,
        optimality_gap=float(np.mean(gaps)) if gaps else None,
    )


class _TokenLedger:
    """Tokens trained of every document, and query-key pairs computed over all."""

    def __init__(self) -> None:
        self.pairs = 0.0
        self._tokens: dict[int, int] = {}

    def add(self, plans: Iterable[StepPlan]) -> None:
        for plan in plans:
            self.pairs += float(attended_pairs(plan.table[:, 2]).sum())
            for document, _, length in plan.segments:
                self._tokens[document] = self._tokens.get(document, 0) + length

    def complete(self, documents: Iterable[Segment]) -> int:
        """How many documents were trained token for token, neither less nor more."""
        for document, _, length in documents:
            self._tokens[document] = self._tokens.get(document, 0) - length
        return sum(tokens == 0 for tokens in self._tokens.values())
