"""Packing methods side by side on the same documents: balance, delay, planning time and step time.

Each method plans the whole stream with the prices of a job that uses this packer. Its steps are simulated in that job
(``wlb.simulate.step``), once as packed and once with micro-batches assigned to ranks and ordered by work
(``wlb.packing.arrange``). Everything else, including sharding, is the same for all. Balance and cost count only whole
steps; the tail that ``drain`` leaves is shorter than a step. Speeds include the tail: by then every method has trained
all documents, so no method looks fast because its long documents still wait.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wlb.documents.segments import Segment
from wlb.errors import UserError, choose_from
from wlb.job.config import PackingConfig
from wlb.job.job import Job
from wlb.packing.arrange import arrange
from wlb.packing.options import METHODS
from wlb.packing.packer import Packer
from wlb.packing.plan import StepPlan
from wlb.simulate.costs import JobCosts
from wlb.simulate.rate import Rate
from wlb.simulate.step import Steps
from wlb.token_count import parse_count
from wlb.workload.flops import attended_pairs
from wlb_studies.exact import FixedSolverPacker
from wlb_studies.plots import BALANCED, BASELINE, pyplot_without_display, save

_DOCUMENTS_AT_A_TIME = 4096
_FIXED_LENGTH = ("sequential", "fixed_greedy", "fixed_solver")  # the packing of the paper's plain-4D and fixed-4D


class SimulatedSteps(NamedTuple):
    """Steps with their micro-batches as packed, or arranged.

    ``pipeline_cost`` is the seconds of whole steps over the seconds with equal micro-batches. The other fields include
    the tail: ``work_rate`` is predicted seconds of work done per second, as in ``wlb.simulate``; tokens are summed over
    all GPUs; ``busy_share`` is the share of GPU time spent computing.
    """

    pipeline_cost: float
    tokens_per_second: float
    work_rate: float
    busy_share: float


@dataclass(frozen=True)
class MethodResult:
    """One row of the comparison.

    ``imbalance_degree`` is the heaviest over the mean micro-batch of whole steps, by the method's prices.
    ``attention_kept`` is the share of query-key pairs that is computed: cutting documents skips pairs, which makes a
    method faster, but not better. ``optimality_gap`` is the mean over solves, for methods with a solver.
    """

    method: str
    imbalance_degree: float
    mean_token_delay: float
    longest_delay: int
    tokens_per_step_cv: float
    planning_ms_per_step: float  # CPU time
    as_packed: SimulatedSteps
    arranged: SimulatedSteps
    attention_kept: float
    steps: int
    drained_steps: int
    documents_in: int
    documents_out: int
    tokens_in: int
    tokens_out: int
    optimality_gap: float | None = None

    def to_json(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("as_packed", "arranged")}
        arranged = {f"{name}_arranged": value for name, value in self.arranged._asdict().items()}
        return own | self.as_packed._asdict() | arranged


@dataclass(frozen=True)
class ComparedRow:
    """A row as shown: ``result`` with its micro-batches as packed, or arranged, over the first row.

    ``speedup`` compares tokens per second; ``speed_at_equal_work`` predicted seconds of work, of which a method that
    cuts documents skips some.
    """

    name: str
    result: MethodResult
    simulated: SimulatedSteps
    base: SimulatedSteps

    @property
    def speedup(self) -> float:
        return self.simulated.tokens_per_second / self.base.tokens_per_second

    @property
    def speed_at_equal_work(self) -> float:
        return self.simulated.work_rate / self.base.work_rate


def compared_rows(results: Sequence[MethodResult]) -> list[ComparedRow]:
    """The first method as packed, which is the baseline; then every method arranged, including the first."""
    first, *others = results
    base = first.as_packed
    return [
        ComparedRow(first.method, first, base, base),
        ComparedRow(f"{first.method}, arranged", first, first.arranged, base),
        *(ComparedRow(other.method, other, other.arranged, base) for other in others),
    ]


def comparison_json(results: Sequence[MethodResult]) -> list[dict[str, Any]]:
    """One object per method, with its speeds, arranged, over the first method as packed."""
    base = results[0].as_packed
    rows = (ComparedRow(result.method, result, result.arranged, base) for result in results)
    return [
        row.result.to_json() | {"speedup": row.speedup, "speed_at_equal_work": row.speed_at_equal_work} for row in rows
    ]


def packer_for(method: str, job: Job, *, solver_seconds: float | None = None, **overrides: object) -> Packer:
    """The packer that ``method`` names, ``NAME`` or ``NAME:ARGUMENT``; ARGUMENT stands for options of that packer.

    It packs micro-batches of ``job`` with the prices that the job would use with this packer. ``overrides`` are options
    for methods that read them; None keeps an option. ``solver_seconds`` bounds a solve. Raises ``UserError`` for an
    unknown method or an argument that it does not take.
    """
    name, separator, argument = method.partition(":")
    known = _options_of(name)
    options = {option: value for option, value in overrides.items() if option in known and value is not None}
    try:
        options |= _argued(name, argument, job.context_window) if separator else {}
    except UserError as error:
        raise UserError(f"method {method!r}: {error}") from None
    of_library = "fixed_greedy" if name == "fixed_solver" else name
    sizes = {"method": of_library, "global_batch": job.global_batch}
    job = replace(job, packing=PackingConfig.of(sizes | options, "packing"))
    if name != "fixed_solver":
        return job.packing.packer(job.step_micro_batches, job.context_window, job.packing_prices)
    packer = FixedSolverPacker(job.step_micro_batches, job.context_window, job.packing_prices, job.packing)
    packer.time_limit = solver_seconds
    return packer


def options_read_by(methods: Iterable[str]) -> set[str]:
    """The overrides of ``packer_for`` that any of ``methods`` reads. Raises ``UserError`` for an unknown method."""
    names = {method.partition(":")[0] for method in methods}
    solver = {"solver_seconds"} if "fixed_solver" in names else set()
    return solver.union(*map(_options_of, names))


def _options_of(name: str) -> dict[str, Any]:
    """The options that the method called ``name`` reads, and their defaults."""
    methods = METHODS | {"fixed_solver": METHODS["fixed_greedy"]}
    if name not in methods:
        raise UserError(f"packing method {name!r} is unknown; {choose_from(name, methods)}")
    return methods[name]


def _argued(name: str, argument: str, context_window: int) -> dict[str, Any]:
    """The options that ``argument`` stands for: global batches packed together, or queues."""
    queues = "outlier_thresholds" in _options_of(name)
    if not queues and "window" not in _options_of(name):
        raise UserError(f"the method takes no argument, {argument!r} was given")
    number, least = parse_count(argument), 0 if queues else 1
    if number is None or number < least:
        raise UserError(f"{argument!r} is not a whole number of at least {least}")
    if queues:
        return {"outlier_thresholds": _thresholds(context_window, number)}
    return {"window": number}


def _thresholds(context_window: int, queues: int) -> tuple[int, ...]:
    """Outlier thresholds in tokens: 9/16 of the window for one queue; 3/16 and 9/16 for two."""
    sixteenths = {0: (), 1: (9,), 2: (3, 9), 3: (3, 6, 9)}
    if queues not in sixteenths:
        raise UserError(f"{queues} outlier queues asked for; 0 to 3 are preset, or give outlier_thresholds")
    return tuple(sorted({max(1, context_window * share // 16) for share in sixteenths[queues]}))


def compare_packer(
    method: str,
    packer: Packer,
    documents: Sequence[Segment],
    job: Job,
    *,
    on_progress: Callable[[int], None] = lambda documents: None,
) -> MethodResult:
    """Pack ``documents`` (at least one) in arrival order with ``packer`` and simulate the steps as ``method``.

    ``on_progress`` gets the number of documents just taken in.
    """
    simulated = _Simulated(job)
    statistics = PackingStatistics()
    trained = _TokenLedger()
    planning_seconds = 0.0
    for first in range(0, len(documents), _DOCUMENTS_AT_A_TIME):
        chunk = documents[first : first + _DOCUMENTS_AT_A_TIME]
        start = time.process_time()
        plans = packer.plan(chunk)
        planning_seconds += time.process_time() - start
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
        imbalance_degree=statistics.imbalance_degree,
        mean_token_delay=statistics.mean_token_delay,
        longest_delay=statistics.longest_delay,
        tokens_per_step_cv=statistics.tokens_per_step_cv,
        planning_ms_per_step=1e3 * planning_seconds / max(1, statistics.steps),
        as_packed=simulated.as_packed.steps,
        arranged=simulated.arranged.steps,
        attention_kept=trained.pairs / float(attended_pairs([document.length for document in documents]).sum()),
        steps=statistics.steps,
        drained_steps=len(tail),
        documents_in=len({document.document for document in documents}),
        documents_out=trained.complete(documents),
        tokens_in=sum(document.length for document in documents),
        tokens_out=statistics.tokens,
        optimality_gap=float(np.mean(gaps)) if gaps else None,
    )


class PackingStatistics:
    """Running totals over step plans; memory grows by two numbers per step.

    ``steps``, ``imbalance_degree`` and ``tokens_per_step_cv`` describe whole steps (from ``plan``); tokens and delays
    also include the tail (from ``drain``).
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
        """Standard deviation over mean of tokens per step."""
        return float(np.std(self._tokens) / np.mean(self._tokens)) if self._tokens else 0.0

    def _add_delay(self, plan: StepPlan) -> None:
        self._delay_token_steps += plan.delay_token_steps
        self.longest_delay = max(self.longest_delay, plan.longest_delay)


