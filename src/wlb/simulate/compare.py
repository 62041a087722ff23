"""Packing methods side by side on the same documents: balance, delay, planning time and what their steps take.

Each method plans the whole stream, by the prices that a job with this packer packs by. Its steps are simulated in that
job (``wlb.simulate.step``), once as packed and once with balanced assignment and the order searched for
(``wlb.packing.arrange``); everything else, sharding too, is the same for all. Only whole steps count for balance and
cost; the tail that ``drain`` leaves is shorter than a step. Speeds count the tail too: every method has trained all
documents by then, so none looks fast because its long ones still wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.packing import PACKERS, checked_name, make_packer
from wlb.packing.arrange import arrange
from wlb.packing.fixed import FixedSolverPacker
from wlb.packing.packer import Packer
from wlb.packing.plan import StepPlan
from wlb.packing.statistics import PackingStatistics
from wlb.simulate.costs import JobCosts
from wlb.simulate.job import SimulatedJob
from wlb.simulate.rate import Rate, in_groups
from wlb.simulate.step import Steps, simulate_steps
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
    """One row of the comparison; seconds are simulated.

    ``imbalance_degree`` is the longest over the mean micro-batch, in seconds that it keeps its context-parallel group
    busy, and ``pipeline_cost`` a step's seconds over those with micro-batches that are all alike; both are of whole
    steps. ``work_rate`` is predicted seconds of work done in a second, as in ``wlb.simulate``, ``busy_share`` the part
    of the GPUs' time in which they compute; these two and ``tokens_per_second``, of all GPUs together, count the tail.
    Each is given for micro-batches as packed, and arranged. ``attention_kept`` is the share of the documents' query-key
    pairs that is computed: what cutting documents leaves out makes a method faster, not better. ``optimality_gap`` is
    the mean over solves, for methods with a solver.
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
    work_rate: float
    work_rate_arranged: float
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
            result.work_rate_arranged / base.work_rate,
            result.tokens_per_second_arranged / base.tokens_per_second,
        )
        for result in results
    ]
    return [first, *arranged]


def comparison_json(results: Sequence[MethodResult]) -> list[dict[str, Any]]:
    """One object a method, with its speed at equal work over the first method's as packed: arranged, and as packed."""
    base = results[0].work_rate
    return [
        result.to_json()
        | {
            "speed_at_equal_work": result.work_rate_arranged / base,
            "speed_at_equal_work_as_packed": result.work_rate / base,
        }
        for result in results
    ]


def packer_for(method: str, job: SimulatedJob, **overrides: object) -> Packer[Any]:
    """The packer that ``method`` names, ``NAME`` or ``NAME:ARGUMENT``; ARGUMENT stands for options of that packer.

    It packs micro-batches of ``job``, by the prices that the job would pack by with this packer. ``overrides`` are
    options for packers that have them; None leaves an option as it is. Raises ``UserError`` for an unknown method, and
    for an argument that it does not take.
    """
    name, separator, argument = method.partition(":")
    options_class = PACKERS[checked_name(name)].options_class
    known = options_class.model_fields
    options = {option: value for option, value in overrides.items() if option in known and value is not None}
    try:
        if separator:
            options |= options_class.from_argument(argument, job.context_window)
    except UserError as error:
        raise UserError(f"method {method!r}: {error}") from None
    packed = replace(job, packing=job.packing.model_copy(update={"method": name}))
    return make_packer(
        name,
        micro_batches=job.packing.micro_batches,
        context_window=job.context_window,
        workload=packed.packing_prices,
        **options,
    )