class _Simulated:
    """Sums over steps, ``as_packed`` and ``arranged``."""

    def __init__(self, job: Job) -> None:
        self.as_packed, self.arranged = _Sums(Rate(job.work_prices)), _Sums(Rate(job.work_prices))
        self._costs = JobCosts(job)
        self._dealt = partial(arrange, dp=job.layout.dp, assignment="arrival", order="arrival")
        self._arranged = partial(arrange, dp=job.layout.dp, assignment="balanced", order="fastest", pipeline=job.layout)

    def add(self, plans: Sequence[StepPlan], *, tail: bool = False) -> None:
        if not plans:
            return
        dealt = [self._dealt(plan) for plan in plans]
        arranged = [self._arranged(self._costs.job.priced_as_run(plan)) for plan in plans]  # as the planner does
        self.as_packed.add(dealt, Steps.of_plans(dealt, self._costs), tail)
        self.arranged.add(arranged, Steps.of_plans(arranged, self._costs), tail)


@dataclass
class _Sums:
    rate: Rate
    computing: float = 0.0  # seconds of the mean GPU
    whole_seconds: float = 0.0  # of whole steps
    balanced_seconds: float = 0.0

    def add(self, plans: Sequence[StepPlan], steps: Steps, tail: bool) -> None:
        self.rate.add(plans, steps)
        self.computing += float(steps.gpu_seconds.mean(axis=(1, 2, 3)).sum())
        if not tail:
            self.whole_seconds += float(steps.seconds.sum())
            equal = replace(steps, modelled=steps.modelled - {"micro-batches"})
            self.balanced_seconds += float(equal.seconds.sum())

    @property
    def steps(self) -> SimulatedSteps:
        seconds = self.rate.seconds
        return SimulatedSteps(
            pipeline_cost=self.whole_seconds / self.balanced_seconds if self.balanced_seconds else 1.0,
            tokens_per_second=sum(self.rate.step_tokens) / seconds,
            work_rate=self.rate.work_rate,
            busy_share=self.computing / seconds,
        )


class _TokenLedger:
    """Tokens trained of every document, and query-key pairs computed over all documents."""

    def __init__(self) -> None:
        self.pairs = 0.0
        self._tokens: dict[int, int] = {}

    def add(self, plans: Iterable[StepPlan]) -> None:
        for plan in plans:
            self.pairs += float(attended_pairs(plan.table[:, 2]).sum())
            for document, _, length in plan.segments:
                self._tokens[document] = self._tokens.get(document, 0) + length

    def complete(self, documents: Iterable[Segment]) -> int:
        """How many documents were trained in full, every token exactly once."""
        for document, _, length in documents:
            self._tokens[document] = self._tokens.get(document, 0) - length
        return sum(tokens == 0 for tokens in self._tokens.values())


def is_baseline(method: str) -> bool:
    """Whether ``method`` (``NAME`` or ``NAME:ARGUMENT``) is a baseline."""
    return method.partition(":")[0] in _FIXED_LENGTH


def colour_of(method: str) -> str:
    return BASELINE if is_baseline(method) else BALANCED


def plot_comparison(results: Sequence[MethodResult], path: Path, *, title: str) -> None:
    """The rows of ``wlb-studies packing``: speedup, imbalance degree, pipeline cost, token delay."""
    rows = compared_rows(results)
    colours = [colour_of(row.result.method) for row in rows]
    panels = (
        ("speedup, tokens per second", [row.speedup for row in rows], 0.0, "{:.2f}x"),
        ("imbalance degree (1 is perfect)", [row.result.imbalance_degree for row in rows], 1.0, "{:.3f}"),
        ("pipeline cost over perfect balance", [row.simulated.pipeline_cost for row in rows], 1.0, "{:.3f}"),
        ("mean token delay (steps)", [row.result.mean_token_delay for row in rows], 0.0, "{:.2f}"),
    )
    figure, axes = pyplot_without_display().subplots(
        1, len(panels), figsize=(16, 1.8 + 0.42 * len(rows)), sharey=True, constrained_layout=True
    )
    for axis, (label, values, origin, shown) in zip(axes, panels, strict=True):
        axis.barh(range(len(rows)), [value - origin for value in values], left=origin, color=colours)
        for place, value in enumerate(values):
            right_of = (max(value, origin), place)
            axis.annotate(shown.format(value), right_of, (4, 0), textcoords="offset points", va="center")
        reach = max(*(value - origin for value in values), 0.01)
        axis.set_xlim(min(origin, *values), origin + 1.25 * reach)
        axis.set_title(label, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows])
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    save(figure, path)