def compare_packer(
    method: str,
    packer: Packer[Any],
    documents: Sequence[Segment],
    job: SimulatedJob,
    *,
    on_progress: Callable[[int], None] = lambda documents: None,
) -> MethodResult:
    """Pack ``documents``, at least one, in arrival order with ``packer``, shown as ``method``; simulate the steps.

    ``on_progress`` is called with the number of documents just taken in.
    """
    simulated = _Simulated(job)
    as_packed, arranged = simulated.as_packed, simulated.arranged
    statistics = PackingStatistics()
    trained = _TokenLedger()
    planning_seconds = 0.0
    for chunk in in_groups(documents, _DOCUMENTS_AT_A_TIME):
        start = time.perf_counter()
        plans = packer.plan(chunk)
        planning_seconds += time.perf_counter() - start
        statistics.add(plans)
        trained.add(plans)
        simulated.add(plans)
        on_progress(len(chunk))
    tail = packer.drain()
    statistics.add_tail(tail)
    trained.add(tail)
    simulated.add(tail, tail=True)
    gaps = packer.optimality_gaps if isinstance(packer, FixedSolverPacker) else []
    return MethodResult(
        method=method,
        imbalance_degree=as_packed.imbalance_degree,
        mean_token_delay=statistics.mean_token_delay,
        longest_delay=statistics.longest_delay,
        tokens_per_step_cv=statistics.tokens_per_step_cv,
        planning_ms_per_step=1e3 * planning_seconds / max(1, statistics.steps),
        pipeline_cost=as_packed.over_balanced,
        pipeline_cost_arranged=arranged.over_balanced,
        tokens_per_second=statistics.tokens / as_packed.rate.seconds,
        tokens_per_second_arranged=statistics.tokens / arranged.rate.seconds,
        work_rate=as_packed.rate.work_rate,
        work_rate_arranged=arranged.rate.work_rate,
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


class _Simulated:
    """Sums over steps, ``as_packed`` and ``arranged``."""

    def __init__(self, job: SimulatedJob) -> None:
        self.as_packed, self.arranged = _Sums(Rate(job.work_prices)), _Sums(Rate(job.work_prices))
        self._costs = JobCosts(job)
        self._dealt = partial(arrange, dp=job.dp, assignment="arrival", order="arrival")
        self._arranged = partial(arrange, dp=job.dp, assignment="balanced", order="makespan", pipeline=job.pipeline)

    def add(self, plans: Sequence[StepPlan], *, tail: bool = False) -> None:
        if not plans:
            return
        dealt, arranged = [self._dealt(plan) for plan in plans], [self._arranged(plan) for plan in plans]
        steps = simulate_steps(dealt, self._costs)
        self.as_packed.add(dealt, steps, tail)
        self.arranged.add(arranged, steps.reordered(np.array(list(map(_places, dealt, arranged)))), tail)


@dataclass
class _Sums:
    rate: Rate
    computing: float = 0.0  # seconds of the mean GPU
    whole_seconds: float = 0.0  # of whole steps
    balanced_seconds: float = 0.0
    imbalances: list[float] = field(default_factory=list)

    def add(self, plans: Sequence[StepPlan], steps: Steps, tail: bool) -> None:
        self.rate.add(plans, steps)
        self.computing += float(steps.gpu_seconds.mean(axis=(1, 2, 3)).sum())
        if not tail:
            self.whole_seconds += float(steps.seconds.sum())
            self.balanced_seconds += float(steps.balanced_seconds.sum())
            busy = steps.busy_seconds
            self.imbalances += (busy.max(axis=(1, 2)) / busy.mean(axis=(1, 2))).tolist()

    @property
    def imbalance_degree(self) -> float:
        return float(np.mean(self.imbalances)) if self.imbalances else 1.0

    @property
    def over_balanced(self) -> float:
        return self.whole_seconds / self.balanced_seconds if self.balanced_seconds else 1.0

    @property
    def busy_share(self) -> float:
        return self.computing / self.rate.seconds


def _places(plan: StepPlan, arranged: StepPlan) -> list[int]:
    """Where in ``plan`` each micro-batch of ``arranged`` is."""
    places = {id(micro_batch): place for place, micro_batch in enumerate(plan.micro_batches)}
    return [places[id(micro_batch)] for micro_batch in arranged.micro_batches]


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
